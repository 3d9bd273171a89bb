"""Keeps the units of a run alive on this machine until the run ends, is stopped, or cannot go on.

It takes in signals (`SignalCount`) and the run's state in the bucket (`Asking`) without waiting for either.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.errors import DilocoError, RunFailedError, UsageError
from diloco_cli.runtime.registry import SUPERVISOR, log_path, supervisor_lock
from diloco_cli.runtime.restart import (
    DONE_STATUSES,
    ENDINGS,
    FENCED_STATUS,
    Ending,
    EventKind,
    Exit,
    Reason,
    RestartPolicy,
    StopPolicy,
    SupervisionEvent,
    SupervisionResult,
    begin_ending,
    decide,
    describe_exit,
    next_ending,
)
from diloco_cli.runtime.supervised import SupervisedUnit
from diloco_cli.runtime.units import UnitEvent, UnitSpec, UnitState, bound_log

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST_ANSWER_S = 2.0  # how long to wait for the bucket, once all units have left
AFTER_DECISION: dict[str, tuple[UnitEvent, EventKind]] = {
    "restart": (UnitEvent.DIED, "ended"),
    "done": (UnitEvent.FINISHED, "done"),
    "give_up": (UnitEvent.GAVE_UP, "failed"),
}


class SignalCount:
    """Counts signals to stop. An ignored signal stays ignored (`nohup`). Only the main thread can count signals."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalCount:
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signum


class Asking:
    """Calls `ask` again and again in a thread, so that a slow store never delays a restart."""

    def __init__(self, ask: Callable[[], str], every_s: float) -> None:
        self._ask = ask
        self._every_s = every_s
        self._ended = threading.Event()
        self._answered = threading.Event()
        self._bug: Exception | None = None
        self._thread = threading.Thread(target=self._loop, name="run-state", daemon=True)
        self._answer: str | None = None
        self.trouble: str | None = None

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    @property
    def answer(self) -> str | None:
        """The latest answer, None before the first; raises an undeclared error of `ask`, because that is a bug."""
        if self._bug is not None:
            raise self._bug
        return self._answer

    def fresh_answer(self, timeout_s: float) -> str | None:
        """An answer to a question asked after this call, or the latest one if none comes in time."""
        for _ in range(2):  # the first answer may come from a call of `ask` that began before
            self._answered.clear()
            self._answered.wait(timeout_s / 2)
        return self.answer

    def _loop(self) -> None:
        while not self._ended.is_set():
            try:
                self._answer = self._ask()
                self.trouble = None
            except DilocoError as error:
                self.trouble = str(error)
            except Exception as error:
                self._bug = error
                self._ended.set()
            self._answered.set()
            self._ended.wait(self._every_s)


