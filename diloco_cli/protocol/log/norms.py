"""What the log remembers of the norms of deltas, fragment by fragment: folded from merges and skips, bounded.

A norm is that of the delta which a learner made: re-anchoring adds to it what merges have moved since, and for that
the learner is not to blame. It counts for the steps that the delta holds: honest ones grow with their steps, by the
square root of these at least and in proportion at most. So the deltas of fast and slow islands compare, and those of
several rounds at once.

`usual`      of each learner whose deltas were merged of late. While it is new its newest norm, later a running one that
             moves by a factor of FOLLOWS a round at most. A learner is not known before its delta of round SETTLED:
             the first ones, in warm-up, are short
`refused`    of each learner whose offers were refused for their norm, and none merged since
`trusted`    learners that an operator has readmitted (diloco readmit), until they are known again: what was remembered
             of them is forgotten, and only the slot's other deltas judge theirs, as for all learners in a new run
`merged`     the lengths of the newest merges as a whole

The memory is taken to be out of date, and begins anew from what was refused, when most of the learners that have
offered of late, at least two, were refused in two rounds or more with deltas of about one norm; or when the only one
that is remembered at all was, in ALONE rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from msgspec import Struct, field
from msgspec.structs import replace

from diloco_cli.protocol.log.commits import Commit, Merge, Quarantine, Readmit, Skip
from diloco_cli.protocol.log.records import MergedOffer, Outcome, fragment_of_slot

SETTLED = 2  # merges of a fragment before a learner's norm is known
NEW = 8  # merges during which it follows each delta: in warm-up norms grow fast
FOLLOWS, FALLS = 1.5, 0.95
LEARNERS_KEPT = 64  # in one fragment: the median of so many is as good as that of all
ROUNDS_KEPT = 16
MERGES_KEPT = 5
OF_LATE = 4  # rounds
AGREE = 4.0  # refused norms within this factor are about the same
ALONE = 8


class Usual(Struct, frozen=True):
    """A learner's usual norm in so many steps, the round of its newest merge, and the number of merges."""

    norm: float
    steps: int
    round: int
    merges: int

    @property
    def known(self) -> bool:
        return self.merges >= SETTLED

    @property
    def firm(self) -> bool:
        return self.merges >= NEW


class Refusals(Struct, frozen=True):
    """Offers of one learner that were refused one after the other: the newest norm per square root of a step, the first
    and the last round."""

    norm: float
    first: int
    last: int


class FragmentNorms(Struct, frozen=True):
    usual: dict[str, Usual] = field(default_factory=dict)
    refused: dict[str, Refusals] = field(default_factory=dict)
    merged: tuple[float, ...] = ()
    trusted: tuple[str, ...] = ()


Norms = dict[int, FragmentNorms]
"""By fragment; a fragment of which nothing was judged yet has none."""
NOTHING = FragmentNorms()


def logged_norm(norm: float) -> float:
    """A measured norm as the log states it. Decisions are made from this figure, so that they follow from the log."""
    return float(f"{norm:.9g}")


def longest(norm: float, steps: int, in_steps: int) -> float:
    """The longest that an honest delta of `in_steps` is, if one of `steps` has this norm."""
    ratio = in_steps / steps
    return norm * max(ratio, sqrt(ratio))


def shortest(norm: float, steps: int, in_steps: int) -> float:
    ratio = in_steps / steps
    return norm * min(ratio, sqrt(ratio))


def merged_length(inputs: Iterable[tuple[float, float, float]]) -> float:
    """The length of a merge's step, from each input's norm, scale and weight: the weighted mean. With `rda` that is the
    merged delta's norm; a plain average is never longer."""
    total = length = 0.0
    for norm, scale, weight in inputs:
        total += weight
        length += weight * scale * norm
    return length / total if total > 0 else 0.0


