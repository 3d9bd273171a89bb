"""A map-style dataset, addressed: which of its samples the island draws next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch.utils.data import Sampler

from diloco_cli.errors import UsageError
from diloco_cli.tasks.data import ShuffledEpochs


class Reader(Protocol):
    """Where an island's reading stands."""

    shard: int
    num_shards: int
    position: int
    over: bool


class ShardSampler(Sampler[int]):
    """Indices below `size`, in the order of `ShuffledEpochs`: sample n of the shard begins at token n * tokens_each.

    A new iteration begins at the island's position of then: what a loader had fetched ahead for an iteration that was
    left is drawn again. It ends with the run.
    """

    def __init__(self, reader: Reader, size: int, tokens_each: int, seed: int) -> None:
        if size < 1 or tokens_each < 1:
            raise UsageError(f"{size} samples of {tokens_each} tokens: both must be at least 1", where="island.sampler")
        self._reader, self._tokens_each, self._order = reader, tokens_each, ShuffledEpochs(size, seed)

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
            yield self._order[number * reader.num_shards + reader.shard]
            number += 1
