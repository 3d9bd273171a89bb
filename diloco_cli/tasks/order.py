"""The order in which examples are drawn: shuffled anew each epoch, computable by everybody from a seed."""

from __future__ import annotations

import torch


class ShuffledEpochs:
    """Example number n of an endless stream over `size` examples. Learners share the stream: number i of shard s is
    number i * shards + s, so that in each epoch every example is drawn exactly once, by one of them."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._orders: dict[int, torch.Tensor] = {}

    def shard(self, shard: int, num_shards: int, first: int, count: int) -> list[int]:
        """The examples number `first` to `first + count` of a shard."""
        return [self[i * num_shards + shard] for i in range(first, first + count)]

    def __getitem__(self, number: int) -> int:
        epoch, index = divmod(number, self.size)
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._orders = {epoch: torch.randperm(self.size, generator=generator)}
        return int(self._orders[epoch][index])