def upper_median(values: Iterable[float]) -> float | None:
    """None of none. Of an even number the greater one, so that one of two learners cannot have the other refused by
    deltas that are too short."""
    rising = sorted(values)
    return rising[len(rising) // 2] if rising else None


def median_without(rising: list[float], own: float) -> float:
    """The upper median of a sorted list of at least two without one value that is in it."""
    middle = (len(rising) - 1) // 2
    return rising[middle + 1] if own <= rising[middle] else rising[middle]


def norms_after(norms: Norms, commit: Commit, num_fragments: int) -> Norms:
    """The memory after one more commit. All code that judges norms uses this function."""
    if isinstance(commit, Quarantine | Readmit):
        return {fragment: _kept_out_or_readmitted(known, commit) for fragment, known in norms.items()}
    if not isinstance(commit, Merge | Skip):
        return norms
    refused = [outcome for outcome in commit.outcomes if outcome.norm is not None]
    if not commit.inputs and not refused:
        return norms
    fragment, now = fragment_of_slot(commit.slot, num_fragments), commit.slot // num_fragments
    known = norms.get(fragment, NOTHING)
    usual = {name: one for name, one in known.usual.items() if now - one.round < ROUNDS_KEPT}
    usual = _with_merged(usual, commit.inputs, now)
    merged = merged_length((item.norm, item.scale, item.weight) for item in commit.inputs)
    after = FragmentNorms(
        usual,
        _with_refused(known.refused, commit.inputs, refused, now),
        (*known.merged, merged)[-MERGES_KEPT:] if merged > 0 else known.merged,
        tuple(name for name in known.trusted if name not in usual or not usual[name].known),
    )
    return {**norms, fragment: _anew(after, now)}


def _kept_out_or_readmitted(known: FragmentNorms, commit: Quarantine | Readmit) -> FragmentNorms:
    trusted = tuple(name for name in known.trusted if name != commit.learner)
    if isinstance(commit, Quarantine):
        return replace(known, trusted=trusted)
    usual = {name: one for name, one in known.usual.items() if name != commit.learner}
    refused = {name: one for name, one in known.refused.items() if name != commit.learner}
    return FragmentNorms(usual, refused, known.merged, (*trusted, commit.learner))


def _with_merged(usual: dict[str, Usual], inputs: Iterable[MergedOffer], now: int) -> dict[str, Usual]:
    for item in inputs:
        norm, steps, before = item.norm, max(1, item.steps), usual.get(item.learner)
        if norm == 0.0 or (before is None and len(usual) >= LEARNERS_KEPT):
            continue
        merges = 1 if before is None else min(before.merges + 1, NEW)
        if before is not None and before.firm:
            norm, steps = _followed(before, norm, steps)
        usual[item.learner] = Usual(norm, steps, now, merges)
    return usual


def _followed(before: Usual, norm: float, steps: int) -> tuple[float, int]:
    """The running norm, and its steps, after one more delta. It falls slowly: after a rollback some are short."""
    if norm > FOLLOWS * longest(before.norm, before.steps, steps):
        return FOLLOWS * before.norm, before.steps
    if norm < FALLS * shortest(before.norm, before.steps, steps):
        return FALLS * before.norm, before.steps
    return norm, steps


def _with_refused(
    refused: dict[str, Refusals], inputs: Iterable[MergedOffer], outcomes: Iterable[Outcome], now: int
) -> dict[str, Refusals]:
    merged = {item.learner for item in inputs}
    kept = {name: one for name, one in refused.items() if name not in merged and now - one.last < OF_LATE}
    for outcome in outcomes:
        before = kept.get(outcome.learner)
        norm = (outcome.norm or 0.0) / sqrt(outcome.steps or 1)
        if before is not None or len(kept) < LEARNERS_KEPT:
            kept[outcome.learner] = Refusals(norm, now if before is None else before.first, now)
    return kept


def _anew(known: FragmentNorms, now: int) -> FragmentNorms:
    """The memory from what was refused alone, if it is out of date."""
    if not known.refused:
        return known
    of_late = {name for name, one in known.usual.items() if now - one.round < OF_LATE} | set(known.refused)
    alone = len(known.usual.keys() | known.refused.keys()) == 1
    rounds = ALONE if alone else 2
    firm = sorted((one.norm, name) for name, one in known.refused.items() if one.last - one.first >= rounds - 1)
    most = 1 if alone else max(2, len(of_late) // 2 + 1)
    for start in range(len(firm) - most + 1):
        if firm[start + most - 1][0] <= AGREE * firm[start][0]:
            agreed = [(norm, name) for norm, name in firm[start:] if norm <= AGREE * firm[start][0]]
            return FragmentNorms({name: Usual(norm, 1, now, SETTLED) for norm, name in agreed}, trusted=known.trusted)
    return known
