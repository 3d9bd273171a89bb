"""Failures and repairs: learners made of slices, with failures as rates. There is no object per chip.

All times in the simulators are whole milliseconds, so that equal situations have equal numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import expm1

import numpy as np
from numpy.typing import NDArray

MS = 1000.0
DAY_MS = 86_400_000
FAR_MS = 1 << 62  # never
YEAR_S = 365 * 86_400.0
MEAN_POINTS = 100_000  # of the quantile function, for a mean


@dataclass(frozen=True)
class Repair:
    """How long a slice stays away: exponentiated Weibull, F(x) = (1 - exp(-(x / scale)^shape))^exponent.

    Shape and exponent 1: exponential. arXiv 2604.21428 names the family and not its parameters.
    """

    scale_s: float
    shape: float = 1.0
    exponent: float = 1.0

    def quantile_s(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """The seconds that a share `u` of the repairs does not exceed, for u in [0, 1)."""
        within: NDArray[np.float64] = -np.log1p(-(u ** (1.0 / self.exponent)))
        seconds: NDArray[np.float64] = self.scale_s * within ** (1.0 / self.shape)
        return seconds

    def cdf(self, seconds: float) -> float:
        """The share of repairs that end within `seconds`."""
        return float((-expm1(-((seconds / self.scale_s) ** self.shape))) ** self.exponent)

    @property
    def mean_s(self) -> float:
        """By the midpoint rule over the quantiles; within 0.1 % for shapes from 0.5 upwards."""
        u = (np.arange(MEAN_POINTS) + 0.5) / MEAN_POINTS
        return float(self.quantile_s(u).mean())

    def with_mean(self, mean_s: float) -> Repair:
        """The same distribution, scaled to this mean."""
        return replace(self, scale_s=self.scale_s * mean_s / self.mean_s)


@dataclass(frozen=True)
class Constants:
    """One set of constants for all cells of the published table; the publication does not give those in `FITTED`."""

    mtbi_s: float = YEAR_S
    step_s: float = 5.0
    down_s: float = 15.0
    up_s: float = 15.0
    slice_chips: int = 2048
    repair: Repair = Repair(60.0)


FITTED = ("step_s", "down_s", "up_s", "slice_chips", "repair")


@dataclass(frozen=True)
class ChipsLearner:
    """One learner as the simulators see it.

    A slice fails `failures_per_s` times a second while the learner steps, never while it stops. A step in which slices
    fail counts for the slices that survive; the others leave, and stepping goes on after `down_ms`. Slices that have
    come back join at the end of a step, which costs `up_ms`, or at no cost during a stop for another reason.
    Not elastic: any failure stops all slices until the last one is back. `weight`: its share of the fleet's chips.
    """

    name: str
    slices: int
    failures_per_s: float
    step_ms: int
    down_ms: int
    up_ms: int
    repair: Repair
    weight: float
    elastic: bool = True
    slowdown: float = 1.0

    @property
    def failures_per_step(self) -> float:
        """The expected number, with all slices present."""
        return self.slices * self.failures_per_s * self.step_ms / MS


def equal_learners(
    chips: int, learners: int, constants: Constants, slowdowns: tuple[float, ...] = ()
) -> tuple[ChipsLearner, ...]:
    """`chips` split evenly. `slowdowns[i]`: learner i takes so many times longer for a step (a straggler)."""
    per_learner = chips / learners
    slices = max(1, round(per_learner / constants.slice_chips))
    made = []
    for index in range(learners):
        slowdown = slowdowns[index] if index < len(slowdowns) else 1.0
        made.append(
            ChipsLearner(
                name=f"learner-{index}",
                slices=slices,
                failures_per_s=per_learner / slices / constants.mtbi_s,
                step_ms=round(constants.step_s * slowdown * MS),
                down_ms=round(constants.down_s * MS),
                up_ms=round(constants.up_s * MS),
                repair=constants.repair,
                weight=1.0 / learners,
                slowdown=slowdown,
            )
        )
    return tuple(made)


def one_cluster(learners: tuple[ChipsLearner, ...], elastic: bool, constants: Constants) -> ChipsLearner:
    """The same slices as one synchronous data-parallel learner: all step together, as fast as the slowest, and stop
    together for a down- or upscale of `constants`. Slices of different learners count alike."""
    slices = sum(learner.slices for learner in learners)
    failing = sum(learner.slices * learner.failures_per_s for learner in learners)
    slowest = max(learners, key=lambda learner: learner.slowdown)
    return replace(
        slowest,
        name="data-parallel",
        slices=slices,
        failures_per_s=failing / slices,
        down_ms=round(constants.down_s * MS),
        up_ms=round(constants.up_s * MS),
        weight=1.0,
        elastic=elastic,
    )
