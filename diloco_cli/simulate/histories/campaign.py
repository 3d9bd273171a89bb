"""Many histories, one after the other or in several processes: swarms of seeds, and crash sweeps."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, get_context
from typing import Any

from diloco_cli.simulate.faulty_calls import Fault, Injected
from diloco_cli.simulate.histories.history import Actors, History, Outcome
from diloco_cli.simulate.histories.options import DisturbanceKind, Options, drawn_options
from diloco_cli.simulate.histories.replayer import ViolationError
from diloco_cli.simulate.histories.script import CallFault, Disturbance, Script
from diloco_cli.simulate.histories.shrinking import Violation, violation_of

CHUNK = 10
WALLS_EVERY = 10  # each so many-th seed is lived through again with other wall clocks
MOST_VIOLATIONS = 5  # then a campaign ends: there is work to do
SWEEP_LEARNERS, SWEEP_MERGES = 2, 8
SWEPT_REQUESTS: tuple[DisturbanceKind, ...] = ("join", "collect", "rollback", "lift")
SWEEP_TAKEOVER_S = 0.5  # so that the standby serves where the syncer dies
SWEPT = (Fault.CRASH, Fault.CRASH_AFTER)
OF_WALLS = ("time", "previous")


@dataclass
class Totals:
    """Of so many histories."""

    histories: int = 0
    commits: int = 0
    crashes: int = 0
    store_operations: int = 0
    violations: list[Violation] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.histories += 1
        self.commits += outcome.commits
        self.crashes += outcome.crashes
        self.store_operations += outcome.operations

    def join(self, other: Totals) -> None:
        self.histories += other.histories
        self.commits += other.commits
        self.crashes += other.crashes
        self.store_operations += other.store_operations
        self.violations += other.violations


def swarm(seeds: range, actors: Actors = Actors()) -> Totals:
    """One history a seed."""
    totals = Totals()
    for seed in seeds:
        options = drawn_options(seed)
        outcome = lived(seed, options, actors)
        totals.add(outcome)
        if outcome.violation is not None:
            command = f"diloco simulate protocol --seed {seed} --histories 1"
            totals.violations.append(violation_of(seed, options, outcome, command, actors))
            if len(totals.violations) >= MOST_VIOLATIONS:
                break
    return totals


def lived(seed: int, options: Options, actors: Actors = Actors(), other_walls: bool = False) -> Outcome:
    """One history; where its turn is, or `other_walls` says so, a second time with other wall clocks."""
    outcome = History(seed, options, actors=actors).live()
    if outcome.violation is None and (other_walls or seed % WALLS_EVERY == 0):
        outcome.violation = _other_walls(seed, options, outcome, actors)
    return outcome


def _other_walls(seed: int, options: Options, outcome: Outcome, actors: Actors) -> ViolationError | None:
    """12: with every process's wall clock shifted, the log says the same, but for the times that it notes."""
    other = History(seed, options, actors=actors, walls=1).live()
    same = [_without_times(data) for data in other.log] == [_without_times(data) for data in outcome.log]
    return None if same else ViolationError("12", "the log is another one where wall clocks show another time")


def _without_times(data: bytes) -> dict[str, Any]:
    return {key: value for key, value in json.loads(data).items() if key not in OF_WALLS}


def swept_options(seed: int) -> Options:
    """A run without any fault, small enough to die at each of its operations."""
    options = drawn_options(seed).without_faults()
    learners = min(SWEEP_LEARNERS, options.learners)
    return replace(
        options, learners=learners, quorum=min(options.quorum, learners), syncers=1, standbys=1, merges=SWEEP_MERGES,
        fragments=min(2, options.fragments), latency_s=0.001, faulty_share=2.0, takeover_s=SWEEP_TAKEOVER_S,
        snapshot_every=3, kept_rounds=1, saves_every_rounds=1,
    )  # fmt: skip


def swept_script(options: Options, *crashes: CallFault) -> Script:
    """Operators ask for something, and an island joins: so that every role has operations to die at."""
    span_s = options.merges * options.slot_s
    asked = enumerate(SWEPT_REQUESTS, start=1)
    return Script(crashes, tuple(Disturbance(0.2 * place * span_s, kind, "l0", 0.5) for place, kind in asked))


def sweep_points(seed: int, actors: Actors = Actors()) -> list[CallFault]:
    """A crash of every process at each of its operations, before and after the effect."""
    options = swept_options(seed)
    outcome = History(seed, options, swept_script(options), actors).live()
    if outcome.violation is not None:
        raise outcome.violation
    return [
        CallFault(name, number, Injected(kind))
        for name, operations in sorted(outcome.per_actor.items())
        for number in range(operations)
        for kind in SWEPT
    ]


def sweep(seed: int, points: list[CallFault], actors: Actors = Actors()) -> Totals:
    """One history a crash."""
    totals, options = Totals(), swept_options(seed)
    for point in points:
        outcome = History(seed, options, swept_script(options, point), actors).live()
        totals.add(outcome)
        if outcome.violation is not None:
            command = f"diloco simulate protocol --sweep --seed {seed} --histories 1"
            totals.violations.append(violation_of(seed, options, outcome, command, actors))
            if len(totals.violations) >= MOST_VIOLATIONS:
                break
    return totals


Work = tuple[Callable[..., Totals], tuple[Any, ...]]


def work_of(seed: int, histories: int, sweeps: bool) -> Iterator[Work]:
    """What is to be done, in pieces of some seconds."""
    if not sweeps:
        for first in range(seed, seed + histories, CHUNK):
            yield swarm, (range(first, min(first + CHUNK, seed + histories)),)
        return
    for each in range(seed, seed + histories):
        points = sweep_points(each)
        for first in range(0, len(points), CHUNK):
            yield sweep, (each, points[first : first + CHUNK])


def campaign(work: Iterator[Work], jobs: int, report: Callable[[Totals], None]) -> Totals:
    """All of it, or until some violations are found. `report` is told how far it is. Interrupted, it ends cleanly."""
    totals = Totals()
    pieces = _in_turn(work) if jobs == 1 else _in_processes(work, jobs)
    for done in pieces:
        totals.join(done)
        report(totals)
        if len(totals.violations) >= MOST_VIOLATIONS:
            pieces.close()
            break
    totals.violations.sort(key=lambda violation: violation.seed)
    return totals


def _in_turn(work: Iterator[Work]) -> Generator[Totals, None, None]:
    for run, arguments in work:
        yield run(*arguments)


def _in_processes(work: Iterator[Work], jobs: int) -> Generator[Totals, None, None]:
    """Spawned, never forked. Two pieces a process are handed out ahead, so that a sweep's list is never held whole."""
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_leave_interrupts_to_the_parent) as pool:
        waiting: set[Future[Totals]] = set()
        try:
            for run, arguments in work:
                waiting.add(pool.submit(run, *arguments))
                if len(waiting) >= 2 * jobs:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in waiting)
            waiting = set()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children() if waiting else ():  # nobody waits for what they do
                child.terminate()


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
