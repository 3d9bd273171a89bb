"""Keeps the units of a run alive on this machine until the run ends, is stopped or cannot go on, or until a signal
tells this machine to leave.

The loop polls: it takes in signals and the run's state in the bucket (`SignalCount`, `Asking`) without waiting for
either, advances each unit by its state table, and leaves restarts to restart.py. `end_here` ends what runs of a run
here without its bucket.

A signal ends what runs here, and nothing else: the run goes on elsewhere, or waits in its bucket. Only Ctrl-C in a
`launch` that has the whole run on its machine also stops the run, as `diloco stop` does.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Literal

from diloco_cli.clock import monotonic_s, sleep_s, wall_s
from diloco_cli.errors import DilocoError, RefusedError, RunFailedError, UsageError
from diloco_cli.events.cause import Cause
from diloco_cli.runtime.processes import Identity, is_alive, signal_family, signal_process
from diloco_cli.runtime.registry import (
    SUPERVISOR,
    Supervised,
    UnitRecord,
    cause_path,
    hint_of,
    is_held,
    list_units,
    living_supervisor,
    log_path,
    note_supervised,
    read_cause,
    read_unit,
    run_name,
    supervisor_lock,
)
from diloco_cli.runtime.restart import (
    DONE_STATUSES,
    FENCED_STATUS,
    Exit,
    RestartPolicy,
    decide,
    describe_exit,
    exit_facts,
)
from diloco_cli.runtime.units import (
    LAST_STATES,
    UnitEvent,
    UnitSpec,
    UnitState,
    bound_log,
    next_state,
    restarted,
    start_unit,
)
from diloco_cli.store.port import StoreGoneError
from diloco_cli.store.retry import GONE_AFTER_S

SIGNAL_STATUS_BASE = 128
EventKind = Literal[
    "started", "adopted", "ended", "held", "released", "done", "failed", "stopping", "leaving", "terminated", "killed",
    "fenced",
]  # fmt: skip
Reason = Literal["finished", "stopped", "interrupted", "left", "fenced", "failed", "gone"]
ENDINGS: dict[str, Reason] = {"FINISHED": "finished", "STOPPED": "stopped"}
AGAIN = "ask again to end at once"
Facts = dict[str, str | int | float]


@dataclass(frozen=True)
class SupervisionEvent:
    """One line for people. `unit` is None if it concerns all. `data`: facts for programs; of an end `pid`, `status` and
    `lived_s`, of a start `pid` and which one it is. `cause`: what the unit itself said before its end."""

    kind: EventKind
    unit: str | None
    text: str
    data: Facts = field(default_factory=dict)
    cause: Cause | None = None


@dataclass(frozen=True)
class SupervisionResult:
    """How a supervision ended. `signum` is the signal that interrupted it; `left`: the units that ran until then."""

    reason: Reason
    signum: int | None
    left: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        if self.reason in ("interrupted", "left"):
            return SIGNAL_STATUS_BASE + (self.signum or 2)
        return FENCED_STATUS if self.reason == "fenced" else 0


@dataclass(frozen=True)
class WholeRun:
    """Of a `launch` of the whole run, which Ctrl-C may stop. `others`: islands of the run that are no units here, as
    the log said last; `request_stop` asks the bucket, and may be slow or fail."""

    others: Callable[[], Collection[str]]
    request_stop: Callable[[], object]


@dataclass(frozen=True)
class StopPolicy:
    """Bounds of a clean end, from its beginning; together below 10 s, but `finish_s` more where the run is over: units
    then leave by themselves, a learner after its present step, a syncer after its regions have all.

    Units that can read in the bucket that the run has ended, or will stop, have `leave_s` before they get
    SIGTERM; if no stop request was written, they get it at once. Where this machine leaves, learners get it at once,
    and drain; syncers get it once the learners have gone, or after `drain_s`, as they may merge their last offers. A
    unit that lives after `kill_s` gets SIGKILL. Where the bucket is gone, nothing can be drained: `gone_kill_s`.
    """

    finish_s: float = 30.0
    leave_s: float = 4.0
    drain_s: float = 6.0
    kill_s: float = 8.0
    gone_kill_s: float = 2.0
    give_up_s: float = 9.5


@dataclass(frozen=True)
class Ending:
    """The reason for the end, and its times on the monotonic clock."""

    reason: Reason
    text: str
    terminate_at_s: float
    syncers_at_s: float
    kill_at_s: float
    give_up_at_s: float

    def terminates(self, kind: str, learners_live: bool, now_s: float) -> bool:
        """Whether a unit of this kind gets SIGTERM now."""
        return now_s >= (self.syncers_at_s if kind == "syncer" and learners_live else self.terminate_at_s)


def begin_ending(reason: Reason, text: str, now_s: float, delay_s: float, policy: StopPolicy) -> Ending:
    """An ending whose SIGTERM comes after `delay_s`."""
    at_s = now_s + delay_s
    return Ending(reason, text, at_s, at_s, now_s + policy.kill_s, now_s + policy.give_up_s)


def ending_after_a_signal(
    before: Ending | None, signum: int, whole_run: bool, away: Collection[str], now_s: float, policy: StopPolicy
) -> Ending:
    """The ending that a first signal begins. `whole_run`: this is a `launch` of all regions in the foreground; `away`:
    islands and units of the run that do not live here. The end of a run that is over already is not prolonged."""
    if before is not None:
        fresh = begin_ending("interrupted", f"asked to leave; {AGAIN}", now_s, 0.0, policy)
        return replace(fresh, kill_at_s=min(fresh.kill_at_s, before.kill_at_s))
    if signum == signal.SIGINT and whole_run and not away:
        text = f"stopping the run: all of it is here; {AGAIN}"
        return begin_ending("interrupted", text, now_s, policy.leave_s, policy)
    why = f"{signal.Signals(signum).name} ends what runs here"
    if signum == signal.SIGINT and whole_run:
        why = f"{listed(away)} {'is' if len(away) == 1 else 'are'} not alive here"
    elif signum == signal.SIGINT:
        why = "Ctrl-C stops a run only in the `launch` that has all of it"
    return replace(begin_ending("left", why, now_s, 0.0, policy), syncers_at_s=now_s + policy.drain_s)


def listed(names: Collection[str]) -> str:
    """`a, b and c`."""
    *most, last = names or ("nothing",)
    return f"{', '.join(most)} and {last}" if most else last


def drain_text(why: str, learners: Collection[str], syncers: Collection[str]) -> str:
    """The line that says what goes on while this machine leaves: `learners` and `syncers` that live here."""
    steps = []
    if learners:
        steps.append(f"{listed(learners)} {'offers its' if len(learners) == 1 else 'offer their'} last deltas")
    if syncers:
        steps.append(f"{'then ' if learners else ''}{listed(syncers)} {'ends' if len(syncers) == 1 else 'end'}")
    return f"{why}: {', '.join(steps) or 'nothing lives here'}; the run itself goes on. {AGAIN.capitalize()}"


class SignalCount:
    """Counts signals to stop. An ignored signal stays ignored (`nohup`). Only the main thread can count signals. A
    SIGHUP counts as the first one only: a terminal that closes may send several, and a second signal kills."""

    signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalCount:
        if threading.current_thread() is threading.main_thread():
            for signum in self.signals:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP and self.count:
            return
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
        self._gone_since_s: float | None = None
        self.trouble: str | None = None
        self.gone: StoreGoneError | None = None

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

    def gone_for_s(self) -> float:
        """For how long there has been no such bucket, as far as the calls show; `gone` is their error."""
        return 0.0 if self._gone_since_s is None else monotonic_s() - self._gone_since_s

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
                self.trouble = self.gone = self._gone_since_s = None
            except StoreGoneError as error:
                self.trouble, self.gone = str(error), error
                self._gone_since_s = monotonic_s() if self._gone_since_s is None else self._gone_since_s
            except DilocoError as error:
                self.trouble = str(error)
            except Exception as error:
                self._bug = error
                self._ended.set()
            self._answered.set()
            self._ended.wait(self._every_s)


class InBackground:
    """One call in a thread; `trouble`: why it failed."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.trouble: str | None = None
        threading.Thread(target=self._run, args=(call,), name="once", daemon=True).start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            # The units are ended by signals all the same; the supervisor reports the error.
            self.trouble = f"{type(error).__name__}: {error}"


