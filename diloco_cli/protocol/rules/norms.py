"""Which deltas of a slot are too long, and how far the others are scaled: from the log's memory and from each other.

A delta is refused (`norm_cap`) if it is longer than CAP times one of these, each for the steps that it holds:

    the reference   the median over learners of the usual norm of each that is known (protocol/log/norms.py)
    the company     the median of the slot's other deltas, if there are at least two others

Of an even number the greater of the two in the middle counts. So while more than half of the learners are honest,
nothing is merged that is longer than CAP times an honest learner's usual delta for the steps that it claims. Where a
single other learner is known, the company decides instead of it, or it and a third one's delta in the slot: nobody
alone says what is usual, if more are there. The company alone judges a learner that an operator has readmitted, until
it is known again. In the first rounds of fewer than three learners nothing is refused.

`sync.clip` scales a delta down that is longer than so many times the company, of which a settled reference allows
FOLLOWS times itself; where one of both is missing, the other alone counts.
For this and for its weight a delta counts for no more steps than a round has, or than the slot's other deltas hold:
steps are the learner's word. A delta that is shorter than FULL times the company, or else the settled reference, for
these steps, weighs less in proportion: one that holds next to nothing would shorten the others' step by its share of
the tokens. `sync.max_share` bounds what one learner's tokens weigh, before it loses weight so. `sync.max_step` shortens
a merge that is longer than so many times the fragment's newest ones: its longest deltas, to one length, as far as need
be.

A delta that points against the others', or whose learner's do, weighs OPPOSING_WEIGHT of what it would. Weights are
relative, so where only such deltas are merged, because the others are away, they are scaled down by as much. It is
compared with those of other learners as they are, even with a single one, whatever steps it states: beside one short
honest delta after an outage, a 64th of a long one would be more than that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, inf, sqrt
from statistics import median_low

from diloco_cli.config.settings import SyncSettings
from diloco_cli.protocol.log.norms import (
    FOLLOWS,
    FragmentNorms,
    longest,
    median_without,
    merged_length,
    upper_median,
)
from diloco_cli.protocol.rules.merging import bounded_weights

CAP = 8.0
COMPANY = 3  # deltas in a slot, from which on they are compared with each other
OPPOSING_WEIGHT = EMPTY_WEIGHT = 1 / 64
FULL = 0.5  # of the others' length: honest deltas are seldom shorter
FEWEST_MERGES = 4  # of a fragment, from which on a merge's length is compared with them


@dataclass(frozen=True)
class JudgedDelta:
    """A delta as the log states it: of one learner, of so many steps, with the weight that its tokens give.
    `round_steps`: those of a round (rules/eligibility.py). `opposes`: it points against the others', or its learner's
    deltas do (log/directions.py)."""

    learner: str
    steps: int
    norm: float
    weight: float = 0.0
    round_steps: int = field(kw_only=True)
    opposes: bool = False


@dataclass(frozen=True)
class DeltaVerdict:
    """What becomes of one delta: it is multiplied by `scale` and weighs `weight`, or is refused for this reason."""

    scale: float = 1.0
    weight: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class Judgement:
    """The verdicts on a slot's deltas, in their order. `step`: the factor by which the whole merge is shortened; it is
    in the scales."""

    verdicts: tuple[DeltaVerdict, ...]
    step: float = 1.0


def judge(known: FragmentNorms, deltas: Sequence[JudgedDelta], sync: SyncSettings) -> Judgement:
    """`known`: the memory of the fragment as of the commit before. Exact, from logged figures alone. Steps are at least
    one."""
    by_name = {name: (one.norm, one.steps) for name, one in known.usual.items() if one.known}
    firm = [(one.norm, one.steps) for one in known.usual.values() if one.firm]
    company = [(delta.norm, delta.steps) for delta in deltas] if len(deltas) >= COMPANY else []
    counted = counted_steps(known, deltas)

    @cache  # most deltas have the same few numbers of steps
    def measures(steps: int) -> tuple[float | None, float | None, list[float]]:
        settled = upper_median(_lengths(firm, steps)) if len(firm) >= COMPANY else None
        return upper_median(_lengths(by_name.values(), steps)), settled, sorted(_lengths(company, steps))

    verdicts = []
    for delta, steps in zip(deltas, counted, strict=True):
        usual, _, rising = measures(delta.steps)
        others = median_without(rising, delta.norm) if rising else None
        by_another = len(by_name) == 1 and delta.learner not in by_name
        third = _of_third(deltas, {delta.learner, *by_name}) if by_another and not company else []
        if third and usual is not None:
            usual = upper_median([usual, *_lengths(third, delta.steps)])
        unjudged = (by_another and company) or delta.learner in known.trusted
        refused = _refusal(delta, None if unjudged else usual, others)
        if refused:
            verdicts.append(DeltaVerdict(refused=refused))
            continue
        _, settled, rising = measures(steps)
        others = median_without(rising, longest(delta.norm, delta.steps, steps)) if rising else None
        verdicts.append(DeltaVerdict(_scale(delta, None if unjudged else settled, others, sync)))
    _shorten_opposing(deltas, verdicts, sync)
    fit = [place for place, verdict in enumerate(verdicts) if not verdict.refused]
    shares = fullness(known, [deltas[place] for place in fit], [counted[place] for place in fit], sync)
    by_tokens = bounded_weights([_weight(deltas[place], counted[place]) for place in fit], sync.max_share)
    kept = [
        share * (OPPOSING_WEIGHT if deltas[place].opposes else 1.0) for place, share in zip(fit, shares, strict=True)
    ]
    weights = [weight * share for weight, share in zip(by_tokens, kept, strict=True)]
    length = merged_length(
        (deltas[place].norm, verdicts[place].scale, weight) for place, weight in zip(fit, weights, strict=True)
    )
    step = step_factor(known, length, sync)
    lengths = [deltas[place].norm * verdicts[place].scale for place in fit]
    most = longest_kept(lengths, weights, step)
    outweighed = any(not deltas[place].opposes for place in fit)
    for place, weight, own in zip(fit, weights, lengths, strict=True):
        scale = verdicts[place].scale * (1.0 if outweighed else OPPOSING_WEIGHT)
        verdicts[place] = DeltaVerdict(scale * most / own if own > most else scale, weight)
    return Judgement(tuple(verdicts), step)


def _shorten_opposing(deltas: Sequence[JudgedDelta], verdicts: list[DeltaVerdict], sync: SyncSettings) -> None:
    """Deltas of learners that oppose, to the lower median of the others' as they are merged."""
    pairs = list(zip(deltas, verdicts, strict=True))
    others = [delta.norm * v.scale for delta, v in pairs if not (delta.opposes or v.refused) and delta.norm > 0]
    if sync.clip == "none" or not others:
        return
    most = sync.clip * median_low(others)
    for place, (delta, verdict) in enumerate(pairs):
        if delta.opposes and delta.norm * verdict.scale > most:
            verdicts[place] = replace(verdict, scale=most / delta.norm)


