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

from diloco_cli.protocol.log import commits
from diloco_cli.protocol.log.health import NOTHING, Known, times_usual
from diloco_cli.signing import short_key

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


def sustained_after(known: Sustained, commit: commits.Commit) -> Sustained:
    match commit:
        case commits.Merge():
            return _merged(known, commit)
        case commits.EpochStart() | commits.Rollback() | commits.Stop():  # what follows is not the same stretch
            return Sustained(bests=known.bests)
    return known


def _merged(known: Sustained, commit: commits.Merge) -> Sustained:
    if not known.since:
        return replace(known, since=commit.time)
    tokens, merges = known.tokens + sum(item.tokens for item in commit.inputs), known.merges + 1
    alive = max(known.alive, commit.alive, len(commit.inputs))
    seconds = _seconds(known.since, commit.time)
    if seconds < 0:  # another clock: begin anew
        return Sustained(since=commit.time, bests=known.bests)
    if merges < WINDOW_MERGES or seconds < WINDOW_S:
        return replace(known, tokens=tokens, merges=merges, alive=alive)
    rates, crews = (*known.rates, tokens / seconds)[-WINDOWS:], (*known.crews, alive)[-WINDOWS:]
    bests = _with_best(known.bests, max(crews), min(rates)) if len(rates) == WINDOWS else known.bests
    return Sustained(commit.time, last=(seconds, tokens), rates=rates, crews=crews, bests=bests)


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


def share_of_best(known: Sustained, so_far_s: float, learners: int) -> float | None:
    """The present pace over the best that at most so many learners sustained; `so_far_s`: of the present window. None:
    it cannot be said yet."""
    seconds, tokens, best = known.last[0] + so_far_s, known.last[1] + known.tokens, known.best(learners)
    return tokens / seconds / best if best and known.last[0] else None


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
    nothing to compare it with), and its cosine to the merged one."""

    times_usual: float
    cosine: float


class Metrics(Struct, frozen=True):
    """`losses`: (merged tokens, held-out loss in nats per token), in the order of tokens. `deltas`: by learner. The
    counts of merges, skips and offers include those that a rollback has undone."""

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

    @property
    def loss(self) -> float | None:
        """The newest one."""
        return self.losses[-1][1] if self.losses else None


def metrics_after(metrics: Metrics, commit: commits.Commit, tokens: int, known: Known = NOTHING) -> Metrics:
    """The metrics after one more commit. `tokens`: the merged tokens after it; `known`: of a merge, what was remembered
    of its fragment's lengths before it."""
    metrics = replace(
        metrics,
        updated_at=commit.time,
        started_at=metrics.started_at or commit.time,
        offers_applied=metrics.offers_applied + len(commit.inputs),
        offers_refused=metrics.offers_refused + len(commit.outcomes),
        notes=_noted(metrics.notes, commit)[-RECENT_NOTES:],
        sustained=sustained_after(metrics.sustained, commit),
    )
    match commit:
        case commits.Merge():
            share = len(commit.inputs) / max(1, commit.alive, len(commit.inputs))
            merges = (*metrics.recent_merges, _merge_note(commit, tokens))[-RECENT_MERGES:]
            return replace(
                metrics,
                participation_sum=metrics.participation_sum + share,
                recent_merges=merges,
                deltas=metrics.deltas | _last_deltas(commit, known),
            )
        case commits.Skip():
            return replace(metrics, skips=metrics.skips + 1)
        case commits.Evaluation() if commit.loss is not None:
            losses = (*metrics.losses, (commit.tokens, commit.loss))
            return replace(metrics, losses=tuple(thinned(losses, MAX_LOSSES, _tokens)))
        case commits.Rollback():
            losses = tuple(point for point in metrics.losses if point[0] <= tokens)
            return replace(metrics, losses=losses, recent_merges=())
    return metrics


def _last_deltas(commit: commits.Merge, known: Known) -> dict[str, LastDelta]:
    times = times_usual(known, commit.inputs)
    return {
        item.learner: LastDelta(round(one, 2), round(item.cosine, 2))
        for item, one in zip(commit.inputs, times, strict=True)
    }


def _merge_note(commit: commits.Merge, tokens: int) -> MergeNote:
    participants = tuple(sorted(item.learner for item in commit.inputs))
    return MergeNote(
        commit.n, commit.slot, commit.time, participants, commit.alive, commit.quorum, commit.grace_s,
        commit.grace_used_s, tokens,
    )  # fmt: skip


def _noted(notes: tuple[Note, ...], commit: commits.Commit) -> tuple[Note, ...]:
    """The notes after one more commit. Refusals of one learner for one reason, within SUMMED_UP_S, are one note, and so
    are skips: there may be many, and other notes must stay."""
    for (learner, reason), count in _refusals(commit)[-RECENT_NOTES:]:  # earlier ones would be pushed out
        note = Note(commit.time, REFUSED, learner, reason, since=commit.time)
        notes = _summed_up(notes, replace(note, count=count))
    for unit, text in _own_notes(commit):
        note = Note(commit.time, commit.kind, unit, text)
        is_skip = commit.kind == SKIP
        notes = _summed_up(notes, replace(note, since=commit.time)) if is_skip else (*notes, note)
    return notes


def _refusals(commit: commits.Commit) -> list[tuple[tuple[str, str], int]]:
    """How often each learner was refused for each reason that is told, in the order of the last times."""
    counts: dict[tuple[str, str], int] = {}
    for outcome in commit.outcomes:
        if outcome.reason not in QUIET_OUTCOMES:
            what = outcome.learner, outcome.reason
            counts[what] = counts.pop(what, 0) + 1
    return list(counts.items())


def _summed_up(notes: tuple[Note, ...], note: Note) -> tuple[Note, ...]:
    """The notes and one more, which takes the place of an earlier one of the same."""
    for known in notes:
        is_same = (known.kind, known.unit) == (note.kind, note.unit) and (known.text == note.text or known.kind == SKIP)
        if is_same and _is_soon(known, note.time):
            others = tuple(other for other in notes if other is not known)
            return (*others, replace(note, count=known.count + note.count, since=known.since))
    return (*notes, note)


def _is_soon(note: Note, time: str) -> bool:
    """Whether `time` is less than SUMMED_UP_S after the first of what the note sums up; times are only stated."""
    try:
        return (datetime.fromisoformat(time) - datetime.fromisoformat(note.since)).total_seconds() < SUMMED_UP_S
    except (ValueError, TypeError):
        return False


def _own_notes(commit: commits.Commit) -> list[tuple[str, str]]:
    """(unit, text) of what the commit's kind tells."""
    match commit:
        case commits.EpochStart():
            return [("syncer", f"epoch {commit.epoch} starts: {commit.reason}")]
        case commits.Skip() | commits.Finish() | commits.CollectionFloor():
            return [("syncer", commit.reason)]
        case commits.Refuse() | commits.Evaluation():
            return [("syncer", commit.reason)] if commit.reason else []
        case commits.Membership():
            return [(island.name, f"joins in {island.region}") for island in commit.islands]
        case commits.Quarantine():
            return [(commit.learner, f"quarantined: {commit.reason}")]
        case commits.Readmit():
            return [(commit.learner, f"readmitted: {commit.reason}")]
        case commits.Revoke():
            return [("syncer", f"revoked the key {short_key(commit.key)}: {commit.reason}")]
        case commits.Rollback():
            return [("syncer", f"rolled back to commit {commit.to}: {commit.reason}")]
        case commits.Stop():
            return [("syncer", f"stopped: {commit.reason}")]
    return []


def _tokens(point: tuple[int, float]) -> int:
    return point[0]


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