MAX_EXITS_KEPT = 200


class SupervisedUnit:
    """Mechanism only: the supervisor and the restart policy decide what to do, and when."""

    def __init__(self, url: str, spec: UnitSpec) -> None:
        self.url = url
        self.spec = spec
        self.state = UnitState.STARTING
        self.exits: deque[Exit] = deque(maxlen=MAX_EXITS_KEPT)
        self.starts = 0
        self.restart_at_s = 0.0
        self.reason = ""
        self._told: set[int] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._record: UnitRecord | None = None
        self.dead_pid: int | None = None
        self._alive_since_s = 0.0

    @property
    def ended(self) -> bool:
        return self.state in LAST_STATES

    @property
    def held(self) -> bool:
        return is_held(self.url, self.spec.name)

    @property
    def pid(self) -> int | None:
        return self._record.identity.pid if self._record else None

    def account(self) -> Supervised:
        """For other commands on this machine."""
        last_end = describe_exit(self.exits[-1]) if self.exits else ""
        return Supervised(self.state, self.starts, self.reason, last_end)

    def go(self, event: UnitEvent, reason: str) -> None:
        self.state = next_state(self.state, event)
        self.reason = reason

    def adopt(self) -> bool:
        """Takes over the process of an earlier supervisor, if it still lives."""
        record = read_unit(self.url, self.spec.name)
        if not isinstance(record, UnitRecord) or not is_alive(record.identity):
            return False
        self._child, self._record = None, record
        self._alive_since_s = monotonic_s() - max(0.0, wall_s() - record.started_s)
        self.starts += 1
        return True

    def start(self) -> None:
        self._child, self._record = start_unit(self.url, restarted(self.spec, self.dead_pid))
        self._alive_since_s = monotonic_s()
        self.starts += 1

    def poll(self) -> Exit | None:
        """The exit, if its process has ended since the last call. Processes that it left behind are ended too."""
        if self._record is None:
            return None
        status = self._child.poll() if self._child else None
        if status is None and (self._child or is_alive(self._record.identity)):
            return None
        signal_family(self._record.identity, signal.SIGKILL)
        self.dead_pid = self._record.identity.pid
        self._child, self._record = None, None
        now_s, cause = monotonic_s(), read_cause(cause_path(self.url, self.spec.name), self.dead_pid)
        return Exit(now_s, status, max(0.0, now_s - self._alive_since_s), cause)

    def terminate(self) -> bool:
        """Send SIGTERM, and SIGCONT, so that a paused process gets it. Only once: False after that."""
        return self._signal_once(signal.SIGTERM, signal.SIGCONT)

    def kill(self) -> bool:
        return self._signal_once(signal.SIGKILL)

    def _signal_once(self, *signums: int) -> bool:
        if self._record is None or self._told.issuperset(signums):
            return False
        self._told.update(signums)
        reached = False
        with suppress(RefusedError):  # it ended just now, perhaps by the first of these signals: the next poll sees it
            for signum in signums:
                signal_process(self._record.identity, signum)
                reached = True
        return reached


