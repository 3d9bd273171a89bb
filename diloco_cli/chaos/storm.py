"""A scenario carried out on the units of a run that live on this machine: `diloco chaos run`.

Rails: units by identity alone, as for a single fault; `min_alive` and `max_concurrent` count what really lives at that
moment. Everything heals: in time, at the storm's end however it ends, and by a guardian (a process that notices the
storm's death by its pipe). What both left behind is healed by the next chaos command: the journal says what is open,
and a lock whether its storm still lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from threading import Thread
from types import MappingProxyType

from diloco_cli.chaos.actions import (
    END_S,
    READY,
    JournalEntry,
    execute_at_once,
    is_ready,
    plan_disturbance,
    plan_kill,
    plan_pause,
    read_entries,
    record,
    refusal,
    revive,
)
from diloco_cli.chaos.faults import Fault, Target, end_disturbance, find_target, list_targets
from diloco_cli.clock import monotonic_s, sleep_s, wall_s
from diloco_cli.errors import DilocoError, RefusedError, StoreError, TryAgainError
from diloco_cli.events.bucket import tell_event
from diloco_cli.faults import FAULTS, SUPERVISOR, Injection, Scenario
from diloco_cli.paths import make_directory
from diloco_cli.protocol.actors.requests import stop_stands
from diloco_cli.protocol.log.commit_log import read_format, read_log
from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES, LearnerHeartbeat, process_on
from diloco_cli.protocol.log.keys import heartbeat_key
from diloco_cli.protocol.log.records import RecordError, decode
from diloco_cli.protocol.log.state import LearnerState
from diloco_cli.runtime.consent import signing_secret
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.runtime.processes import ranks_of
from diloco_cli.runtime.registry import living_supervisor, run_directory, run_name
from diloco_cli.runtime.units import Child, end_all, start_successor
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.wrappers import Deadline, TimeBoxedStore

DONE = "done"
REAL = tuple(kind for kind, fault in FAULTS.items() if not fault.not_real)
POLL_S = 0.1
HEALS_WITHIN_S = 60.0  # after the storm: a supervisor waits longer before each restart of a unit
LOOKS_WITHIN_S = 2.0  # at what learners have said
LOADS, SILENT = "does not train yet", f"the bucket did not say within {LOOKS_WITHIN_S:.0f} s"
GONE_S = 10.0  # without any process of the run: it is over


@dataclass
class Strike:
    """One fault on one unit. `t_s`: planned, from the storm's start; `at_s`, `healed_at_s`: when it was there, and when
    its unit lived again, on the wall clock. `healed`: None if the run was over first. `skipped`: why it did not
    happen."""

    number: int
    t_s: float
    kind: str
    target: str
    injected: bool = False
    verified: bool = False
    healed: bool | None = False
    skipped: str = ""
    at_s: float | None = None
    healed_at_s: float | None = None


@dataclass
class _Open:
    """A strike that is not healed yet. `ends_s`: when its cause is taken away, from the storm's start; None: it was."""

    strike: Strike
    entry: JournalEntry
    ends_s: float | None


