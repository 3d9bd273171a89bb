"""Models and data of next to nothing, for real learners and the product's own syncer; toy learners never build them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

SLOWER = 10.0


class Numbers(nn.Module):
    """One vector of `elements` zeros a fragment."""

    def __init__(self, elements: int, fragments: int = 4) -> None:
        super().__init__()
        for index in range(fragments):
            self.register_parameter(f"w{index}", nn.Parameter(torch.zeros(elements)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([parameter.mean() for parameter in self.parameters()]).abs().mean()


class Nothing:
    """A stream of data that nobody looks at."""

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, 1), torch.zeros(1, 1)

    def held_out(self, num_sequences: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.batch(0, 1, 0, 1)


class SlowNothing(Nothing):
    """The same, and each batch takes its time; those of a shard with a factor so many times as long."""

    def __init__(self, step_s: float, factors: Sequence[float] = ()) -> None:
        self.step_s, self.factors = step_s, factors

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.step_s * (self.factors[shard] if self.factors else 1.0))
        return super().batch(shard, num_shards, position, batch_tokens)


class PacedNothing(SlowNothing):
    """A step takes so long by the clock, its arithmetic included; what is late is not caught up."""

    due_s = 0.0

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        now_s = time.monotonic()
        time.sleep(max(0.0, self.due_s - now_s))
        self.due_s = max(self.due_s, now_s) + self.step_s * self.factors[shard]
        return Nothing.batch(self, shard, num_shards, position, batch_tokens)


def own_name() -> str:
    """Of the learner that this process is; empty if it is none."""
    return next((word.partition("=")[2] for word in sys.argv if word.startswith("--name=")), "")


class SteeredData(SlowNothing):
    """The file `orders/NAME` makes that learner `slow` (ten times), or lets it `hang`."""

    def __init__(self, step_s: float, orders: str) -> None:
        super().__init__(step_s)
        self.orders = Path(orders)

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        found = super().batch(shard, num_shards, position, batch_tokens)
        if ordered(self.orders) == "slow":
            time.sleep((SLOWER - 1) * self.step_s)
        while ordered(self.orders) == "hang":
            time.sleep(0.05)
        return found


class SteeredModel(Numbers):
    """The file `orders/evaluator` makes the held-out loss `high`."""

    def __init__(self, elements: int, orders: str) -> None:
        super().__init__(elements)
        self.orders = Path(orders)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        high = not self.training and ordered(self.orders) == "high"
        return super().forward(x, y) + (10.0 if high else 0.0)


def ordered(orders: Path) -> str:
    """What this process is to do; "" if nothing."""
    path = orders / (own_name() or "evaluator")
    return path.read_text() if path.exists() else ""


model, steered_model = Numbers, SteeredModel  # entrypoints, and those of data
data, slow_data, steered_data, paced_data = Nothing, SlowNothing, SteeredData, PacedNothing
