"""A learner, one step after the other: what the fast form must agree with."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from diloco_cli.simulate.chips import Learner
from diloco_cli.simulate.draws import repairs_ms, step_failures, uniforms
from diloco_cli.simulate.timeline import Timeline, timeline

FAR_MS = 1 << 62


class Slices:
    """The slices of one learner: how many are there, and when the others come back."""

    def __init__(self, learner: Learner, rng: np.random.Generator) -> None:
        self.learner = learner
        self.active = learner.slices
        self.failures = 0
        self._returns: list[int] = []
        self._delays = repairs_ms(learner.repair, rng)

    @property
    def next_return_ms(self) -> int:
        return self._returns[0] if self._returns else FAR_MS

    def fail(self, count: int, now_ms: int) -> int:
        """`count` slices leave at the end of a step. When stepping goes on: after the downscale, or, with nothing left
        or without elasticity, after the last awaited return and an upscale."""
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
        """Whoever is back by the end of a stop joins with it."""
        while self._returns and self._returns[0] <= now_ms:
            heappop(self._returns)
            self.active += 1
        return now_ms


def walk(learner: Learner, horizon_ms: int, rng: np.random.Generator) -> Timeline:
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
    """How many of the failures drawn for a full learner hit different slices that are there."""
    hit = {slot for slot in (int(next(chances) * full) for _ in range(drawn)) if slot < active}
    return len(hit)
