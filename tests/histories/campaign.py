"""Many histories, one after the other or in several processes: swarms of seeds, crash sweeps, and the
shortest story of a violation."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, get_context, parent_process
from typing import Any

from diloco_cli.errors import UsageError
from diloco_cli.virtual.faulty_calls import Fault, Injected
from tests.histories.history import History
from tests.histories.memo import no_garbage_collection
from tests.histories.options import PIECE_SIZES, REGION, NemesisKind, Options, drawn_options
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
AHEAD = 4  # pieces of work handed out in advance, per process
AGAIN_EVERY = 100  # every so many seeds a history is repeated: with other wall clocks, without remembered results
MAX_VIOLATIONS = 5  # then a campaign ends
SWEEP_LEARNERS, SWEEP_MERGES = 2, 10
SWEPT_REQUESTS: tuple[NemesisKind, ...] = ("join", "rollback", "collect", "readmit")
SWEEP_TAKEOVER_S = 0.5  # so that the standby serves where the syncer dies
SWEPT = {"before": Fault.CRASH, "after": Fault.CRASH_AFTER}
OF_WALLS = ("time", "previous", "sum", "signature")


@dataclass
class Totals:
    """Sums over histories. `lengths`: the number of histories by their number of commits. `next_seed`: all seeds before
    it are done; `interrupted`: an interrupt ended the campaign."""

    next_seed: int = 0
    histories: int = 0
    commits: int = 0
    crashes: int = 0
    store_operations: int = 0
    violations: list[Violation] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    interrupted: bool = False

    @property
    def shortest(self) -> int:
        """Commits of the shortest history."""
        return min(self.lengths, default=0)

    @property
    def median(self) -> int:
        """Commits of a history in the median."""
        half, seen = (self.histories + 1) // 2, 0
        for length in sorted(self.lengths):
            seen += self.lengths[length]
            if seen >= half:
                return length
        return 0

    def add(self, outcome: HistoryResult) -> None:
        self.histories += 1
        self.commits += outcome.commits
        self.crashes += outcome.crashes
        self.store_operations += outcome.operations
        self.lengths[outcome.commits] += 1

    def join(self, other: Totals) -> None:
        self.next_seed = max(self.next_seed, other.next_seed)
        self.histories += other.histories
        self.commits += other.commits
        self.crashes += other.crashes
        self.store_operations += other.store_operations
        self.violations += other.violations
        self.lengths += other.lengths


Tell = Callable[[str], None]


def _silently(line: str) -> None:
    return


def say(line: str) -> None:
    """To stderr, from whichever process it is found in."""
    print(line, file=sys.stderr, flush=True)


def swarm(seeds: range, tell: Tell = _silently, actors: Actors = Actors()) -> Totals:
    """One history a seed. `tell` is called at once for a violation, because shrinking it takes a while."""
    totals = Totals()
    for seed in seeds:
        options = drawn_options(seed)
        outcome = lived(seed, options, actors)
        totals.add(outcome)
        totals.next_seed = seed + 1
        if outcome.violation is not None:
            command = f"python -m tests.histories --seed {seed} --histories 1"
            live = _life_of(seed, options, actors)
            totals.violations.append(_told_of(seed, options, outcome, command, live, tell))
            if len(totals.violations) >= MAX_VIOLATIONS:
                break
    return totals


def _life_of(seed: int, options: Options, actors: Actors) -> Live:
    return lambda script: lived(seed, options, actors, script=script)


def _told_of(seed: int, options: Options, outcome: HistoryResult, command: str, live: Live, tell: Tell) -> Violation:
    tell(f"seed {seed}: {outcome.violation}; looking for a shorter story of it")
    return violation_of(seed, options, outcome, command, live)


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
    that is the outcome. How long a snapshot is depends on wall clocks (metrics.py: notes of 10 minutes are one), so
    where it lies in small pieces, these show the same time again."""
    walls = 0 if options.piece_bytes in PIECE_SIZES else 1
    other = _lived_once(seed, options, script, actors, walls, remembers=False)
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
        for kind in SWEPT.values()
    ]


