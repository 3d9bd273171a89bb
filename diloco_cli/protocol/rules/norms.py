"""Which deltas of a slot are too long, and how far the others are scaled: from the log's memory and from each other.

A delta is refused (`norm_cap`) if it is longer than CAP times one of these, each for the steps that it holds:

    the reference   the median over learners of the usual norm of each that is known (protocol/log/norms.py)
    the company     the median of the slot's other deltas, if there are at least two others

Of an even number the greater of the two in the middle counts. So while more than half of the learners are honest,
nothing is merged that is longer than CAP times an honest learner's usual delta for the steps that it claims. Where a
single other learner is known, the company decides instead of it, if there is one: nobody alone says what is usual. The
company alone judges a learner that an operator has readmitted, until it is known again. In the first rounds of fewer
than three learners nothing is refused.

`sync.clip` scales a delta down that is longer than so many times the company, of which a settled reference allows
FOLLOWS times itself; where one of both is missing, the other alone counts.
For this and for its weight a delta counts for no more steps than a round has, or than the slot's other deltas hold:
steps are the learner's word. `sync.max_share` bounds what one learner weighs; `sync.max_step` shortens a merge that is
longer than so many times the fragment's newest ones: its longest deltas, to one length, as far as need be.

A learner whose deltas point against the others' weighs OPPOSING_WEIGHT of what it would. Weights are relative, so where
only such deltas are merged, because the others are away, they are scaled down by as much. Its delta is compared with
those of other learners as they are, even with a single one, whatever steps it states: beside one short honest delta
after an outage, a 64th of a long one would be more than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, inf
from statistics import median_low

from diloco_cli.config.settings import SyncSettings
from diloco_cli.protocol.log.norms import FOLLOWS, FragmentNorms, longest, median_without, merged_length, upper_median
from diloco_cli.protocol.rules.merging import bounded_weights

CAP = 8.0
COMPANY = 3  # deltas in a slot, from which on they are compared with each other
OPPOSING_WEIGHT = 1 / 64
FEWEST_MERGES = 4  # of a fragment, from which on a merge's length is compared with them


@dataclass(frozen=True)
class JudgedDelta:
    """A delta as the log states it: of one learner, of so many steps, with the weight that its tokens give.
    `round_steps`: those of a round (rules/eligibility.py). `opposes`: its learner's deltas point against the others'
    (log/directions.py)."""

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
    weights = bounded_weights([_weight(deltas[place], counted[place]) for place in fit], sync.max_share)
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
    weight = delta.weight if counted == delta.steps else delta.weight * counted / delta.steps
    return weight * OPPOSING_WEIGHT if delta.opposes else weight


def _lengths(measured: Iterable[tuple[float, int]], in_steps: int) -> list[float]:
    return [longest(norm, steps, in_steps) for norm, steps in measured]


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
