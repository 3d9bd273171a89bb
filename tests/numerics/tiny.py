"""Models and data small enough to compute by hand, loaded through the product's own entrypoints."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

FEATURES = 6
ROWS = 4  # of one batch: batch_tokens is ROWS


class Regression(nn.Module):
    """Two layers on a fixed regression problem; forward gives the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.second = nn.Linear(5, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.second(torch.tanh(self.first(x))).squeeze(-1) - y) ** 2).mean()


class Slope(nn.Module):
    """Loss linear in the weights, so that every gradient is the data: dyadic in, dyadic out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
        self.b = nn.Parameter(torch.tensor([4.0, 0.25]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.a * x[0, :3]).sum() + (self.b * x[0, 3:5]).sum()


class TwoScalars(nn.Module):
    """Two numbers, both 0 at first, whose gradients are always 2."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * self.a.sum() + 2 * self.b.sum()


class TinyStream:
    """Batch number position / ROWS of each shard is a seeded random draw."""

    def __init__(self, dyadic: bool = False) -> None:
        self.dyadic = dyadic

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * shard + position // batch_tokens)
        if self.dyadic:
            x = torch.randint(-8, 8, (batch_tokens, FEATURES), generator=generator) / 16
            return x, torch.zeros(batch_tokens)
        x = torch.randn(batch_tokens, FEATURES, generator=generator)
        return x, x.sum(dim=1).sin()

    def held_out(self, num_sequences: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.batch(999, 1, 0, ROWS)


regression, slope, two_scalars, stream = Regression, Slope, TwoScalars, TinyStream  # entrypoints


def dyadic_stream() -> TinyStream:
    return TinyStream(dyadic=True)


class Normalised(nn.Module):
    """Its held-out loss depends on running statistics, which must be those of data far from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.first = nn.Linear(FEATURES, 16)
        self.inner = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(self.first(self.norm(x))))
        return ((self.second(hidden).squeeze(-1) - y) ** 2).mean()


class FarStream:
    """Around (20, -20, 20, ...); what is to be learned is as large as the noise that cannot be."""

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * shard + position // batch_tokens)
        x = torch.randn(batch_tokens, FEATURES, generator=generator)
        far = 5.0 * x + torch.tensor([20.0, -20.0]).repeat(FEATURES // 2)
        return far, x[:, 0] + torch.randn(batch_tokens, generator=generator)

    def held_out(self, num_sequences: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.batch(999, 1, 0, 4096)


normalised, far_stream = Normalised, FarStream