LAST_ANSWER_S = 2.0  # how long to wait for the bucket, once all units have left
AFTER_DECISION: dict[str, tuple[UnitEvent, EventKind]] = {
    "restart": (UnitEvent.DIED, "ended"),
    "done": (UnitEvent.FINISHED, "done"),
    "give_up": (UnitEvent.GAVE_UP, "failed"),
}


def supervise(
    url: str,
    units: Sequence[UnitSpec],
    *,
    run_state: Callable[[], str],
    on_event: Callable[[SupervisionEvent], None],
    whole_run: WholeRun | None = None,
    signals: SignalCount | None = None,
    poll_s: float = 0.2,
    state_every_s: float = 1.0,
    restart: RestartPolicy = RestartPolicy(),
    stop: StopPolicy = StopPolicy(),
    gone_after_s: float = GONE_AFTER_S,
) -> SupervisionResult:
    """Starts (or adopts) every unit, restarts what dies, and returns when all have ended.

    `run_state` tells the state of the run in the bucket: FINISHED or STOPPED ends the supervision,
    any other text does not; it is asked in a thread and may be slow or raise a declared error. The first
    SIGINT, SIGTERM or SIGHUP ends the units of this machine: learners drain, then syncers end; the run goes on. Only
    SIGINT may stop the run, if `whole_run` is given and all of the run lives here. A second signal kills the units.
    `signals`: for a caller outside the main thread, which gets none.
    Raises RunFailedError if all syncers, or all learners, ended too often, StoreGoneError if the bucket has been gone
    for `gone_after_s`, and RefusedError if another supervisor of the run lives on this machine.
    """
    _check(units)
    with supervisor_lock(url), signals or SignalCount() as heard, Asking(run_state, state_every_s) as asking:
        supervisor = Supervisor(url, units, asking, heard, on_event, whole_run, restart, stop, gone_after_s)
        return supervisor.run(poll_s)


