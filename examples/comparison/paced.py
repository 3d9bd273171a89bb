"""A small model whose step takes a fixed time, and random data: what every contender of ocean.py trains.

A third of the step passes before the forward pass, the rest in its backward pass, as on accelerators: gradients that
appear meanwhile may already travel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FORWARD_SHARE = 1 / 3
VOCABULARY, WIDTH, BLOCKS = 256, 256, 2
SEQUENCE, BATCH_TOKENS = 16, 32


class Clocked(torch.autograd.Function):
    """Changes nothing, and ends its passes no earlier than these shares of a step after the step began."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step_s: float) -> Tensor:
        began_s = time.monotonic()
        ctx.ends_s = began_s + step_s
        time.sleep(FORWARD_SHARE * step_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(max(0.0, ctx.ends_s - time.monotonic()))
        return gradient, None


class Paced(nn.Module):
    """Tokens [batch, length] and their successors -> the mean loss in nats per token."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        wide = 4 * WIDTH
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for _ in range(BLOCKS)
        )
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.training and self.step_s:
            x = Clocked.apply(x, self.step_s)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


class Noise:
    """Every position of every shard can be drawn again."""

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        return self._draw(1 + position * num_shards + shard, batch_tokens // SEQUENCE)

    def held_out(self, num_sequences: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield self._draw(-1, num_sequences)

    def _draw(self, seed: int, count: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(VOCABULARY, (count, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))
        return drawn[:, :-1], drawn[:, 1:]


def build_model(step_s: float) -> Paced:
    return Paced(step_s)


def build_data() -> Noise:
    return Noise()


def num_parameters() -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Paced(0.0).parameters())