def counted_steps(known: FragmentNorms, deltas: Sequence[JudgedDelta]) -> list[int]:
    """For how many steps each delta counts. Where nobody else is known, all that it states do."""
    rounds = sorted(delta.steps / delta.round_steps for delta in deltas)
    if len({*known.usual, *(delta.learner for delta in deltas)}) < 2:
        return [delta.steps for delta in deltas]
    counted = []
    for delta in deltas:
        others = median_without(rounds, delta.steps / delta.round_steps) if len(deltas) > 1 else 1.0
        counted.append(min(delta.steps, ceil(max(1.0, others) * delta.round_steps)))
    return counted


def fullness(
    known: FragmentNorms, deltas: Sequence[JudgedDelta], counted: Sequence[int], sync: SyncSettings
) -> list[float]:
    """Of deltas that are merged together: the share of its weight that each one's length is worth, beside the least
    length of the others for the steps counted, their lower median, so that one of two cannot make the other light by
    long deltas. The greatest is 1: weights are relative. What opposes weighs next to nothing anyway, and keeps it."""
    firm = [(one.norm, one.steps) for one in known.usual.values() if one.firm]
    company = [(delta.norm, delta.steps) for delta in deltas] if len(deltas) >= COMPANY else []

    @cache
    def least(steps: int) -> tuple[float | None, list[float]]:
        settled = median_low(_least(*one, steps) for one in firm) if len(firm) >= COMPANY else None
        return settled, sorted(_least(*one, steps) for one in company)

    if sync.clip == "none":
        return [1.0] * len(deltas)
    shares = []
    for delta, steps in zip(deltas, counted, strict=True):
        settled, rising = least(steps)
        if rising:
            own, middle = _least(delta.norm, delta.steps, steps), (len(rising) - 2) // 2  # of the others
            others: float | None = rising[middle + (own <= rising[middle])]
        else:
            others = None if delta.learner in known.trusted else settled
        enough = others is None or delta.opposes or delta.norm >= FULL * others
        shares.append(1.0 if others is None or enough else delta.norm / (FULL * others))
    most = max((share for share, delta in zip(shares, deltas, strict=True) if not delta.opposes), default=1.0) or 1.0
    return [min(1.0, max(EMPTY_WEIGHT, share / most)) for share in shares]