class OnceInBackground:
    """One call in a thread; `trouble` is why it failed."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.trouble: str | None = None
        self._thread = threading.Thread(target=self._run, name="request-stop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:
            # The units are stopped by signals all the same; the supervisor reports the error.
            self.trouble = f"{type(error).__name__}: {error}"


def supervise(
    run_name: str,
    units: Sequence[UnitSpec],
    *,
    run_state: Callable[[], str],
    on_event: Callable[[SupervisionEvent], None],
    request_stop: Callable[[], object] | None = None,
    signals: SignalCount | None = None,
    poll_s: float = 0.2,
    state_every_s: float = 1.0,
    restart: RestartPolicy = RestartPolicy(),
    stop: StopPolicy = StopPolicy(),
) -> SupervisionResult:
    """Starts (or adopts) every unit, restarts what dies, and returns when all have ended.

    `run_state` tells the state of the run in the bucket: FINISHED or STOPPED ends the supervision,
    any other text does not; it is asked in a thread and may be slow or raise a declared error. The first
    SIGINT, SIGTERM or SIGHUP calls `request_stop`, also in a thread, and waits for the units to leave, with
    signals in the end; the second kills them. `signals`: for a caller outside the main thread, which gets none.
    Raises RunFailedError if all syncers, or all learners, ended too often, and RefusedError if another
    supervisor of the run lives on this machine.
    """
    _check(units)
    with supervisor_lock(run_name), signals or SignalCount() as heard, Asking(run_state, state_every_s) as asking:
        return Supervisor(run_name, units, asking, heard, on_event, request_stop, restart, stop).run(poll_s)


class Supervisor:
    """The loop behind `supervise`. Every decision on a single unit is `restart.decide`'s."""

    def __init__(
        self,
        run_name: str,
        units: Sequence[UnitSpec],
        asking: Asking,
        signals: SignalCount,
        on_event: Callable[[SupervisionEvent], None],
        request_stop: Callable[[], object] | None,
        restart: RestartPolicy,
        stop: StopPolicy,
    ) -> None:
        self.units = [SupervisedUnit(run_name, spec) for spec in units]
        self._run_name = run_name
        self._asking = asking
        self._signals = signals
        self._on_event = on_event
        self._request_stop = request_stop
        self._restart = restart
        self._stop = stop
        self._ending: Ending | None = None
        self._request: OnceInBackground | None = None

    def run(self, poll_s: float) -> SupervisionResult:
        while True:
            self._listen()
            for unit in self.units:
                self._advance(unit)
            self._bound_logs()
            self._notice_failure()
            if all(unit.ended for unit in self.units) or self._hasten():
                break
            sleep_s(self._pause_s(poll_s))
        return self._outcome()

    def _listen(self) -> None:
        """Begins an ending if the signals or the run's state ask for one."""
        ending = next_ending(self._ending, self._signals.count, self._asking.answer, monotonic_s(), self._stop)
        if ending is None:
            return
        if self._ending is None and ending.reason == "interrupted" and self._request_stop is not None:
            self._request = OnceInBackground(self._request_stop)
        if self._ending is None or self._ending.reason != ending.reason:
            self._tell("stopping", None, ending.text)
        self._ending = ending

    def _advance(self, unit: SupervisedUnit) -> None:
        """One step of one unit, by its state."""
        if unit.state is UnitState.RUNNING:
            life = unit.poll()
            if life is not None:
                self._settle(unit, life)
        elif self._ending is not None and not unit.ended:
            unit.go(UnitEvent.RUN_OVER, self._ending.text)
        elif unit.state is UnitState.HELD:
            if not unit.held:
                self._move(unit, UnitEvent.RELEASED, "released", "no longer held")
        elif unit.state in {UnitState.STARTING, UnitState.BACKOFF} and unit.held:
            hint = f"held down; `diloco chaos revive {unit.spec.name}` brings it back"
            self._move(unit, UnitEvent.HOLD, "held", hint)
        elif unit.state is UnitState.BACKOFF and monotonic_s() >= unit.restart_at_s:
            unit.go(UnitEvent.DUE, unit.reason)
        if unit.state is UnitState.STARTING and not unit.held and self._ending is None:
            self._start(unit)

    def _start(self, unit: SupervisedUnit) -> None:
        try:
            if unit.starts == 0 and unit.adopt():
                self._move(unit, UnitEvent.SPAWNED, "adopted", f"process {unit.pid} of an earlier supervisor")
                return
            unit.start()
        except DilocoError as error:
            self._settle(unit, unit.note(Exit(monotonic_s(), error.exit_status, 0.0)), str(error))
            return
        self._move(unit, UnitEvent.SPAWNED, "started", f"process {unit.pid}")

    def _settle(self, unit: SupervisedUnit, life: Exit, detail: str | None = None) -> None:
        """Decides what follows the end of a unit's process."""
        if self._ending is not None:
            self._move(unit, UnitEvent.FINISHED, "done", describe_exit(life))
        elif unit.held and life.status not in DONE_STATUSES:
            self._move(unit, UnitEvent.HOLD, "held", f"{describe_exit(life)}; held down")
        else:
            decision = decide(tuple(unit.exits), monotonic_s(), self._restart, bool(unit.spec.later))
            reason = f"{detail}; {decision.reason}" if detail else decision.reason
            unit.restart_at_s = decision.at_s or 0.0
            event, kind = AFTER_DECISION[decision.action]
            self._move(unit, event, kind, reason)
            if unit.spec.kind == "syncer" and life.status == FENCED_STATUS:
                here = f"no syncer here any more; `diloco resume {self._run_name}` takes over"
                here = "this one stands by from now on" if unit.spec.later else here
                self._tell("fenced", unit.spec.name, f"another syncer serves the run: {here}")

    def _move(self, unit: SupervisedUnit, event: UnitEvent, kind: EventKind, reason: str) -> None:
        unit.go(event, reason)
        self._tell(kind, unit.spec.name, reason)

    def _bound_logs(self) -> None:
        for name in (SUPERVISOR, *(unit.spec.name for unit in self.units)):
            with suppress(OSError):  # a log that is missing or cannot be cut does no harm
                bound_log(log_path(self._run_name, name))

    def _notice_failure(self) -> None:
        """Fails the run if all its learners, or all its syncers, have failed."""
        if self._ending is not None:
            return
        failed = [unit for unit in self.units if unit.state is UnitState.FAILED]
        learners = [unit for unit in self.units if unit.spec.kind == "learner"]
        syncers = [unit for unit in self.units if unit.spec.kind == "syncer"]
        if any(kind and all(unit.state is UnitState.FAILED for unit in kind) for kind in (learners, syncers)):
            names = ", ".join(unit.spec.name for unit in failed)
            text = f"cannot go on without {names}"
            self._ending = begin_ending("failed", text, monotonic_s(), 0.0, self._stop)
            self._tell("stopping", None, text)

    def _hasten(self) -> bool:
        """Terminates, then kills units that are slow to leave. True if some are left and the time is up."""
        ending, now_s = self._ending, monotonic_s()
        if ending is None:
            return False
        unasked = self._request is None or self._request.trouble is not None
        late = now_s >= ending.terminate_at_s or (ending.reason == "interrupted" and unasked)
        for unit in (unit for unit in self.units if unit.state is UnitState.RUNNING):
            if now_s >= ending.kill_at_s:
                if unit.kill():
                    self._tell("killed", unit.spec.name, "SIGKILL")
            elif late and unit.terminate():
                self._tell("terminated", unit.spec.name, "SIGTERM")
        return now_s >= ending.give_up_at_s

    def _pause_s(self, poll_s: float) -> float:
        """Until the next poll, or until the next unit is due, if that is earlier."""
        due = [unit.restart_at_s - monotonic_s() for unit in self.units if unit.state is UnitState.BACKOFF]
        return max(0.0, min([poll_s, *due]))

    def _tell(self, kind: EventKind, unit: str | None, text: str) -> None:
        try:
            self._on_event(SupervisionEvent(kind, unit, text))
        except OSError:
            # The terminal is gone (its SIGHUP is handled elsewhere); lost output must not stop the supervision.
            self._on_event = lambda event: None

    def _outcome(self) -> SupervisionResult:
        failed = [unit for unit in self.units if unit.state is UnitState.FAILED]
        reason = self._ending.reason if self._ending else self._reason_of_leaving(bool(failed))
        if reason == "failed":
            raise _run_failed(self._run_name, failed)
        if self._request is not None and self._request.trouble:
            self._tell("stopping", None, f"the stop request was not written: {self._request.trouble}")
        return SupervisionResult(reason, self._signals.first)

    def _reason_of_leaving(self, any_failed: bool) -> Reason:
        """Why all units have left by themselves, by the run's state in the bucket."""
        state = self._asking.fresh_answer(LAST_ANSWER_S)
        if state in ENDINGS:
            return ENDINGS[state]
        if any_failed:
            return "failed"
        statuses = {unit.exits[-1].status for unit in self.units if unit.exits}
        return "fenced" if statuses == {FENCED_STATUS} else "stopped"


def _check(units: Sequence[UnitSpec]) -> None:
    if not units:
        raise UsageError("there is no unit to supervise")
    names = [unit.name for unit in units]
    twice = sorted({name for name in names if names.count(name) > 1} | ({SUPERVISOR} & set(names)))
    if twice:
        raise UsageError(f"names of units must be unique and not reserved: {', '.join(twice)}")


def _run_failed(run_name: str, failed: Sequence[SupervisedUnit]) -> RunFailedError:
    reasons = "; ".join(f"{unit.spec.name}: {unit.reason}" for unit in failed)
    names = failed[0].spec.name if failed else ""
    return RunFailedError(
        f"run {run_name} cannot go on: {reasons}",
        hint=f"read `diloco logs {names} --run {run_name}`, then `diloco resume {run_name}`",
    )
