"""Many histories, one after the other or in several processes: swarms of seeds, crash sweeps, and the
shortest story of a violation."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context, parent_process
from statistics import median_low
from time import monotonic
from typing import Any

from tests.faulty_world import Fault, Injected
from tests.histories.history import History
from tests.histories.memo import no_garbage_collection
from tests.histories.options import REGION, NemesisKind, Options, drawn_options
from tests.histories.replayer import ViolationError, in_one
from tests.histories.script import Actors, CallFault, HistoryResult, Moment, NemesisEvent, Script

_HEX = re.compile(r"(-[a-z0-9]+-[0-9a-f]{8})[0-9a-f]{56}")
MAX_RUNS = 150
TAIL = 12


def told(outcome: HistoryResult, last: int) -> list[str]:
    """The last `last` events as text."""
    return [_line(moment, outcome.objects) for moment in outcome.tail[-last:]]


def _line(moment: Moment, objects: dict[str, bytes]) -> str:
    when_s, text, key = moment
    said = _said(key, objects.get(key, b""))
    return _HEX.sub(r"\1", f"{when_s:.3f} s  {text} {key}{said}".rstrip())


def _said(key: str, data: bytes) -> str:
    kind = key.removeprefix(f"{REGION}/").partition("/")[0]
    if kind not in ("commit", "offer"):
        return ""
    try:
        record = in_one(data)
    except ValueError:
        return ": damaged"
    return f": {_commit(record) if kind == 'commit' else _offer(record)}"


def _offer(offer: dict[str, Any]) -> str:
    return f"fragment {offer['fragment']} on version {offer['base']}, data {offer['data_start']}-{offer['data_end']}"


def _commit(commit: dict[str, Any]) -> str:
    parts = [commit["kind"]]
    parts += [f"slot {commit['slot']}"] if "slot" in commit else []
    parts += [f"{item['learner']} {item['incarnation']}/{item['seq']}" for item in commit.get("inputs", ())]
    parts += [f"{item['learner']} {item['incarnation']}/{item['seq']} {item['reason']}" for item in commit["outcomes"]]
    return ", ".join(parts)


Live = Callable[[Script], HistoryResult]


@dataclass(frozen=True)
class Violation:
    """The report of a violation. `command` repeats the history that was shrunk."""

    seed: int
    invariant: str
    story: tuple[str, ...]
    command: str


def shortest(outcome: HistoryResult, live: Live) -> tuple[Script, HistoryResult]:
    """The smallest set of its faults found, in a bounded number of runs, with which the same invariant breaks. `live`:
    runs the same history with given faults only, as that of `outcome` was run."""
    found, script, runs = outcome, outcome.faulty, 0
    kept = list(range(len(script)))
    size = len(kept)
    while size >= 1 and runs < MAX_RUNS:
        removed = False
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            again = live(script.kept(fewer))
            runs += 1
            if _invariant_of(again) == _invariant_of(found):
                kept, found, removed = fewer, again, True
                break
            if runs >= MAX_RUNS:
                break
        size = min(size, len(kept)) if removed else size // 2
    return script.kept(kept), found


def _invariant_of(outcome: HistoryResult) -> str | None:
    return None if outcome.violation is None else outcome.violation.invariant


def violation_of(seed: int, options: Options, outcome: HistoryResult, command: str, live: Live) -> Violation:
    """The report of a history that broke an invariant, shrunk."""
    assert outcome.violation is not None
    script, shown = shortest(outcome, live)
    assert shown.violation is not None
    faults = [fault.describe() for fault in script.calls] + [other.describe() for other in script.nemesis_events]
    story = (
        f"seed {seed}: {options.describe()}",
        *([f"{len(faults)} faults are enough:"] if faults else ["no fault is needed:"]),
        *(f"  {fault}" for fault in faults),
        "what happened at the end:",
        *(f"  {line}" for line in told(shown, TAIL)),
        str(shown.violation),
    )
    return Violation(seed, shown.violation.invariant, story, command)


CHUNK = 10
AGAIN_EVERY = 100  # every so many seeds a history is repeated: with other wall clocks, without remembered results
MAX_VIOLATIONS = 5  # then a campaign ends
LINE_EVERY_S = 60.0
SWEEP_LEARNERS, SWEEP_MERGES = 2, 10
SWEPT_REQUESTS: tuple[NemesisKind, ...] = ("join", "rollback", "collect", "readmit")
SWEEP_TAKEOVER_S = 0.5  # so that the standby serves where the syncer dies
SWEPT = (Fault.CRASH, Fault.CRASH_AFTER)
OF_WALLS = ("time", "previous", "sum", "signature")


@dataclass
class Totals:
    """Sums over histories. `lengths`: the number of commits of each."""

    crashes: int = 0
    store_operations: int = 0
    lengths: list[int] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    def add(self, outcome: HistoryResult) -> None:
        self.crashes += outcome.crashes
        self.store_operations += outcome.operations
        self.lengths.append(outcome.commits)

    def join(self, other: Totals) -> None:
        self.crashes += other.crashes
        self.store_operations += other.store_operations
        self.lengths += other.lengths
        self.violations += other.violations

    def __str__(self) -> str:
        return (
            f"{len(self.lengths):,} histories, {sum(self.lengths):,} commits (median {median_low(self.lengths)} a "
            f"history, least {min(self.lengths)}), {self.crashes:,} crashes, {self.store_operations:,} store "
            f"operations, {len(self.violations)} violations"
        )


def say(line: str) -> None:
    """To stderr, from whichever process it is found in."""
    print(line, file=sys.stderr, flush=True)


def swarm(seeds: range, actors: Actors = Actors()) -> Totals:
    """One history a seed."""
    totals = Totals()
    for seed in seeds:
        options = drawn_options(seed)
        outcome = lived(seed, options, actors)
        totals.add(outcome)
        if outcome.violation is not None:
            command = f"python -m tests.histories --seed {seed} --histories 1"
            _tell(totals, seed, options, outcome, command, lambda script: lived(seed, options, actors, script=script))  # noqa: B023
            if len(totals.violations) >= MAX_VIOLATIONS:
                break
    return totals


def _tell(totals: Totals, seed: int, options: Options, outcome: HistoryResult, command: str, live: Live) -> None:
    say(f"seed {seed}: {outcome.violation}; looking for a shorter story of it")
    totals.violations.append(violation_of(seed, options, outcome, command, live))


def lived(
    seed: int, options: Options, actors: Actors = Actors(), other_walls: bool = False, script: Script | None = None
) -> HistoryResult:
    """One history; for every AGAIN_EVERY-th seed, or with `other_walls`, also a repetition (see `_again`)."""
    outcome = _lived_once(seed, options, script, actors)
    if outcome.violation is None and (other_walls or seed % AGAIN_EVERY == 0):
        return _again(seed, options, outcome, script, actors)
    return outcome


def _lived_once(
    seed: int,
    options: Options,
    script: Script | None = None,
    actors: Actors = Actors(),
    walls: int = 0,
    remembers: bool = True,
) -> HistoryResult:
    """One history, without Python's garbage collection: a history keeps nearly all its objects until its end."""
    with no_garbage_collection():
        return History(seed, options, script, actors, walls, remembers).live()