class Supervisor:
    """The loop behind `supervise`. Every decision on a single unit is `restart.decide`'s."""

    def __init__(
        self,
        url: str,
        units: Sequence[UnitSpec],
        asking: Asking,
        signals: SignalCount,
        on_event: Callable[[SupervisionEvent], None],
        whole_run: WholeRun | None,
        restart: RestartPolicy,
        stop: StopPolicy,
        gone_after_s: float,
    ) -> None:
        self.units = [SupervisedUnit(url, spec) for spec in units]
        self._url = url
        self._asking = asking
        self._signals = signals
        self._on_event = on_event
        self._whole_run = whole_run
        self._restart = restart
        self._stop, self._gone_after_s = stop, gone_after_s
        self._ending: Ending | None = None
        self._heard = 0
        self._request: InBackground | None = None
        self._left: tuple[str, ...] = ()

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
        """Begins an ending if the signals, the run's state or a bucket that is gone ask for one; a second signal kills
        at once."""
        now_s, ending = monotonic_s(), self._ending
        gone, over = self._asking.gone, ENDINGS.get(self._asking.answer or "")
        if self._signals.count > max(1, self._heard):
            ending = ending or begin_ending("left", "asked twice", now_s, 0.0, self._stop)
            kill_at_s = min(now_s, ending.kill_at_s)
            self._ending = replace(ending, terminate_at_s=now_s, syncers_at_s=now_s, kill_at_s=kill_at_s)
        elif self._signals.count > self._heard and (ending is None or ending.reason != "gone"):
            self._begin(self._ending_by_signal(self._signals.first or signal.SIGTERM, now_s))
        elif ending is None and over is not None:
            from_s = now_s + (self._stop.finish_s if over == "finished" else 0.0)
            text = f"the run is {self._asking.answer}"
            self._begin(begin_ending(over, text, from_s, self._stop.leave_s, self._stop))
        elif ending is None and gone is not None and self._asking.gone_for_s() >= self._gone_after_s:
            text = f"{gone}, for {self._asking.gone_for_s():.0f} s now"
            self._begin(self._without_bucket(begin_ending("gone", text, now_s, 0.0, self._stop)))
        self._heard = self._signals.count

    def _ending_by_signal(self, signum: int, now_s: float) -> Ending:
        if self._ending is None and self._asking.gone is not None:
            text = f"{self._asking.gone}: nothing can be drained"
            return self._without_bucket(begin_ending("left", text, now_s, 0.0, self._stop))
        whole, living = self._whole_run, self._living()
        away = [unit.spec.name for unit in self.units if unit.spec.name not in living]
        away += [] if whole is None else whole.others()
        return ending_after_a_signal(self._ending, signum, whole is not None, away, now_s, self._stop)

    def _without_bucket(self, ending: Ending) -> Ending:
        """All units get SIGTERM now, and SIGKILL soon."""
        return replace(ending, kill_at_s=ending.terminate_at_s + self._stop.gone_kill_s)

    def _begin(self, ending: Ending) -> None:
        self._left = self._living()
        if ending.reason == "left" and self._asking.gone is None:
            learners, syncers = self._living("learner"), self._living("syncer")
            self._tell("leaving", None, drain_text(ending.text, learners, syncers))
        else:
            if self._ending is None and ending.reason == "interrupted" and self._whole_run is not None:
                self._request = InBackground(self._whole_run.request_stop)
            self._tell("stopping", None, ending.text)
        self._ending = ending

    def _living(self, kind: str | None = None) -> tuple[str, ...]:
        alive = (unit.spec for unit in self.units if unit.state is UnitState.RUNNING)
        return tuple(spec.name for spec in alive if kind in (None, spec.kind))

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
            hint = f"held down; `diloco chaos revive {unit.spec.name} --run {self._url}` brings it back"
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
            self._settle(unit, Exit(monotonic_s(), error.exit_status, 0.0), str(error))
            return
        again = f", restart {unit.starts - 1}" if unit.starts > 1 else ""
        facts: Facts = {"pid": unit.pid or 0, "start": unit.starts}
        self._move(unit, UnitEvent.SPAWNED, "started", f"process {unit.pid}{again}", facts)

    def _settle(self, unit: SupervisedUnit, life: Exit, detail: str | None = None) -> None:
        """Decides what follows the end of a unit's process. `detail`: why it could not be started."""
        unit.exits.append(life)
        if detail is None and life.cause is not None:
            detail = life.cause.text
        facts = exit_facts(life, unit.dead_pid)
        if self._ending is not None:
            self._move(unit, UnitEvent.FINISHED, "done", describe_exit(life), facts, life.cause)
        elif unit.held and life.status not in DONE_STATUSES:
            self._move(unit, UnitEvent.HOLD, "held", f"{describe_exit(life)}; held down", facts, life.cause)
        else:
            decision = decide(tuple(unit.exits), monotonic_s(), self._restart, bool(unit.spec.later))
            reason = f"{detail}; {decision.reason}" if detail else decision.reason
            unit.restart_at_s = decision.at_s or 0.0
            event, kind = AFTER_DECISION[decision.action]
            self._move(unit, event, kind, reason, facts, life.cause)
            if unit.spec.kind == "syncer" and life.status == FENCED_STATUS:
                here = f"no syncer here any more; one that waits for its turn: `diloco syncer --standby {self._url}`"
                here = "this one stands by from now on" if unit.spec.later else here
                self._tell("fenced", unit.spec.name, f"another syncer serves the run: {here}")

    def _move(
        self, unit: SupervisedUnit, event: UnitEvent, kind: EventKind, reason: str,
        facts: Facts | None = None, cause: Cause | None = None,
    ) -> None:  # fmt: skip
        unit.go(event, reason)
        note_supervised(self._url, {unit.spec.name: unit.account() for unit in self.units})
        self._tell(kind, unit.spec.name, reason, facts, cause)

    def _bound_logs(self) -> None:
        for name in (SUPERVISOR, *(unit.spec.name for unit in self.units)):
            with suppress(OSError):  # a log that is missing or cannot be cut does no harm
                bound_log(log_path(self._url, name))

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
            self._begin(begin_ending("failed", text, monotonic_s(), 0.0, self._stop))

    def _hasten(self) -> bool:
        """Terminates, then kills units that are slow to leave. True if some are left and the time is up."""
        ending, now_s = self._ending, monotonic_s()
        if ending is None:
            return False
        unasked = ending.reason == "interrupted" and (self._request is None or self._request.trouble is not None)
        learners_live = bool(self._living("learner"))
        for unit in (unit for unit in self.units if unit.state is UnitState.RUNNING):
            if now_s >= ending.kill_at_s:
                if unit.kill():
                    self._tell("killed", unit.spec.name, "SIGKILL")
            elif (unasked or ending.terminates(unit.spec.kind, learners_live, now_s)) and unit.terminate():
                self._tell("terminated", unit.spec.name, "SIGTERM")
        return now_s >= ending.give_up_at_s

    def _pause_s(self, poll_s: float) -> float:
        """Until the next poll, or until the next unit is due, if that is earlier."""
        due = [unit.restart_at_s - monotonic_s() for unit in self.units if unit.state is UnitState.BACKOFF]
        return max(0.0, min([poll_s, *due]))

    def _tell(
        self, kind: EventKind, unit: str | None, text: str, facts: Facts | None = None, cause: Cause | None = None
    ) -> None:
        try:
            self._on_event(SupervisionEvent(kind, unit, text, facts or {}, cause))
        except OSError:
            # The terminal is gone (its SIGHUP is handled elsewhere); lost output must not stop the supervision.
            self._on_event = lambda event: None

    def _outcome(self) -> SupervisionResult:
        failed = [unit for unit in self.units if unit.state is UnitState.FAILED]
        reason = self._ending.reason if self._ending else self._reason_of_leaving(bool(failed))
        reason = "fenced" if reason == "left" and self._all_fenced else reason
        if reason == "gone" and self._asking.gone is not None:
            raise _bucket_gone(self._url, self._asking.gone)
        if reason == "failed":
            raise _run_failed(self._url, failed)
        if self._request is not None and self._request.trouble:
            self._tell("stopping", None, f"the stop request was not written: {self._request.trouble}")
        return SupervisionResult(reason, self._signals.first, self._left)

    def _reason_of_leaving(self, any_failed: bool) -> Reason:
        """Why all units have left by themselves, by the run's state in the bucket."""
        state = self._asking.fresh_answer(LAST_ANSWER_S)
        if state in ENDINGS:
            return ENDINGS[state]
        if any_failed:
            return "failed"
        return "fenced" if self._all_fenced else "stopped"

    @property
    def _all_fenced(self) -> bool:
        """Whether others have the places of all of them."""
        return {unit.exits[-1].status for unit in self.units if unit.exits} == {FENCED_STATUS}