class Storm:
    """Carries out a timetable. `say` gets a line for each thing that happens."""

    def __init__(
        self, url: str, scenario: Scenario, seed: int, faults: Sequence[Injection], say: Callable[[str], None]
    ) -> None:
        self.url, self.scenario, self.seed, self.faults, self._say = url, scenario, seed, faults, say
        self.began_s, self.ended_s = wall_s(), 0.0  # on the wall clock
        self.strikes: list[Strike] = []
        self._start_s, self._open, self._alive_s = monotonic_s(), list[_Open](), monotonic_s()
        self._starting: list[Thread] = []
        self._trained = set[tuple[str, int | None]]()

    def run(self) -> None:
        """Until the scenario's end, or the run's. However it ends, what it did is healed."""
        with _guardian(self.url), storm_lock(self.url):  # the guardian heals once the lock is gone
            heal_left(self.url)
            self.began_s, self._start_s = wall_s(), monotonic_s()
            try:
                self._carry_out()
                self._await_healing()
            except KeyboardInterrupt:
                self._say("interrupted: what is still broken is healed now")
                raise
            finally:
                self._heal(inf)
                for thread in self._starting:
                    thread.join()

    def _carry_out(self) -> None:
        pending = deque(self.faults)
        while self._now_s() < self.scenario.duration_s and not self._is_over():
            self._heal(self._now_s())
            while pending and pending[0].at_s <= self._now_s():
                self._strike(pending.popleft())
            sleep_s(POLL_S)
        self.ended_s = wall_s()
        for fault in pending:
            self._skip(fault, "the run was over before")

    def _now_s(self) -> float:
        return monotonic_s() - self._start_s

    def _is_over(self) -> bool:
        """No process of the run has lived here for a while, and none is kept down."""
        kept_down = any(one.ends_s is not None for one in self._open)
        if kept_down or any(target.condition in ("running", "paused") for target in list_targets(self.url)):
            self._alive_s = monotonic_s()
        return monotonic_s() - self._alive_s > GONE_S

    # -- injecting ----------------------------------------------------------------------------------------------

    def _strike(self, fault: Injection) -> None:
        targets = list_targets(self.url)
        looks = self.scenario.constraints.min_alive or fault.kind not in ("kill", "pause")
        unready = not_training(self.url, targets, self._trained) if looks else {}
        reason = fault.skipped or forbidden(fault, targets, self.scenario, unready)
        if reason:
            self._skip(fault, reason)
            return
        struck = [Strike(fault.number, fault.at_s, fault.kind, name) for name in fault.targets]
        self.strikes += struck
        self._inject(struck, fault)
        for strike in struck:  # a bucket may take its time, and they are struck at once
            self._tell(strike, strike.skipped or ("verified" if strike.verified else "sent, but it did not happen"))
            if strike.injected:
                what = f"on purpose (storm {self.scenario.name} #{fault.number}): {fault.kind} {strike.target}"
                tell_event(self.url, "chaos", strike.target, what, {"number": fault.number, "fault": fault.kind})

    def _inject(self, struck: Sequence[Strike], fault: Injection) -> None:
        planned = dict[str, Fault]()
        for strike in struck:
            try:
                planned[strike.target] = self._planned(strike.target, fault)
            except RefusedError as error:
                strike.skipped = error.message
        at_s, ends_s = wall_s(), self._now_s() + (fault.revive_after_s or fault.for_s or 0.0)
        done = dict(zip(planned, execute_at_once([*planned.values()], self.seed), strict=True))
        for strike in struck:
            entry = done.get(strike.target)
            if isinstance(entry, JournalEntry):
                strike.injected, strike.verified, strike.at_s = True, bool(entry.verified), at_s
                self._open.append(_Open(strike, entry, ends_s))
            elif entry is not None:
                strike.skipped = entry.message

    def _planned(self, name: str, fault: Injection) -> Fault:
        if fault.kind == "pause":
            return plan_pause(self.url, name, for_s=fault.for_s)
        if fault.kind != "kill":
            return plan_disturbance(self.url, name, fault.kind, fault.for_s or 0.0, fault.factor, fault.share)
        return plan_kill(self.url, name, hold=fault.revive_after_s is not None and name != SUPERVISOR)

    def _skip(self, fault: Injection, reason: str) -> None:
        for name in fault.targets:
            self.strikes.append(Strike(fault.number, fault.at_s, fault.kind, name, skipped=reason))
            self._tell(self.strikes[-1], reason)

    def _tell(self, strike: Strike, what: str) -> None:
        how = "skipped: " if strike.skipped else ""
        self._say(f"{self._now_s():8.1f} s  #{strike.number:<3} {strike.kind} {strike.target}: {how}{what}")

    # -- healing ------------------------------------------------------------------------------------------------

    def _heal(self, now_s: float) -> None:
        """Take away what has lasted long enough; note which units live again."""
        for one in list(self._open):
            if one.ends_s is not None and one.ends_s <= now_s:
                if one.strike.target == SUPERVISOR:  # it takes its time, in which others are to be healed
                    self._starting.append(Thread(target=self._end, args=(one,), daemon=True))
                    self._starting[-1].start()
                else:
                    self._end(one)
                one.ends_s = None
            target = find_target(self.url, one.strike.target)
            if one.ends_s is None and target.condition == "running" and not target.disturbed:
                one.strike.healed, one.strike.healed_at_s = True, wall_s()
                record(self.url, one.entry, healed=True)
                self._open.remove(one)
                self._tell(one.strike, "it runs again")

    def _end(self, one: _Open) -> None:
        """A unit that cannot be healed keeps no other one from it."""
        try:
            heal_unit(self.url, one.strike.target)
        except (DilocoError, OSError) as error:
            self._tell(one.strike, f"not healed: {error}")

    def _await_healing(self) -> None:
        until_s = monotonic_s() + HEALS_WITHIN_S
        while self._open and monotonic_s() < until_s:
            self._heal(inf)
            if self._is_over():
                for one in self._open:
                    one.strike.healed = None
                return
            sleep_s(POLL_S)


def not_training(url: str, targets: Sequence[Target], trained: set[tuple[str, int | None]]) -> dict[str, str]:
    """By name, why the learners here are not known to train. `trained`: names and processes of those that have said so:
    a process does not load twice, so the bucket is asked for others alone."""
    store, why = TimeBoxedStore(open_store(url), Deadline(LOOKS_WITHIN_S)), dict[str, str]()
    for target in targets:
        if target.kind == "learner" and (target.name, target.pid) not in trained:
            try:
                trains = _trains(store, target)
            except (StoreError, RecordError):
                why[target.name] = SILENT
                continue
            if trains:
                trained.add((target.name, target.pid))
            else:
                why[target.name] = LOADS
    return why