def _again(seed: int, options: Options, outcome: HistoryResult, script: Script | None, actors: Actors) -> HistoryResult:
    """12: with every process's wall clock shifted, the log must be the same but for its times. It must also be the
    same if results of the product's pure functions are not remembered. If the repetition itself breaks an invariant,
    that is the outcome."""
    other = _lived_once(seed, options, script, actors, walls=1, remembers=False)
    if other.violation is not None:
        return other
    if [_without_times(data) for data in other.log] != [_without_times(data) for data in outcome.log]:
        outcome.violation = ViolationError("12", "the log is another one where wall clocks show another time")
    return outcome


def _without_times(data: bytes) -> dict[str, Any]:
    return {key: value for key, value in in_one(data).items() if key not in OF_WALLS}


def swept_options(seed: int) -> Options:
    """A run without faults, small enough for a crash at each of its operations."""
    options = drawn_options(seed).without_faults()
    learners = min(SWEEP_LEARNERS, options.learners)
    return replace(
        options, learners=learners, quorum=min(options.quorum, learners), apart=min(options.apart, learners),
        syncers=1, standbys=1, merges=SWEEP_MERGES, fragments=min(2, options.fragments), latency_s=0.001,
        faulty_share=2.0, takeover_s=SWEEP_TAKEOVER_S, snapshot_every=3, kept_rounds=1, saves_every_rounds=1,
    )  # fmt: skip


