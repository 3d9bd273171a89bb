"""Failures and repairs: learners made of slices, with failures as rates. There is no object per chip.

All times in the simulators are whole milliseconds, so that equal situations have equal numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

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
    """One set of constants for all cells of the published table; the publication gives `mtbi_s` alone."""

    mtbi_s: float = YEAR_S
    step_s: float = 5.0
    down_s: float = 15.0
    up_s: float = 15.0
    slice_chips: int = 2048
    repair: Repair = Repair(60.0)


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

    @property
    def failures_per_step(self) -> float:
        """The expected number, with all slices present."""
        return self.slices * self.failures_per_s * self.step_ms / MS


def equal_learners(chips: int, learners: int, constants: Constants) -> tuple[ChipsLearner, ...]:
    """`chips` split evenly."""
    per_learner = chips / learners
    slices = max(1, round(per_learner / constants.slice_chips))
    made = []
    for index in range(learners):
        made.append(
            ChipsLearner(
                name=f"learner-{index}",
                slices=slices,
                failures_per_s=per_learner / slices / constants.mtbi_s,
                step_ms=round(constants.step_s * MS),
                down_ms=round(constants.down_s * MS),
                up_ms=round(constants.up_s * MS),
                repair=constants.repair,
                weight=1.0 / learners,
            )
        )
    return tuple(made)


def one_cluster(learners: tuple[ChipsLearner, ...], elastic: bool, constants: Constants) -> ChipsLearner:
    """The same slices as one synchronous data-parallel learner: all step and stop
    together, for a down- or upscale of `constants`. Slices of different learners count alike."""
    slices = sum(learner.slices for learner in learners)
    failing = sum(learner.slices * learner.failures_per_s for learner in learners)
    return replace(
        learners[0],
        name="data-parallel",
        slices=slices,
        failures_per_s=failing / slices,
        down_ms=round(constants.down_s * MS),
        up_ms=round(constants.up_s * MS),
        weight=1.0,
        elastic=elastic,
    )


Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Timeline:
    """Stretch i: `steps[i]` finished steps in a row from `start_ms[i]` on, with `active[i]` slices. Lost steps and
    stops lie between the stretches. `failures`: slices that failed while the learner stepped."""

    learner: ChipsLearner
    horizon_ms: int
    start_ms: Whole
    steps: Whole
    active: Whole
    failures: int

    @property
    def end_ms(self) -> Whole:
        return self.start_ms + self.steps * self.learner.step_ms

    @property
    def goodput(self) -> float:
        """Share of its chip time spent on steps that counted; a step with fewer slices counts in part."""
        useful_ms = float((self.steps * self.active).sum()) * self.learner.step_ms / self.learner.slices
        return useful_ms / self.horizon_ms


def timeline(
    learner: ChipsLearner, horizon_ms: int, stretches: Sequence[tuple[int, int, int]], failures: int
) -> Timeline:
    """From (start, steps, active) triples; those without a step or a slice are left out."""
    table = np.array([stretch for stretch in stretches if stretch[1] and stretch[2]], dtype=np.int64).reshape(-1, 3)
    return Timeline(learner, horizon_ms, table[:, 0], table[:, 1], table[:, 2], failures)


def fleet_goodput(timelines: Sequence[Timeline]) -> float:
    """The goodput of all chips together."""
    return sum(t.goodput * t.learner.weight for t in timelines) / sum(t.learner.weight for t in timelines)


def fleet_uptime(timelines: Sequence[Timeline]) -> float:
    """Share of time in which anything steps: the union of all stretches."""
    starts = np.concatenate([t.start_ms for t in timelines])
    ends = np.concatenate([t.end_ms for t in timelines])
    if not len(starts):
        return 0.0
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reached = np.maximum.accumulate(ends)
    before = np.concatenate([starts[:1], reached[:-1]])  # up to where earlier stretches have covered the time
    covered = np.maximum(0, ends - np.maximum(starts, before)).sum()
    return float(covered / timelines[0].horizon_ms)


@dataclass(frozen=True)
class Presence:
    """Shares of the time, and of the fleet's work. `share`: of the time with at least K learners. `uptime`, `goodput`:
    of steps that count, because the quorum is present or has been missing for no longer than the drift bound."""

    share: float
    uptime: float
    goodput: float


def presence(timelines: Sequence[Timeline], quorum: int, drift_s: float = 0.0) -> Presence:
    """Over all stretches of finished steps: between two of their ends the number of learners that step is constant.
    With fewer than K, learners step on for `drift_s` and then stand still."""
    starts = np.concatenate([t.start_ms for t in timelines])
    ends = np.concatenate([t.end_ms for t in timelines])
    horizon_ms = timelines[0].horizon_ms
    moments, place = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    if not len(moments):
        return Presence(0.0, 0.0, 0.0)
    change = np.zeros(len(moments), dtype=np.int64)
    np.add.at(change, place, np.repeat([1, -1], [len(starts), len(ends)]))
    number = np.cumsum(change)[:-1]
    there = number >= quorum
    share = float((np.diff(moments) * there).sum()) / horizon_ms
    moments, which, counts = _counted(moments, there, round(min(drift_s * MS, horizon_ms)))
    counted_ms = np.concatenate([[0], np.cumsum(np.diff(moments) * counts)])  # at each moment: how long until then
    done = 0.0
    for t in timelines:
        counted = np.interp(t.end_ms, moments, counted_ms) - np.interp(t.start_ms, moments, counted_ms)
        learner = t.learner
        done += learner.weight * float((counted * t.active).sum()) / learner.slices
    total = sum(t.learner.weight for t in timelines) * horizon_ms
    uptime = float((np.diff(moments) * (counts & (number[which] > 0))).sum()) / horizon_ms
    return Presence(share, uptime, done / total)


def _counted(moments: Whole, there: Flags, drift_ms: int) -> tuple[Whole, Whole, Flags]:
    """(moments, with those at which the drift bound ends an absence; the interval before, of each interval now; whether
    a step counts in it)"""
    lost = ~there & np.concatenate([[True], there[:-1]])
    since = np.maximum.accumulate(np.where(lost, moments[:-1], moments[0]))  # when the last absence began
    finer = np.unique(np.concatenate([moments, np.minimum(moments[:-1][lost] + drift_ms, moments[-1])]))
    which = np.searchsorted(moments, finer[:-1], side="right") - 1
    return finer, which, there[which] | (finer[:-1] - since[which] < drift_ms)


BLOCK = 8192
MAX_MS = 1 << 61


def generator(*seeds: int) -> np.random.Generator:
    """Independent streams for different numbers; the same stream for the same ones, on every machine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds)))


