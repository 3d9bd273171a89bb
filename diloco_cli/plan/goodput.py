"""Failures in closed form: who is there, how often a quorum is, and what synchronous training would lose."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from diloco_cli.config.settings import IslandSettings
from diloco_cli.plan.model_facts import ModelFacts

GUESSED_RESTART_S = 240.0
GRADIENT_BITS = 16.0
BACKWARD_SHARE = 2 / 3  # of a step: gradients can travel while the backward pass still computes others


def restart_s(island: IslandSettings) -> float:
    return GUESSED_RESTART_S if island.restart_s is None else island.restart_s


def availability(island: IslandSettings) -> float:
    """MTBF / (MTBF + restart); 1 where the inventory names no failures."""
    if island.mtbf_s is None:
        return 1.0
    return island.mtbf_s / (island.mtbf_s + restart_s(island))


def kept_work(island: IslandSettings, at_risk_s: float) -> float:
    """Share of the work that failures do not throw away: each one costs what had not been merged yet."""
    if island.mtbf_s is None:
        return 1.0
    return island.mtbf_s / (island.mtbf_s + at_risk_s)


def probability_at_least(quorum: int, availabilities: Sequence[float]) -> float:
    """Poisson-binomial: P(at least `quorum` islands are there), the islands failing independently."""
    few = [1.0] + [0.0] * (quorum - 1)  # few[k] = P(exactly k of those seen so far are there), k below the quorum
    for p in availabilities:
        shifted = [0.0, *few[:-1]]
        few = [stay * (1 - p) + come * p for stay, come in zip(few, shifted, strict=True)]
    return 1.0 - sum(few)


def synchronous_tokens_per_s(
    islands: Sequence[IslandSettings], rates: Sequence[float], batch_tokens: int, model: ModelFacts
) -> float:
    """Data-parallel on the same islands: balanced batches, bf16 gradients in a ring all-reduce.

    A step is the compute and what of the all-reduce the backward pass cannot hide; any island that is away
    stops all of them. `batch_tokens` is the batch of all islands together.
    """
    compute_s = batch_tokens / sum(rates)
    exchange_s = _all_reduce_s(islands, model)
    step_s = compute_s + max(0.0, exchange_s - BACKWARD_SHARE * compute_s)
    return batch_tokens / step_s * prod(availability(island) for island in islands)


def _all_reduce_s(islands: Sequence[IslandSettings], model: ModelFacts) -> float:
    """2 (M - 1) / M of the gradients pass through every link, both ways; the slowest decides."""
    known = [bps for island in islands for bps in (island.link.up_bps, island.link.down_bps) if bps is not None]
    if len(islands) == 1 or not known:
        return 0.0
    share = 2 * (len(islands) - 1) / len(islands)
    return share * model.parameters * GRADIENT_BITS / min(known)