def _trains(store: Store, target: Target) -> bool:
    key, pid = heartbeat_key(target.name), target.pid
    data = store.get(key, MAX_HEARTBEAT_BYTES)
    said = None if data is None else decode(LearnerHeartbeat, data, key)
    own = () if pid is None else (pid, *(facts.pid for facts in ranks_of(pid)))
    here = {process_on(os.uname().nodename, pid) for pid in own}
    loads = (LearnerState.STARTING, LearnerState.RECOVERING)
    return said is not None and said.process in here and said.state not in loads


def forbidden(
    fault: Injection, targets: Sequence[Target], scenario: Scenario, unready: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The rail that the fault would break as things are now, as text; empty if there is none. `unready`: learners that
    are not known to train, and why."""
    limits = scenario.constraints
    running = {target.name for target in targets if target.condition == "running" and not target.disturbed}
    left = {target.name for target in targets if target.kind == "learner"} & running - {*fault.targets, *unready}
    if len(left) < limits.min_alive:
        silent = sorted(name for name, why in unready.items() if why == SILENT)
        also = f"; of {', '.join(silent)} {SILENT}" if silent else ""
        return f"fewer than {limits.min_alive} learners would train here{also}"
    if fault.kind not in ("kill", "pause"):
        for why, told in ((LOADS, f"{LOADS}, and has no calls to disturb"), (SILENT, f"may not train yet: {SILENT}")):
            if named := sorted(name for name in fault.targets if unready.get(name) == why):
                return f"{', '.join(named)} {told}"
    here = {target.name for target in targets if target.condition != "unknown"}
    away = (here - running) | set(fault.targets)
    if limits.max_concurrent is not None and len(away) > limits.max_concurrent:
        return f"more than {limits.max_concurrent} units would be disturbed at once"
    return ""


def refuse_untouchable(url: str) -> None:
    """Raises RefusedError if nothing of the run may be killed on this machine, or nobody would restart it."""
    targets = [target for target in list_targets(url) if target.kind != SUPERVISOR]
    reasons = [refusal("kill", target) for target in targets]
    if all(reasons):
        why = reasons[0] if reasons else "none was started here: jobs are broken one at a time, in their job"
        hint = f"see them: diloco chaos list --run {url}"
        raise RefusedError(f"run {run_name(url)} has no unit that may be killed on this machine: {why}", hint=hint)
    if living_supervisor(url) is None:
        message = f"no supervisor of run {run_name(url)} lives here that would restart what a storm kills"
        raise RefusedError(message, hint=f"diloco resume {url} --detach")


def heal_unit(url: str, name: str) -> None:
    """End its pause or its hold; a dead supervisor gets a successor, but not in a run that was stopped meanwhile."""
    target = find_target(url, name)
    if name != SUPERVISOR:
        end_disturbance(url, name)
    if target.condition == "paused" or target.held:
        revive(target)
    elif name == SUPERVISOR and living_supervisor(url) is None and not _is_stopped(url):
        start_successor(url)


def _is_stopped(url: str) -> bool:
    """Whether the run was stopped, or asked to stop: `diloco resume` would withdraw that."""
    store, clock = open_store(url), SystemClock(monotonic_s, sleep_s, lambda: None)
    run = perform(read_format(url, signing_secret()), store, clock)
    stops: bool = perform(stop_stands(run, perform(read_log(run), store, clock)), store, clock)
    return stops


def heal_left(url: str) -> None:
    """Heal what a storm that has died left behind. The caller holds the lock."""
    for entry in read_entries(url):
        if entry.seed is not None and entry.injected is not False and entry.healed is None:
            try:
                heal_unit(url, entry.target)
            except (DilocoError, OSError):
                record(url, entry, healed=False)
            else:
                record(url, entry, healed=True)


def heal_after_death(url: str) -> bool:
    """As every chaos command begins; whether no storm lives."""
    try:
        with storm_lock(url, make=False):
            heal_left(url)
    except FileNotFoundError:
        return True
    except TryAgainError:
        return False
    return True


@contextmanager
def storm_lock(url: str, make: bool = True) -> Iterator[None]:
    """One storm of a run at a time on this machine. Raises TryAgainError. The kernel unlocks it on any death."""
    if make:
        make_directory(run_directory(url))
    descriptor = os.open(run_directory(url) / "storm.lock", os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TryAgainError(f"another storm of run {run_name(url)} goes on on this machine") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _guardian(url: str) -> Iterator[None]:
    child = Child("diloco_cli.chaos.storm", apart=True)
    try:
        child.tell(url)
        if not is_ready(child):
            raise TryAgainError("the process that would heal after this one's death did not start; nothing was done")
        try:
            yield
        except TryAgainError:  # another storm has the lock: nothing was done
            child.tell(DONE)
            raise
        child.tell(DONE)
    finally:
        end_all([child], END_S)


def main() -> None:
    """The guardian's side: the pipe ends without a word if the storm has died; its lock follows in a moment."""
    url = json.loads(sys.stdin.readline())
    print(json.dumps(READY), flush=True)
    is_over, until_s = DONE in sys.stdin.read(), monotonic_s() + END_S
    while not is_over and not heal_after_death(url) and monotonic_s() < until_s:
        sleep_s(POLL_S)


if __name__ == "__main__":
    main()
