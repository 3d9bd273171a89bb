"""What a delta weighs in a merge (arXiv 2604.21428: quantity x quality), and how far it is scaled down.

Norm clipping: a delta longer than `sync.clip` times what is usual is scaled down to what is usual: the median of the
slot's other deltas, where these are at least two, or of the norms that were merged before, over learners; the lesser of
both counts, each for the steps that a delta holds (log/health.py). So while most learners are honest, no delta moves
the parameters by more than `clip` times an honest one. Published as norm clipping of gradients (Pascanu et al. 2013,
arXiv 1211.5063) and norm bounding of federated updates (Sun et al. 2019, arXiv 1911.07963), which scale down to the
bound itself; here a delta beyond the bound is no honest one.

A delta that the slot's others exceed by the same factor weighs less in proportion: it would take its share of the
weight and bring nothing. For weight and length a delta counts for no more steps than a round has, or than the slot's
other deltas hold: steps are what a learner states.

Clipping bounds lengths alone. A delta of usual length in a wrong direction is merged with its weight; the log states
each delta's cosine to its merge, and the held-out loss shows the harm (rules/divergence.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from diloco_cli.config.settings import SyncSettings
from diloco_cli.protocol.log.health import Known, least_norms, median_without, usual_norms


def keeps_progress(sync: SyncSettings) -> bool:
    """Whether versions are adopted by `rebase`: then a learner must remember the parameters that it sent."""
    return sync.mixing == "rebase"


def token_weight(tokens: int, steps: int) -> float:
    """tokens * (tokens / steps): >= 0, finite for whatever an offer may claim.

    Equal speed and batch give equal weights; an island that lost half its batch at equal steps weighs a quarter. With
    equal batches the weight goes with the steps, so an island half as fast (H_i = H / 2) weighs half.

    No steps or no tokens give the weight 0, never a division by 0. Such an offer is refused (`no_weight`) before it
    counts as present, so no merge has only weights of 0. A slot for which only such offers come has no quorum; it
    waits, with that reason, or is skipped.
    """
    if steps <= 0 or tokens <= 0:
        return 0.0
    return tokens * tokens / steps


LEAST = 1 / 64  # of its weight, which even a delta of zeros keeps: weights are relative, and something must be merged


@dataclass(frozen=True)
class JudgedDelta:
    """A delta as the log states it, with the `weight` that its tokens give. `round_steps`: those of a round
    (rules/eligibility.py)."""

    learner: str
    steps: int
    norm: float
    weight: float
    round_steps: int


@dataclass(frozen=True)
class DeltaShare:
    """The delta is multiplied by `scale` and weighs `weight`. `reason`: why it is clipped; "" if it is not."""

    scale: float
    weight: float
    reason: str = ""


def judge(known: Known, deltas: Sequence[JudgedDelta], clip: float | Literal["none"]) -> list[DeltaShare]:
    """The verdicts on a slot's deltas, in their order. `known`: the fragment's memory as of the commit before. Exact,
    from logged figures alone."""
    counted, measured = counted_steps(deltas), [(delta.norm, delta.steps) for delta in deltas]
    usual, least = usual_norms(known, measured, counted), least_norms(measured, counted)
    verdicts = []
    for delta, steps, longer, shorter in zip(deltas, counted, usual, least, strict=True):
        weight = delta.weight if steps == delta.steps else delta.weight * steps / delta.steps
        if clip == "none":
            verdicts.append(DeltaShare(1.0, weight))
        elif longer and delta.norm > clip * longer:
            times = f"{delta.learner}'s delta is {delta.norm / longer:.3g} times as long as usual"
            verdicts.append(DeltaShare(longer / delta.norm, weight, f"{times}: clipped to that"))
        else:
            full = clip * delta.norm >= shorter
            verdicts.append(DeltaShare(1.0, weight if full else weight * max(LEAST, clip * delta.norm / shorter)))
    return verdicts


def counted_steps(deltas: Sequence[JudgedDelta]) -> list[int]:
    """For how many steps each delta counts. One that is alone has nothing to be weighed against."""
    if len(deltas) < 2:
        return [delta.steps for delta in deltas]
    rising, counted = sorted(delta.steps / delta.round_steps for delta in deltas), []
    for delta in deltas:
        others = median_without(rising, delta.steps / delta.round_steps)
        counted.append(min(delta.steps, ceil(max(1.0, others) * delta.round_steps)))
    return counted