def sweep(
    seed: int, points: Sequence[CallFault | None], last: bool = True, tell: Tell = _silently, actors: Actors = Actors()
) -> Totals:
    """One history per crash (None: without a crash). `last`: these are the last crashes of the seed."""
    totals, options = Totals(seed), swept_options(seed)
    for point in points:
        crashes = () if point is None else (point,)
        outcome = _lived_once(seed, options, swept_script(options, *crashes), actors)
        totals.add(outcome)
        if outcome.violation is not None:
            command = f"python -m tests.histories --sweep --seed {seed}{_at(point)}"
            live = _swept_life_of(seed, options, actors)
            totals.violations.append(_told_of(seed, options, outcome, command, live, tell))
            if len(totals.violations) >= MAX_VIOLATIONS:
                break
    if last and totals.histories == len(points):
        totals.next_seed = seed + 1
    return totals


def _at(point: CallFault | None) -> str:
    """The text of the command's option for this crash alone (see `point_at`)."""
    if point is None:
        return ""
    when = next(when for when, kind in SWEPT.items() if kind is point.fault.kind)
    return f" --at {point.actor}:{point.operation}:{when}"


def point_at(text: str) -> CallFault:
    """`l0.1:3:after`: a crash of l0's first process after its operation number 3. Raises UsageError."""
    actor, _, rest = text.partition(":")
    number, _, when = rest.partition(":")
    if not (actor and number.isdecimal() and when in SWEPT):
        raise UsageError(f"no operation of a sweep: {text!a}", hint="--at l0.1:3:before")
    return CallFault(actor, int(number), Injected(SWEPT[when]))


def _swept_life_of(seed: int, options: Options, actors: Actors) -> Live:
    return lambda script: _lived_once(seed, options, script, actors)


Work = tuple[Callable[..., Totals], tuple[Any, ...]]


def work_of(
    seed: int, histories: int, sweeps: bool, tell: Tell = _silently, only: CallFault | None = None
) -> Iterator[Work]:
    """The work, in pieces of some seconds. `only`: of one seed's sweep this crash alone."""
    if only is not None:
        yield sweep, (seed, [only], True, tell)
        return
    if not sweeps:
        for first in range(seed, seed + histories, CHUNK):
            yield swarm, (range(first, min(first + CHUNK, seed + histories)), tell)
        return
    for each in range(seed, seed + histories):
        points: Sequence[CallFault | None] = sweep_points(each) or [None]
        for first in range(0, len(points), CHUNK):
            yield sweep, (each, points[first : first + CHUNK], first + CHUNK >= len(points), tell)


def campaign(work: Iterator[Work], jobs: int, report: Callable[[Totals], None]) -> Totals:
    """Do all the work, or end early after MAX_VIOLATIONS or an interrupt, with the totals so far. `report` gets the
    totals from time to time."""
    totals = Totals()
    pieces = _in_turn(work) if jobs == 1 else _in_processes(work, jobs)
    try:
        for done in pieces:
            totals.join(done)
            report(totals)
            if len(totals.violations) >= MAX_VIOLATIONS:
                break
    except KeyboardInterrupt:
        totals.interrupted = True
    pieces.close()
    return totals


def _in_turn(work: Iterator[Work]) -> Generator[Totals, None, None]:
    for run, arguments in work:
        yield run(*arguments)


def _in_processes(work: Iterator[Work], jobs: int) -> Generator[Totals, None, None]:
    """Work in processes that are spawned, never forked, with results in the order of the work, so that the seeds done
    have no gaps. AHEAD pieces per process are handed out in advance, and never all."""
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_serve_the_parent) as pool:
        waiting: deque[Future[Totals]] = deque()
        try:
            for run, arguments in work:
                waiting.append(pool.submit(run, *arguments))
                if len(waiting) >= AHEAD * jobs:
                    yield waiting[0].result()
                    waiting.popleft()
            while waiting:
                yield waiting[0].result()
                waiting.popleft()
        finally:
            for child in active_children() if waiting else ():  # their results are not needed
                child.terminate()
            pool.shutdown(cancel_futures=True)


def _serve_the_parent() -> None:
    """In a child: leave interrupts to the parent, and end when the parent ends for any reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()


def _leave_with_the_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
