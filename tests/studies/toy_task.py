"""The model that the product's own syncer believes to serve; toy learners never build it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.studies.toy_runs import FRAGMENTS


class Numbers(nn.Module):
    """One vector of `elements` zeros a fragment."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        for index in range(FRAGMENTS):
            self.register_parameter(f"w{index}", nn.Parameter(torch.zeros(elements)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([parameter.mean() for parameter in self.parameters()]).abs().mean()


class Nothing:
    """A stream of data that nobody looks at."""

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, 1), torch.zeros(1, 1)

    def held_out(self, num_sequences: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.batch(0, 1, 0, 1)


def model(elements: int) -> nn.Module:
    return Numbers(elements)


class SlowNothing(Nothing):
    """The same, and each batch takes its time."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.step_s)
        return super().batch(shard, num_shards, position, batch_tokens)


def data() -> Nothing:
    return Nothing()


def slow_data(step_s: float) -> Nothing:
    return SlowNothing(step_s)
