"""What the log remembers of the norms of deltas, fragment by fragment: folded from merges, bounded.

Norms are compared for the steps that a delta holds: honest ones grow with their steps, by the square root of these at
least and in proportion at most. So the deltas of fast and slow islands compare, and those of several rounds at once.

Of each learner the newest merged norm counts, as it was after clipping. The median over learners is what
`rules/norms.py` compares the next deltas with, so a minority of learners cannot move it, however often it offers. What
is remembered falls by half a merge at most: after a rollback or a short round the next usual delta is not clipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import sqrt

from diloco_cli.protocol.log.commits import Commit, Merge, Quarantine, Readmit
from diloco_cli.protocol.log.records import MergedOffer, fragment_of_slot

LEARNERS_KEPT = 64  # of one fragment, those merged last: the median of so many is as good as that of all
FALLS = 0.5
GROWS = 4.0  # while the learning rate rises, a delta may be so many times as long as what is remembered
COMPARED = 3  # deltas in a slot, from which on they are also compared with each other

Measured = tuple[float, int]  # a norm, and the steps that it is of
Known = Mapping[str, Measured]
"""Of one fragment, by learner."""
Norms = dict[int, dict[str, Measured]]
"""What is remembered, by fragment; a fragment that was never merged has none."""
NOTHING: Known = {}


def known_before(norms: Norms, commit: Commit, num_fragments: int) -> Known:
    """What is remembered of the fragment that a merge is about to change."""
    return norms.get(fragment_of_slot(commit.slot, num_fragments), NOTHING) if isinstance(commit, Merge) else NOTHING


def logged_norm(norm: float) -> float:
    """A measured norm as the log states it. Decisions are made from this figure, so that they follow from the log."""
    return float(f"{norm:.9g}")


def norms_after(norms: Norms, commit: Commit, num_fragments: int) -> Norms:
    """The memory after one more commit."""
    if isinstance(commit, Quarantine | Readmit):
        return {
            fragment: {name: one for name, one in known.items() if name != commit.learner}
            for fragment, known in norms.items()
        }
    if not isinstance(commit, Merge):
        return norms
    known = dict(known_before(norms, commit, num_fragments))
    for item in commit.inputs:
        merged = _followed(known.pop(item.learner, None), item.norm * item.scale, max(1, item.steps))
        if merged[0] > 0:
            known[item.learner] = merged  # at the end: the first ones were merged longest ago
    return {**norms, fragment_of_slot(commit.slot, num_fragments): dict(list(known.items())[-LEARNERS_KEPT:])}


def _followed(before: Measured | None, norm: float, steps: int) -> Measured:
    if before is None or norm >= FALLS * shortest(*before, steps):
        return norm, steps
    return FALLS * before[0], before[1]


def longest(norm: float, steps: int, in_steps: int) -> float:
    """The longest that an honest delta of `in_steps` is, if one of `steps` has this norm."""
    ratio = in_steps / steps
    return norm * max(ratio, sqrt(ratio))


def shortest(norm: float, steps: int, in_steps: int) -> float:
    ratio = in_steps / steps
    return norm * min(ratio, sqrt(ratio))


def usual_norms(known: Known, deltas: Sequence[Measured], counted: Sequence[int], grows: float = GROWS) -> list[float]:
    """What is usual for each of a slot's deltas, for the steps that it counts for: `grows` times the median in memory
    or, among COMPARED or more, the median of the other deltas, whichever is less. 0: there is nothing yet. Beside so
    many deltas the memory of fewer learners does not count: one that came first would say what is usual."""
    is_heard = len(deltas) < COMPARED or len(known) >= COMPARED

    @cache  # most deltas have the same few numbers of steps
    def measures(steps: int) -> tuple[float, list[float]]:
        here = sorted(longest(*one, steps) for one in deltas) if len(deltas) >= COMPARED else []
        heard = known.values() if is_heard else ()
        return grows * upper_median(longest(*one, steps) for one in heard), here

    usual = []
    for delta, steps in zip(deltas, counted, strict=True):
        remembered, here = measures(steps)
        others = median_without(here, longest(*delta, steps)) if here else 0.0
        usual.append(min(others, remembered) if others and remembered else others or remembered)
    return usual


def least_norms(deltas: Sequence[Measured], counted: Sequence[int]) -> list[float]:
    """How long the others' deltas are at least, for the steps that each one counts for: their lower median, so that one
    of two others cannot make it look short by a long delta of its own. 0: there are too few to compare it with."""
    if len(deltas) < COMPARED:
        return [0.0] * len(deltas)

    @cache
    def falling(steps: int) -> list[float]:
        return sorted(-shortest(*one, steps) for one in deltas)

    pairs = zip(deltas, counted, strict=True)
    return [-median_without(falling(steps), -shortest(*delta, steps)) for delta, steps in pairs]


def times_usual(known: Known, inputs: Sequence[MergedOffer]) -> list[float]:
    """How many times as long as usual each input of a merge is; 0: there is nothing to compare it with yet."""
    deltas = [(item.norm, max(1, item.steps)) for item in inputs]
    usual = usual_norms(known, deltas, [steps for _, steps in deltas], grows=1.0)
    return [norm / than if than else 0.0 for (norm, _), than in zip(deltas, usual, strict=True)]


def upper_median(values: Iterable[float]) -> float:
    """0 of none. Of an even number the greater of the two in the middle, so that one of two learners cannot have the
    other clipped by deltas that are too short."""
    rising = sorted(values)
    return rising[len(rising) // 2] if rising else 0.0


def median_without(rising: Sequence[float], own: float) -> float:
    """The upper median of a sorted list of at least two without one value that is in it."""
    middle = (len(rising) - 1) // 2
    return rising[middle + 1] if own <= rising[middle] else rising[middle]