def repairs_ms(repair: Repair, rng: np.random.Generator) -> Iterator[int]:
    """Repair times of one slice after the other, in whole milliseconds, at least one."""
    while True:
        seconds = repair.quantile_s(rng.random(BLOCK))
        yield from np.clip(np.rint(seconds * MS), 1, MAX_MS).astype(np.int64).tolist()


class Slices:
    """The slices of one learner: how many are present, and when the others come back."""

    def __init__(self, learner: ChipsLearner, rng: np.random.Generator) -> None:
        self.learner = learner
        self.active = learner.slices
        self.failures = 0
        self._returns: list[int] = []
        self._delays = repairs_ms(learner.repair, rng)

    @property
    def next_return_ms(self) -> int:
        return self._returns[0] if self._returns else FAR_MS

    def fail(self, count: int, now_ms: int) -> int:
        """`count` slices leave at the end of a step. Returns when stepping goes on: after the downscale, or, if no
        slice is left or the learner is not elastic, after the last awaited return and an upscale."""
        self.failures += count
        self.active -= count
        for _ in range(count):
            heappush(self._returns, now_ms + next(self._delays))
        if not self.learner.elastic:
            return self.take_in(max(self._returns) + self.learner.up_ms)
        now_ms += self.learner.down_ms
        if self.active == 0:
            now_ms = max(now_ms, self.next_return_ms + self.learner.up_ms)
        return self.take_in(now_ms)

    def take_in(self, now_ms: int) -> int:
        """Slices that are back by the end of a stop join then."""
        while self._returns and self._returns[0] <= now_ms:
            heappop(self._returns)
            self.active += 1
        return now_ms


def leap(learners: Sequence[ChipsLearner], horizon_ms: int, rng: np.random.Generator) -> list[Timeline]:
    """One timeline per learner, by events alone: failures of the whole fleet as one Poisson process, steady state
    skipped. The cost grows with failures, not with chips or steps."""
    rates = np.array([learner.slices * learner.failures_per_s for learner in learners])
    count = int(rng.poisson(rates.sum() * horizon_ms / MS))
    times = np.sort(rng.integers(0, horizon_ms, count))
    whose = rng.choice(len(learners), count, p=rates / rates.sum()) if count else np.zeros(0, dtype=np.int64)
    which = rng.random(count)
    made = []
    for index, learner in enumerate(learners):
        mine = whose == index
        hits = (which[mine] * learner.slices).astype(np.int64)
        made.append(_leap_one(learner, horizon_ms, times[mine].tolist(), hits.tolist(), rng))
    return made


def _leap_one(
    learner: ChipsLearner, horizon_ms: int, times: list[int], hits: list[int], rng: np.random.Generator
) -> Timeline:
    """`times[i]`: a failure of slice `hits[i]`, which counts if the learner steps then and has such a slice."""
    slices, step_ms, up_ms = Slices(learner, rng), learner.step_ms, learner.up_ms
    stretches: list[tuple[int, int, int]] = []
    times.append(FAR_MS)
    hits.append(-1)
    now_ms = i = 0
    while now_ms < horizon_ms:
        active = slices.active
        while times[i] < now_ms:
            i += 1
        next_failure = i  # those before it hit slices that are away, unless one comes back first
        while hits[next_failure] >= active:
            next_failure += 1
        steps_before = (times[next_failure] - now_ms) // step_ms
        failed_ms = now_ms + (steps_before + 1) * step_ms
        joins_ms = now_ms + -((now_ms - slices.next_return_ms) // step_ms) * step_ms
        end_ms = min(failed_ms, joins_ms)
        if end_ms > horizon_ms:
            stretches.append((now_ms, (horizon_ms - now_ms) // step_ms, active))
            break
        if failed_ms <= joins_ms:
            stretches.append((now_ms, steps_before, active))
            hit = set()
            while times[i] < failed_ms:
                if hits[i] < active:
                    hit.add(hits[i])
                i += 1
            now_ms = slices.fail(len(hit), failed_ms)
            stretches.append((failed_ms - step_ms, 1, active - len(hit)))
        else:
            stretches.append((now_ms, (joins_ms - now_ms) // step_ms, active))
            now_ms = slices.take_in(joins_ms + up_ms)
    return timeline(learner, horizon_ms, stretches, slices.failures)
