"""Failures in closed form: availability of islands and of a quorum, and the loss of synchronous training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from diloco_cli.config.settings import IslandSettings
from diloco_cli.formulas import formula
from diloco_cli.plan.model_facts import ModelFacts

GUESSED_RESTART_S = 240.0
GRADIENT_BITS = 16.0
MAX_TERMS = 2_000_000  # of the probabilities that enough other islands are present, summed island by island
BACKWARD_SHARE = 2 / 3  # of a step, its end: gradients appear, and can travel, during it


def restart_s(island: IslandSettings) -> float:
    return GUESSED_RESTART_S if island.restart_s is None else island.restart_s


def availability(island: IslandSettings) -> float:
    """MTBF / (MTBF + restart); 1 if the inventory gives no failures."""
    return 1.0 if island.mtbf_s is None else share_of_time(island.mtbf_s, restart_s(island))


@formula("island", "availability")
def share_of_time(mtbf_s: float, restart_s: float) -> float:
    return mtbf_s / (mtbf_s + restart_s)


def kept_work(island: IslandSettings, at_risk_s: float) -> float:
    """Share of the work that failures do not lose: each failure loses the work that was not merged yet."""
    return 1.0 if island.mtbf_s is None else share_of_work(island.mtbf_s, at_risk_s)


@formula("island", "kept when it fails")
def share_of_work(mtbf_s: float, at_risk_s: float) -> float:
    return mtbf_s / (mtbf_s + at_risk_s)


def probability_at_least(quorum: int, availabilities: Sequence[float]) -> float:
    """Poisson-binomial: P(at least `quorum` islands are there), the islands failing independently."""
    if quorum <= 0:
        return 1.0
    few = [1.0] + [0.0] * (quorum - 1)  # few[k] = P(exactly k of those seen so far are there), k below the quorum
    for p in availabilities:
        shifted = [0.0, *few[:-1]]
        few = [stay * (1 - p) + come * p for stay, come in zip(few, shifted, strict=True)]
    return 1.0 - sum(few)


@formula("prediction", "P(quorum)", text="at least {quorum} of islands with {availabilities} (Poisson-binomial)")
def quorum_probability(quorum: int, availabilities: Sequence[float]) -> float:
    return probability_at_least(quorum, availabilities)


@formula("prediction", "P(all)")
def all_present_probability(availabilities: Sequence[float]) -> float:
    return prod(availabilities)


@dataclass(frozen=True)
class Waiting:
    """The cost of a missing quorum. `moving[i]`: the share of its own time in which island i need not stand still;
    `still`: the share of the time without a quorum in which learners stand still."""

    moving: tuple[float, ...]
    still: float = 0.0


def waiting(quorum: int, availabilities: Sequence[float], failures_per_s: Sequence[float], drift_s: float) -> Waiting:
    """A present island misses the quorum if fewer than K - 1 of the others are present; then it steps on for `drift_s`
    and stands still for the rest.

    Absences of the quorum are assumed to be exponential, P(missing) / rate long on average, where rate = the sum over
    islands of availability x failures per second x P(exactly K - 1 of the others are present).
    """
    missing = 1.0 - probability_at_least(quorum, availabilities)
    if quorum == 1 or missing <= 0:  # at K = 1 any present island is enough
        return Waiting((1.0,) * len(availabilities))
    same = {p: p for p in availabilities}
    if len(same) * len(availabilities) * quorum > MAX_TERMS:  # then a single island makes little difference
        same = dict.fromkeys(availabilities, sorted(availabilities)[len(availabilities) // 2])
    enough, without = {}, {}  # P(K - 1 of the others, or K of them), by an island's own availability
    for p in set(same.values()):
        others = list(availabilities)
        others.remove(p)
        enough[p], without[p] = probability_at_least(quorum - 1, others), probability_at_least(quorum, others)
    lost_per_s = sum(
        p * rate * (enough[same[p]] - without[same[p]]) for p, rate in zip(availabilities, failures_per_s, strict=True)
    )
    still = math.exp(-drift_s * max(0.0, lost_per_s) / missing)
    return Waiting(tuple(1.0 - (1.0 - enough[same[p]]) * still for p in availabilities), still)


def synchronous_tokens_per_s(
    islands: Sequence[IslandSettings], rates: Sequence[float], batch_tokens: int, model: ModelFacts
) -> float:
    """Data-parallel on the same islands: balanced batches, bf16 gradients in a ring all-reduce.

    A step is the compute plus the part of the all-reduce that the backward pass cannot hide; any absent island
    stops all of them. `batch_tokens` is the batch of all islands together.
    """
    exchange_s, together = _all_reduce_s(islands, model), all_present_probability([availability(i) for i in islands])
    return synchronous_rate(batch_tokens, synchronous_step_s(batch_tokens, sum(rates), exchange_s), together)


@formula("prediction", "synchronous", "tokens/s")
def synchronous_rate(batch_tokens: int, step_s: float, all_present: float) -> float:
    return batch_tokens / step_s * all_present


@formula("prediction", "synchronous step", "s")
def synchronous_step_s(batch_tokens: int, tokens_per_s: float, all_reduce_s: float) -> float:
    compute_s = batch_tokens / tokens_per_s
    return compute_s + max(0.0, all_reduce_s - BACKWARD_SHARE * compute_s)


def _all_reduce_s(islands: Sequence[IslandSettings], model: ModelFacts) -> float:
    """2 (M - 1) / M of the gradients pass through every link, both ways; the slowest decides."""
    known = [bps for island in islands for bps in (island.link.up_bps, island.link.down_bps) if bps is not None]
    if len(islands) == 1 or not known:
        return 0.0
    return all_reduce_s(len(islands), model.parameters, min(known))


@formula("prediction", "all-reduce", "s")
def all_reduce_s(islands: int, parameters: int, slowest_bps: float) -> float:
    return 2 * (islands - 1) / islands * parameters * GRADIENT_BITS / slowest_bps
