"""What the log says of the run's held-out loss: the last evaluations that were well, a jump that nothing has followed
yet, and an open question: whose deltas made the loss jump.

Folded commit by commit, so that a syncer that takes over goes on where the log stands (rules/divergence.py decides what
follows, rules/rejudging.py who is blamed). Whether an evaluation has jumped is said by its commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt

from msgspec import Struct, field
from msgspec.structs import replace

from diloco_cli.protocol.log import commits
from diloco_cli.protocol.log.norms import longest, median_without
from diloco_cli.protocol.log.records import MergedOffer

GOOD_KEPT = 5
LONG = 2.0  # times the median norm of a merge's other deltas, for the steps that each holds
CERTAIN = 1 - 1e-9  # so that no rounding decides
COMPANY = 3  # deltas of a merge, from which on one can be long beside the others


class Evaluated(Struct, frozen=True):
    """The held-out loss as of commit n, when `tokens` were merged. None: the model gives no finite loss."""

    n: int
    loss: float | None
    tokens: int


class Rejudging(Struct, frozen=True):
    """The deltas merged after the newest of `before` and up to `head`, whose loss jumped, are re-judged: those of the
    learners `names`, sorted. `before`: the good evaluations with which the loss was compared; `long`: see Stability."""

    before: tuple[Evaluated, ...]
    head: Evaluated
    names: tuple[str, ...]
    long: dict[str, float] = field(default_factory=dict)

    @property
    def good(self) -> Evaluated:
        return self.before[-1]


class Stability(Struct, frozen=True):
    """`good`: the newest evaluations without a jump, the newest last; `jump`: the newest evaluation, if it has jumped
    and no rollback or stop has followed; `rejudging`: the open question. `rollbacks`: so many times the syncer has gone
    back without an evaluation that was well beyond `beyond` tokens, where the loss last jumped. `paused`: the syncer
    has stopped the run for this, and nobody has resumed it. `blamed`: the commit of each quarantine that closed a
    re-judgement and holds. `since`: slots since the newest evaluation was logged. `long`: of learners with deltas of
    more than LONG times the usual norm in their merge, the most, since the newest good evaluation; `long_before`: since
    the one before."""

    good: tuple[Evaluated, ...] = ()
    jump: Evaluated | None = None
    rejudging: Rejudging | None = None
    rollbacks: int = 0
    beyond: int = 0
    paused: bool = False
    blamed: dict[str, int] = field(default_factory=dict)
    since: int = 0
    long: dict[str, float] = field(default_factory=dict)
    long_before: dict[str, float] = field(default_factory=dict)


def stability_after(known: Stability, commit: commits.Commit, merged: Mapping[str, int]) -> Stability:
    """After one more commit. `merged`, for a rollback: the newest commit that merged a delta of each learner."""
    match commit:
        case commits.Merge():
            long = _long(commit)
            return replace(known, since=known.since + 1, long=_most(known.long, long) if long else known.long)
        case commits.Skip():
            return replace(known, since=known.since + 1)
        case commits.Evaluation():
            return _evaluated(known, commit)
        case commits.Rollback():
            return _rolled_back(known, commit, merged)
        case commits.Quarantine() if commit.evaluated is not None:
            return replace(known, rejudging=None, blamed={**known.blamed, commit.learner: commit.n})
        case commits.Readmit() if commit.learner in known.blamed:
            return replace(known, blamed={name: n for name, n in known.blamed.items() if name != commit.learner})
        case commits.Stop() if commit.diverged:
            return replace(known, rejudging=None, paused=True)
        case commits.EpochStart() if commit.serves and known.paused:
            return _resumed(known)
    return known


def _evaluated(known: Stability, commit: commits.Evaluation) -> Stability:
    at = Evaluated(commit.evaluated, commit.loss, commit.tokens)
    known = replace(known, since=0)
    if commit.jumped:
        return replace(known, jump=at)
    beyond = commit.tokens > known.beyond
    good, rollbacks = (*known.good, at)[-GOOD_KEPT:], 0 if beyond else known.rollbacks
    return replace(known, good=good, jump=None, rollbacks=rollbacks, long={}, long_before=known.long)


def _rolled_back(known: Stability, commit: commits.Rollback, merged: Mapping[str, int]) -> Stability:
    """Evaluations of undone merges no longer count."""
    jump, good = known.jump, tuple(at for at in known.good if at.n <= commit.to)
    long = _most(known.long_before, known.long)
    known = replace(known, good=good, jump=None, long={}, long_before={})
    if commit.evaluated is None or jump is None:
        return known
    suspects = _suspects(known, commit.to, merged)
    rejudging = Rejudging(good, jump, suspects, long) if good and suspects else None
    return replace(
        known, rollbacks=known.rollbacks + 1, beyond=max(known.beyond, jump.tokens), rejudging=rejudging
    )  # fmt: skip


def _suspects(known: Stability, to: int, merged: Mapping[str, int]) -> tuple[str, ...]:
    """Learners whose deltas a rollback to this commit undoes; none if one of them was blamed since: those it is."""
    undone = sorted(name for name, n in merged.items() if n > to)
    return () if any(known.blamed.get(name, -1) > to for name in undone) else tuple(undone)


def _resumed(known: Stability) -> Stability:
    """People have decided: they went back, or accept the loss as it is, which nothing before it is compared with."""
    good = known.good if known.jump is None else ()
    return Stability(good=good, blamed=known.blamed, since=known.since)


def _long(merge: commits.Merge) -> dict[str, float]:
    """How many times as long as usual in this merge a learner's delta is, of each that is more than LONG times. Two
    deltas say nothing of each other: a short one must not make the other look long."""
    if len(merge.inputs) < COMPANY:
        return {}
    found, lengths = {}, _Lengths(merge.inputs)
    for item in merge.inputs:
        usual = lengths.usual(item)
        if usual and item.norm > LONG * usual:
            found[item.learner] = item.norm / usual
    return found


class _Lengths:
    """The lengths of a merge's deltas, each for the steps that another one holds. They are computed once for each
    number of steps, and only where a delta can be long: one per square root of a step is never above its `longest`."""

    def __init__(self, inputs: Sequence[MergedOffer]) -> None:
        self._inputs = inputs
        self._rising: dict[int, list[float]] = {}
        by_root = sorted(item.norm / sqrt(item.steps) for item in inputs)
        self._least = CERTAIN * LONG * by_root[(len(by_root) - 1) // 2]

    def usual(self, item: MergedOffer) -> float | None:
        """The upper median of the other deltas' lengths; None where this one is not beyond LONG times it."""
        if item.norm <= self._least * sqrt(item.steps):
            return None
        if item.steps not in self._rising:
            self._rising[item.steps] = sorted(longest(one.norm, one.steps, item.steps) for one in self._inputs)
        return median_without(self._rising[item.steps], item.norm)


def _most(known: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return {name: max(known.get(name, 0.0), more.get(name, 0.0)) for name in sorted({*known, *more})}
