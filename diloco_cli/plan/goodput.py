"""Failures in closed form: availability of islands and of a quorum, and the loss of synchronous training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from diloco_cli.config.settings import IslandSettings
from diloco_cli.plan.model_facts import ModelFacts

GUESSED_RESTART_S = 240.0
GRADIENT_BITS = 16.0
MEAN_VALUE_ROUNDS = 200  # of an iteration that halves its error in each
MAX_TERMS = 2_000_000  # of the probabilities that enough other islands are present, summed island by island
MAX_POINTS = 1000  # of an integral over 20 mean times away
BACKWARD_SHARE = 2 / 3  # of a step, its end: gradients appear, and can travel, during it


def restart_s(island: IslandSettings) -> float:
    return GUESSED_RESTART_S if island.restart_s is None else island.restart_s


def availability(island: IslandSettings) -> float:
    """MTBF / (MTBF + restart); 1 if the inventory gives no failures."""
    if island.mtbf_s is None:
        return 1.0
    return island.mtbf_s / (island.mtbf_s + restart_s(island))


def kept_work(island: IslandSettings, at_risk_s: float) -> float:
    """Share of the work that failures do not lose: each failure loses the work that was not merged yet."""
    if island.mtbf_s is None:
        return 1.0
    return island.mtbf_s / (island.mtbf_s + at_risk_s)


def probability_at_least(quorum: int, availabilities: Sequence[float]) -> float:
    """Poisson-binomial: P(at least `quorum` islands are there), the islands failing independently."""
    if quorum <= 0:
        return 1.0
    few = [1.0] + [0.0] * (quorum - 1)  # few[k] = P(exactly k of those seen so far are there), k below the quorum
    for p in availabilities:
        shifted = [0.0, *few[:-1]]
        few = [stay * (1 - p) + come * p for stay, come in zip(few, shifted, strict=True)]
    return 1.0 - sum(few)


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


@dataclass(frozen=True)
class Stops:
    """A synchronous group of `slices` slices: `failures` per step with all present (arXiv 2604.21428, table 1). A step
    in which slices fail counts for the others; then all stop for `down_s`. Slices that are back join at the end of a
    step, which takes `up_s`. `away_s`: mean time of a slice's absence; `cdf`: of that time, in seconds."""

    slices: int
    failures: float
    step_s: float
    down_s: float
    up_s: float
    away_s: float
    cdf: Callable[[float], float]


def elastic_goodput(stops: Stops) -> tuple[float, float]:
    """(share of chip time, share of time) spent on steps that count. A cycle runs from one downscale to the next:

        T = step / p + down + u x up        p = 1 - exp(-failures x slices there): a step in which something fails
        u = (1 / p - 1) x (1 - exp(-n x step / T))    steps after which a slice waits to join, n lost a cycle
        there = 1 - n x (away + step) / (T x slices)
        goodput = step / p / T x there            uptime = step / p / T x (1 - (1 - there)^slices): a slice is present

    Mean values throughout, solved by iteration; within about a point of the simulation of many slices. With a single
    slice, no other slice goes on while it is absent.
    """
    if stops.failures <= 0:
        return 1.0, 1.0
    if stops.slices == 1:
        alone = inelastic_goodput(stops)
        return alone, alone
    there, cycle_s, stepping = 1.0, stops.step_s, 1.0
    for _ in range(MEAN_VALUE_ROUNDS):
        p = -math.expm1(-stops.failures * there)
        lost = stops.failures * there / p
        taken_in = (1 / p - 1) * -math.expm1(-lost * stops.step_s / cycle_s)
        cycle_s = (cycle_s + stops.step_s / p + stops.down_s + taken_in * stops.up_s) / 2
        stepping = stops.step_s / p / cycle_s
        away = lost * (stops.away_s + stops.step_s) / (cycle_s * stops.slices)
        there = (there + max(0.0, 1 - away)) / 2
    stepping = min(1.0, stepping)
    return stepping * there, stepping * (1 - (1 - there) ** stops.slices)


def inelastic_goodput(stops: Stops) -> float:
    """All slices stop until the last one is back: a cycle ends with a step in which n >= 1 slices fail (Poisson), then
    E[longest of n] + up. E[longest] = integral of 1 - P(all are back after t) over t."""
    if stops.failures <= 0:
        return 1.0
    p = -math.expm1(-stops.failures)
    width_s = stops.away_s / 50
    max_s = sum(width_s * (1 - _all_back(stops.failures, stops.cdf((k + 0.5) * width_s))) for k in range(MAX_POINTS))
    failed = min(1.0, stops.failures / p / stops.slices)
    return stops.step_s * (1 / p - failed) / (stops.step_s / p + max_s + stops.up_s)


def _all_back(failures: float, back: float) -> float:
    """(exp(failures x back) - 1) / (exp(failures) - 1), without exponentials that overflow: all of n >= 1 failed slices
    are back, each of them with probability `back`."""
    return math.exp(failures * (back - 1)) * math.expm1(-failures * back) / math.expm1(-failures)
