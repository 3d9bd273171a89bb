"""What the log remembers of bad deltas: usual norms, refusals of each learner, and jumps of the held-out loss. Folded
commit by commit, so that a syncer that takes over goes on where the log stands.

Norms are kept fragment by fragment, of each learner the newest merged one, as it was after clipping. They are compared
for the steps that a delta holds: honest ones grow with their steps, by the square root at least and in proportion at
most, so deltas of fast and slow islands compare. The median over learners is the reference of rules/merging.py, so a
minority cannot move it. What is remembered falls by half a merge at most: after a rollback or a short round the next
usual delta is not clipped.

Refusals: a bad offer is one that no honest learner makes. It is refused in any case; a quarantine only keeps the syncer
from reading a learner that cannot be trusted. The count begins anew with each offer that a merge applies.

The held-out loss: the last evaluations that were well, and a jump that nothing has followed yet
(rules/divergence.py decides what follows).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import sqrt
from typing import NamedTuple

from msgspec import Struct

from diloco_cli.protocol.log.records import MergedOffer

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


def logged_norm(norm: float) -> float:
    """A measured norm as the log states it. Decisions are made from this figure, so that they follow from the log."""
    return float(f"{norm:.9g}")


def norms_of_merge(known: Known, inputs: Iterable[MergedOffer]) -> dict[str, Measured]:
    """What is remembered of a fragment after a merge of these offers."""
    found = dict(known)
    for item in inputs:
        merged = _followed(found.pop(item.learner, None), item.norm * item.scale, max(1, item.counted_steps))
        if merged[0] > 0:
            found[item.learner] = merged  # at the end: the first ones were merged longest ago
    return dict(list(found.items())[-LEARNERS_KEPT:])


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


def usual_norms(known: Known, deltas: Sequence[Measured], believed: Sequence[int], grows: float = GROWS) -> list[float]:
    """What is usual for each of a slot's deltas, for its `believed` steps: `grows` times the median in memory
    or, among COMPARED or more, the median of the other deltas, whichever is less. 0: there is nothing yet. Beside so
    many deltas the memory of fewer learners does not count: one that came first would say what is usual. The others
    count for the steps that they state: an honest one that is believed in part would seem to be longer."""
    is_heard = len(deltas) < COMPARED or len(known) >= COMPARED

    @cache  # most deltas have the same few numbers of steps
    def measures(steps: int) -> tuple[float, list[float]]:
        here = sorted(longest(*one, steps) for one in deltas) if len(deltas) >= COMPARED else []
        heard = known.values() if is_heard else ()
        return grows * upper_median(longest(*one, steps) for one in heard), here

    usual = []
    for delta, steps in zip(deltas, believed, strict=True):
        remembered, here = measures(steps)
        others = median_without(here, longest(*delta, steps)) if here else 0.0
        usual.append(min(others, remembered) if others and remembered else others or remembered)
    return usual


def least_norms(deltas: Sequence[Measured]) -> list[float]:
    """How long the others' deltas are at least, for the steps of each one: their lower median, so that one
    of two others cannot make it look short by a long delta of its own. 0: there are too few to compare it with."""
    if len(deltas) < COMPARED:
        return [0.0] * len(deltas)

    @cache
    def falling(steps: int) -> list[float]:
        return sorted(-shortest(*one, steps) for one in deltas)

    return [-median_without(falling(steps), -norm) for norm, steps in deltas]


def times_usual(known: Known, inputs: Sequence[MergedOffer]) -> list[float]:
    """How many times as long as usual each input of a merge is; 0: there is nothing to compare it with yet."""
    deltas = [(item.norm, max(1, item.steps)) for item in inputs]
    usual = usual_norms(known, deltas, [max(1, item.counted_steps) for item in inputs], grows=1.0)
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


QUARANTINE_AFTER = 5  # bad offers in a row


class Refusal(NamedTuple):
    """`text`: the reason for people. `bad`: no honest learner causes it."""

    text: str
    bad: bool = False


# A bad signature is not bad: a forged offer must not quarantine the learner that it names. Offers that are late, old,
# overlapping or superseded come from every learner now and then.
REASONS: dict[str, Refusal] = {
    "unknown_learner": Refusal("neither the run's format nor its log names such a learner"),
    "key_revoked": Refusal("its learner's key has been revoked"),
    "old_incarnation": Refusal("a newer incarnation of this learner has been merged"),
    "settled": Refusal("this offer already has an outcome"),
    "late": Refusal("it came when its slot had been merged or skipped, or its learner knew so and sent no payload"),
    "too_early": Refusal("it names a slot so far ahead that its base would be too old by then"),
    "bad_claim": Refusal(
        "slot, fragment, tokens, steps or data range contradict each other, or no payload is so large", bad=True
    ),
    "quarantined": Refusal("its learner is quarantined, until an operator readmits it (diloco readmit)"),
    "wrong_base": Refusal("it names other bytes as its base than the log does", bad=True),
    "before_rollback": Refusal("its base lies behind a rollback"),
    "unknown_base": Refusal("the base version is not in the log, or lies further back than the staleness limit"),
    "base_consumed": Refusal("an offer from this base, or from before the merge that used it, was already applied"),
    "data_overlap": Refusal("its data range overlaps what was already applied to this fragment"),
    "superseded": Refusal("a newer offer of the same learner and fragment took its place"),
    "missing_payload": Refusal("its payload is not in the bucket", bad=True),
    "wrong_size": Refusal("its payload has another size than the offer says", bad=True),
    "digest_mismatch": Refusal("its payload has other bytes than the offer says", bad=True),
    "bad_payload": Refusal(
        "its payload's header is not the one that the layout gives: other names, shapes, types", bad=True
    ),
    "non_finite": Refusal("its payload holds values that are not finite", bad=True),
    "bad_norms": Refusal("the norms that it claims are not those of its values", bad=True),
    "no_weight": Refusal("it brings no steps"),
    "bad_signature": Refusal("the offer is lost or damaged: its learner has published a later one"),
    "bad_record": Refusal("the offer itself is not well formed", bad=True),
    "run_over": Refusal("the run ended"),
}


def are_too_many(bad: int) -> bool:
    """Whether a learner with so many bad offers in a row is kept out."""
    return bad >= QUARANTINE_AFTER


def is_bad(reason: str) -> bool:
    return reason in REASONS and REASONS[reason].bad


def bad_in_a_row(before: int, num_applied: int, num_bad: int) -> int:
    """After a commit that applies and refuses so many more offers of a learner."""
    return num_bad if num_applied else before + num_bad


GOOD_KEPT = 5


class Evaluated(Struct, frozen=True):
    """The held-out loss as of commit n, when `tokens` were merged. None: the model gives no finite loss."""

    n: int
    loss: float | None
    tokens: int


class Stability(Struct, frozen=True):
    """`good`: the newest evaluations without a jump, the newest last; `jump`: the newest evaluation, if it has jumped
    and no rollback or stop has followed. `recovers_beyond`: the syncer has gone back, and the run has not recovered
    until an evaluation is well with more tokens than these; None: it has. `paused`: the syncer has stopped the run for
    a jump, and nobody has resumed it. `since`: slots since the newest evaluation was logged."""

    good: tuple[Evaluated, ...] = ()
    jump: Evaluated | None = None
    recovers_beyond: int | None = None
    paused: bool = False
    since: int = 0