def swept_script(options: Options, *crashes: CallFault) -> Script:
    """Operators make requests and an island joins, so that every role has operations to crash at."""
    span_s = options.merges * options.slot_s
    asked = enumerate(SWEPT_REQUESTS, start=1)
    return Script(crashes, tuple(NemesisEvent(0.2 * place * span_s, kind, "l0", 0.5) for place, kind in asked))


def sweep_points(seed: int, actors: Actors = Actors()) -> list[CallFault]:
    """A crash of every process at each of its operations, before and after the effect; none if the history without a
    crash breaks an invariant."""
    options = swept_options(seed)
    outcome = _lived_once(seed, options, swept_script(options), actors)
    if outcome.violation is not None:
        return []
    return [
        CallFault(name, number, Injected(kind))
        for name, operations in sorted(outcome.per_actor.items())
        for number in range(operations)
        for kind in SWEPT
    ]


def sweep(seed: int, points: Sequence[CallFault | None], actors: Actors = Actors()) -> Totals:
    """One history per crash (None: without a crash)."""
    totals, options = Totals(), swept_options(seed)
    for point in points:
        script = swept_script(options, *(() if point is None else (point,)))
        outcome = _lived_once(seed, options, script, actors)
        totals.add(outcome)
        if outcome.violation is not None:
            command = f"python -m tests.histories --sweep --seed {seed}"
            _tell(totals, seed, options, outcome, command, lambda script: _lived_once(seed, options, script, actors))
            if len(totals.violations) >= MAX_VIOLATIONS:
                break
    return totals


Work = Callable[[], Totals]


def work_of(seed: int, histories: int, sweeps: bool) -> Iterator[Work]:
    """The work, in pieces of some seconds."""
    if not sweeps:
        for first in range(seed, seed + histories, CHUNK):
            yield partial(swarm, range(first, min(first + CHUNK, seed + histories)))
        return
    for each in range(seed, seed + histories):
        points: Sequence[CallFault | None] = sweep_points(each) or [None]
        for first in range(0, len(points), CHUNK):
            yield partial(sweep, each, points[first : first + CHUNK])


def campaign(work: Iterator[Work], jobs: int) -> Totals:
    """Do all the work, or end early after MAX_VIOLATIONS. Processes are spawned, never forked."""
    if jobs == 1:
        return _joined(map(_done, work))
    with get_context("spawn").Pool(jobs, _end_with_the_parent) as pool:
        return _joined(pool.imap(_done, work))


def _joined(done: Iterator[Totals]) -> Totals:
    totals, began_s = Totals(), monotonic()
    for part in done:
        totals.join(part)
        if monotonic() - began_s > LINE_EVERY_S:
            began_s = monotonic()
            say(f"so far: {totals}")
        if len(totals.violations) >= MAX_VIOLATIONS:
            break
    return totals


def _done(work: Work) -> Totals:
    return work()


def _end_with_the_parent() -> None:
    """In a child, which would else wait for work for ever where its parent was killed."""
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()


def _leave_with_the_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
