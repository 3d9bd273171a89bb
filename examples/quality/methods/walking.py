"""A learner that fails, step by step. The product jumps from failure to failure (forecast/chips.py); the tests compare
the two, and this study plays each step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from diloco_cli.forecast.chips import BLOCK, FAR_MS, ChipsLearner, Slices, Timeline, timeline


def uniforms(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(BLOCK).tolist()


def step_failures(failures_per_step: float, rng: np.random.Generator) -> Iterator[list[int]]:
    """Blocks of failing slices per step: Poisson, for a learner with all its slices."""
    while True:
        yield rng.poisson(failures_per_step, BLOCK).tolist()


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
