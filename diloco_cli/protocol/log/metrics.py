"""Figures for people only: a run's counts, its curve of losses, its newest merges and notes, its pace. Folded from the
same commits as the state; no decision depends on them.

The pace of a window of merges is the tokens of their offers over its time, each offer counted in full, so it does not
depend on the sizes of fragments. What a run does for WINDOWS in a row it sustains: one window alone shows nothing,
because the offers that piled up during an outage are merged as fast as the syncer can. A best pace is that of so many
learners, so it says nothing of fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from diloco_cli.protocol.log.records import Outcome

WINDOW_MERGES, WINDOW_S = 10, 5.0  # at least
WINDOWS = 5
MAX_BESTS = 16


class Sustained(Struct, frozen=True):
    """Of the present window: `since` its beginning ("": none has begun), `tokens`, `merges`, `alive` at most. `last`:
    seconds and tokens of the window before. `rates`: tokens per second of the newest windows, `crews`: learners alive
    in each. `bests`: (learners alive, tokens per second sustained), both rising: what fewer did as fast is not there
    for more."""

    since: str = ""
    tokens: int = 0
    merges: int = 0
    alive: int = 0
    last: tuple[float, int] = (0.0, 0)
    rates: tuple[float, ...] = ()
    crews: tuple[int, ...] = ()
    bests: tuple[tuple[int, float], ...] = ()

    def best(self, learners: int) -> float:
        """The best pace that at most so many learners sustained; 0: none yet."""
        return max((rate for crew, rate in self.bests if crew <= learners), default=0.0)

    def share_of_best(self, so_far_s: float, learners: int) -> float | None:
        """The present pace over the best that at most so many learners sustained; `so_far_s`: of the present window.
        None: it cannot be said yet."""
        seconds, tokens, best = self.last[0] + so_far_s, self.last[1] + self.tokens, self.best(learners)
        return tokens / seconds / best if best and self.last[0] else None

    def merged(self, time: str, tokens: int, alive: int) -> Sustained:
        """After one more merge of so many tokens."""
        if not self.since:
            return replace(self, since=time)
        tokens, merges, alive = self.tokens + tokens, self.merges + 1, max(self.alive, alive)
        seconds = _seconds(self.since, time)
        if seconds < 0:  # another clock: begin anew
            return Sustained(since=time, bests=self.bests)
        if merges < WINDOW_MERGES or seconds < WINDOW_S:
            return replace(self, tokens=tokens, merges=merges, alive=alive)
        rates, crews = (*self.rates, tokens / seconds)[-WINDOWS:], (*self.crews, alive)[-WINDOWS:]
        bests = _with_best(self.bests, max(crews), min(rates)) if len(rates) == WINDOWS else self.bests
        return Sustained(time, last=(seconds, tokens), rates=rates, crews=crews, bests=bests)


def _with_best(bests: tuple[tuple[int, float], ...], crew: int, rate: float) -> tuple[tuple[int, float], ...]:
    if any(others <= crew and best >= rate for others, best in bests):
        return bests
    kept = [(others, best) for others, best in bests if others < crew or best > rate]
    return tuple(sorted([*kept, (crew, rate)])[-MAX_BESTS:])


def _seconds(earlier: str, later: str) -> float:
    """Below 0 for what is no time."""
    try:
        return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except (ValueError, TypeError):
        return -1.0


RECENT_MERGES = 10
RECENT_NOTES = 20
MAX_LOSSES = 512
Point = TypeVar("Point")
REFUSED, SKIP = "refused", "skip"
SUMMED_UP_S = 600.0
QUIET_OUTCOMES = ("superseded", "run_over", "before_rollback", "quarantined")  # many at a time, and said elsewhere


class MergeNote(Struct, frozen=True):
    """One of the last merges. `tokens` are the run's merged tokens after it."""

    n: int
    slot: int
    time: str
    participants: tuple[str, ...]
    alive: int
    quorum: int
    grace_s: float
    grace_used_s: float
    tokens: int


