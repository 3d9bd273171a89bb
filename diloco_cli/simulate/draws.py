"""Seeded randomness, drawn in blocks: a number at a time costs a hundred times more."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from diloco_cli.simulate.chips import MS, Repair

BLOCK = 8192
LONGEST_MS = 1 << 61


def generator(*seeds: int) -> np.random.Generator:
    """Independent streams for different numbers; the same stream for the same ones, on every machine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds)))


def repairs_ms(repair: Repair, rng: np.random.Generator) -> Iterator[int]:
    """How long one slice after the other stays away, in whole milliseconds, at least one."""
    while True:
        seconds = repair.quantile_s(rng.random(BLOCK))
        yield from np.clip(np.rint(seconds * MS), 1, LONGEST_MS).astype(np.int64).tolist()


def uniforms(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(BLOCK).tolist()


def step_failures(failures_per_step: float, rng: np.random.Generator) -> Iterator[list[int]]:
    """Blocks of failing slices per step: Poisson, for a learner with all its slices."""
    while True:
        yield rng.poisson(failures_per_step, BLOCK).tolist()
