"""Learners that fail, in time: step by step (`walk`), or from failure to failure (`leap`).

The two share no code but the facts about slices, so that each checks the other. Random numbers are drawn in blocks: one
at a time costs a hundred times more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

from diloco_cli.forecast.chips import FAR_MS, MS, ChipsLearner, Repair
from diloco_cli.forecast.timeline import Timeline, timeline

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


def uniforms(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(BLOCK).tolist()


def step_failures(failures_per_step: float, rng: np.random.Generator) -> Iterator[list[int]]:
    """Blocks of failing slices per step: Poisson, for a learner with all its slices."""
    while True:
        yield rng.poisson(failures_per_step, BLOCK).tolist()


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


def walk(learner: ChipsLearner, horizon_ms: int, rng: np.random.Generator) -> Timeline:
    """Every step of the horizon, each with its own Poisson draw of failing slices."""
    slices, chances = Slices(learner, rng), uniforms(rng)
    stretches: list[tuple[int, int, int]] = []
    now_ms = start_ms = 0
    steps, step_ms, full = 0, learner.step_ms, learner.slices
    next_return_ms = FAR_MS
    for block in step_failures(learner.failures_per_step, rng):
        for drawn in block:
            if now_ms + step_ms > horizon_ms:
                stretches.append((start_ms, steps, slices.active))
                return timeline(learner, horizon_ms, stretches, slices.failures)
            now_ms += step_ms
            lost = _of_those_there(drawn, slices.active, full, chances) if drawn else 0
            if not lost:
                steps += 1
                if now_ms < next_return_ms:
                    continue
            stretches.append((start_ms, steps, slices.active))
            if lost:
                stretches.append((now_ms - step_ms, 1, slices.active - lost))
                now_ms = slices.fail(lost, now_ms)
            else:
                now_ms = slices.take_in(now_ms + learner.up_ms)
            next_return_ms, start_ms, steps = slices.next_return_ms, now_ms, 0
    raise AssertionError("the draws never end")


def _of_those_there(drawn: int, active: int, full: int, chances: Iterator[float]) -> int:
    """How many of the failures drawn for a full learner hit different slices that are present."""
    hit = {slot for slot in (int(next(chances) * full) for _ in range(drawn)) if slot < active}
    return len(hit)


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