class Note(Struct, frozen=True):
    """Something that people should see in `status`. `kind`: that of the commit, or `refused`, whose text is the reason.
    One note sums up `count` refusals or skips, the first of them at `since`."""

    time: str
    kind: str
    unit: str
    text: str
    count: int = 1
    since: str = ""


class LastDelta(Struct, frozen=True):
    """A learner's newest merged delta: how many times as long as usual it was before clipping (health.py; 0: there was
    nothing to compare it with), and its cosine to the merge's others."""

    times_usual: float
    cosine: float


class Metrics(Struct, frozen=True):
    """`losses`: (merged tokens, held-out loss in nats per token), in the order of tokens. `deltas`: by learner. The
    counts of merges, skips and offers include those that a rollback has undone. `stopped_at`: since when the run is at
    rest, "" if it is not; `rested_s`: how long it was before; `resumed_at`: when that ended last."""

    started_at: str = ""
    updated_at: str = ""
    skips: int = 0
    offers_applied: int = 0
    offers_refused: int = 0
    participation_sum: float = 0.0
    losses: tuple[tuple[int, float], ...] = ()
    recent_merges: tuple[MergeNote, ...] = ()
    notes: tuple[Note, ...] = ()
    sustained: Sustained = Sustained()
    deltas: dict[str, LastDelta] = field(default_factory=dict)
    stopped_at: str = ""
    resumed_at: str = ""
    rested_s: float = 0.0

    def begun(self, time: str) -> Metrics:
        """After the commit with which a syncer begins to serve."""
        begun = replace(self, sustained=Sustained(bests=self.sustained.bests))
        if not self.stopped_at:
            return begun
        rested_s = self.rested_s + max(0.0, _seconds(self.stopped_at, time))
        return replace(begun, stopped_at="", resumed_at=time, rested_s=rested_s)

    @property
    def loss(self) -> float | None:
        """The newest one."""
        return self.losses[-1][1] if self.losses else None


def noted(
    notes: tuple[Note, ...], time: str, kind: str, told: Iterable[tuple[str, str]], outcomes: Iterable[Outcome]
) -> tuple[Note, ...]:
    """The notes after a commit of this kind, which tells (unit, text). Refusals of one learner for one reason, within
    SUMMED_UP_S, are one note, and so are skips: there may be many, and other notes must stay."""
    refusals: dict[tuple[str, str], int] = {}  # in the order of the last times
    for outcome in outcomes:
        if outcome.reason not in QUIET_OUTCOMES:
            what = outcome.learner, outcome.reason
            refusals[what] = refusals.pop(what, 0) + 1
    for (learner, reason), count in list(refusals.items())[-RECENT_NOTES:]:  # earlier ones would be pushed out
        notes = _summed_up(notes, Note(time, REFUSED, learner, reason, count, since=time))
    for unit, text in told:
        notes = (
            _summed_up(notes, Note(time, kind, unit, text, since=time))
            if kind == SKIP
            else (*notes, Note(time, kind, unit, text))
        )
    return notes


def _summed_up(notes: tuple[Note, ...], note: Note) -> tuple[Note, ...]:
    """The notes and one more, which takes the place of an earlier one of the same. Times are only stated."""
    for known in notes:
        is_same = (known.kind, known.unit) == (note.kind, note.unit) and (known.text == note.text or known.kind == SKIP)
        if is_same and 0 <= _seconds(known.since, note.time) < SUMMED_UP_S:
            others = tuple(other for other in notes if other is not known)
            return (*others, replace(note, count=known.count + note.count, since=known.since))
    return (*notes, note)


def thinned(points: Iterable[Point], most: int, at: Callable[[Point], float]) -> list[Point]:
    """A bounded curve of the whole run: when it is full, half as many stay, as far apart by `at` as that allows. (To
    let every second one go would thin the beginning again each time.)"""
    found = list(points)
    if len(found) <= most:
        return found
    apart, kept = 2 * abs(at(found[-1]) - at(found[0])) / most, found[:1]
    for point in found[1:-1]:
        if abs(at(point) - at(kept[-1])) >= apart:
            kept.append(point)
    return [*kept, found[-1]] if len(kept) < most else [*found[:-1:2], found[-1]]