def _check(units: Sequence[UnitSpec]) -> None:
    if not units:
        raise UsageError("there is no unit to supervise")
    names = [unit.name for unit in units]
    twice = sorted({name for name in names if names.count(name) > 1} | ({SUPERVISOR} & set(names)))
    if twice:
        raise UsageError(f"names of units must be unique and not reserved: {', '.join(twice)}")


def _bucket_gone(url: str, error: StoreGoneError) -> StoreGoneError:
    return StoreGoneError(
        f"the bucket of run {run_name(url)} is gone ({error.message}): what ran here has ended, for good",
        where=error.where,
        hint=f"if you can bring it back: {error.hint}; then diloco resume {url}",
    )


def _run_failed(url: str, failed: Sequence[SupervisedUnit]) -> RunFailedError:
    reasons = "; ".join(f"{unit.spec.name}: {unit.reason}" for unit in failed)
    name = failed[0].spec.name if failed else ""
    cause = failed[0].exits[-1].cause if failed and failed[0].exits else None
    return RunFailedError(f"run {run_name(url)} cannot go on: {reasons}", hint=hint_of(url, name, cause))


SUPERVISOR_ENDS_S = 4.0  # it ends its units; a second signal makes it kill them
UNIT_ENDS_S = 1.0
POLL_S = 0.05


def end_here(url: str) -> list[str]:
    """Ends the supervisor first, which would start units again, then units that live on. Returns who lived."""
    supervisor = living_supervisor(url)
    found = {} if supervisor is None else {SUPERVISOR: supervisor}
    found |= {unit.name: unit.identity for unit in list_units(url) if is_alive(unit.identity)}
    if supervisor is not None:
        for _ in range(2):
            _signal(supervisor, signal.SIGTERM)
            if _wait(lambda: not is_alive(supervisor), SUPERVISOR_ENDS_S):
                break
    for signum in (signal.SIGTERM, signal.SIGKILL):
        living = [identity for identity in found.values() if is_alive(identity)]
        for identity in living:
            _signal(identity, signum)
        if _wait(lambda living=living: not any(map(is_alive, living)), UNIT_ENDS_S):  # type: ignore[misc]
            break
    return list(found)


def _signal(identity: Identity, signum: int) -> None:
    with suppress(RefusedError):  # it has ended
        signal_process(identity, signum)


def _wait(holds: Callable[[], bool], within_s: float) -> bool:
    until_s = monotonic_s() + within_s
    while not holds():
        if monotonic_s() >= until_s:
            return False
        sleep_s(POLL_S)
    return True