def step_factor(known: FragmentNorms, length: float, sync: SyncSettings) -> float:
    """By how much a merge of this length is shortened; 1: not at all."""
    usual = upper_median(known.merged)
    if sync.max_step == "none" or usual is None or len(known.merged) < FEWEST_MERGES:
        return 1.0
    return 1.0 if length <= sync.max_step * usual else sync.max_step * usual / length


def longest_kept(lengths: Sequence[float], weights: Sequence[float], step: float) -> float:
    """The length to which longer deltas are shortened, so that their weighted mean becomes `step` of what it is."""
    falling = sorted(zip(lengths, weights, strict=True), reverse=True)
    if step == 1.0 or not falling:
        return inf
    rest = sum(length * weight for length, weight in falling)
    wanted, heavy = step * rest, 0.0
    for place, (length, weight) in enumerate(falling):
        rest, heavy = rest - length * weight, heavy + weight
        most = (wanted - rest) / heavy if heavy > 0 else 0.0
        if most >= (falling[place + 1][0] if place + 1 < len(falling) else 0.0):
            return max(0.0, most)
    return 0.0


def _weight(delta: JudgedDelta, counted: int) -> float:
    return delta.weight if counted == delta.steps else delta.weight * counted / delta.steps


def _of_third(deltas: Sequence[JudgedDelta], two: Collection[str]) -> list[tuple[float, int]]:
    return [(one.norm, one.steps) for one in deltas if one.learner not in two]


def _lengths(measured: Iterable[tuple[float, int]], in_steps: int) -> list[float]:
    return [longest(norm, steps, in_steps) for norm, steps in measured]


def _least(norm: float, steps: int, in_steps: int) -> float:
    """The least length of a delta of `in_steps`, also of a learner that warms up again: while the learning rate rises,
    norms grow by the square of the steps."""
    ratio = in_steps / steps
    return norm * min(ratio**2, sqrt(ratio))


def _refusal(delta: JudgedDelta, usual: float | None, others: float | None) -> str:
    for what, measure in (("this fragment's usual delta", usual), ("the slot's other deltas", others)):
        if measure and delta.norm > CAP * measure:
            times = f"{delta.norm / measure:.3g} times as long as {what}"
            return f"{delta.learner}'s delta of {delta.steps} steps is {times}; {CAP:g} are allowed"
    return ""


def _scale(delta: JudgedDelta, usual: float | None, others: float | None, sync: SyncSettings) -> float:
    """`usual`: by a memory that is firm."""
    measure = min(others, FOLLOWS * usual) if usual and others else usual or others
    if sync.clip == "none" or not measure or delta.norm <= sync.clip * measure:
        return 1.0
    return sync.clip * measure / delta.norm
