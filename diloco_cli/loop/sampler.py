"""A map-style dataset, addressed: which of its samples the island draws next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch.utils.data import Sampler

from diloco_cli.corpus.shuffle import BlockShuffle
from diloco_cli.errors import UsageError

AT_ONCE = 256  # samples whose places are computed together


class Reader(Protocol):
    """Where an island's reading stands."""

    shard: int
    num_shards: int
    position: int
    over: bool


class ShardSampler(Sampler[int]):
    """Indices below `size`, shuffled anew each epoch in constant memory; each shard draws its part of an epoch's order.
    Sample n of the shard begins at token n * tokens_each.

    A new iteration begins at the island's position of then: what a loader had fetched ahead for an iteration that was
    left is drawn again. It ends with the run.
    """

    def __init__(self, reader: Reader, size: int, tokens_each: int, seed: int) -> None:
        if size < 1 or tokens_each < 1:
            raise UsageError(f"{size} samples of {tokens_each} tokens: both must be at least 1", where="island.sampler")
        if size < reader.num_shards:
            raise UsageError(
                f"{size} samples are fewer than the run's {reader.num_shards} shards",
                where="island.sampler",
                hint=f"allowed: {reader.num_shards} or more; or a run of fewer: diloco launch --set data.shards=N",
            )
        self._reader, self._tokens_each, self._order = reader, tokens_each, BlockShuffle(size, 1, seed)

    def __iter__(self) -> Iterator[int]:
        reader = self._reader
        number, rest = divmod(reader.position, self._tokens_each)
        if rest:
            raise UsageError(
                f"position {reader.position} lies inside a sample of {self._tokens_each} tokens",
                where="island.sampler",
                hint="count every sample as tokens_each tokens in island.step(tokens=...)",
            )
        while not reader.over:
            for index in self._order.shard(reader.shard, reader.num_shards, number, AT_ONCE).tolist():
                if reader.over:
                    return
                yield index
            number += AT_ONCE
