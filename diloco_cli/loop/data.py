"""A user's data in the user's own loop: a sampler that draws the island's samples, and the loader's state.

The state is saved behind the optimizer's moments, plain values and tensors as JSON:

    the optimizer's moments, perhaps none | {"position": tokens, "state": ...} | length of the JSON, 8 bytes

`position` is where the island stood when the loader was in this state.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler

from diloco_cli.corpus.shuffle import BlockShuffle
from diloco_cli.errors import UsageError
from diloco_cli.tensors.payload import DTYPES

MAX_STATE_BYTES = 1 << 20
LENGTH_BYTES = 8
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
AT_ONCE = 256  # samples whose places are computed together


class StatefulLoader(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class SavedLoader:
    position: int
    state: Any


def joined(moments: bytes, saved: bytes) -> bytes:
    return moments + saved + len(saved).to_bytes(LENGTH_BYTES, "little")


def parted(data: bytes) -> tuple[bytes, SavedLoader | None]:
    """The moments, and the loader's state; None, and all of `data`, if there is none that can be read."""
    size = int.from_bytes(data[-LENGTH_BYTES:], "little")
    start = len(data) - LENGTH_BYTES - size
    if not 0 < size <= MAX_STATE_BYTES or start < 0:
        return data, None
    try:
        found = json.loads(data[start:-LENGTH_BYTES])
        return data[:start], SavedLoader(int(found["position"]), _read(found["state"]))
    except (ValueError, KeyError, TypeError, RuntimeError):
        return data, None


def encoded(loader: StatefulLoader, position: int) -> bytes:
    """Raises UsageError if the state holds what cannot be saved, or is too large."""
    data = json.dumps({"position": position, "state": _plain(loader.state_dict(), "state_dict()")}).encode()
    if len(data) > MAX_STATE_BYTES:
        raise UsageError(f"the loader's state has {len(data):,} bytes, more than {MAX_STATE_BYTES:,}", where="island")
    return data


def _plain(value: Any, where: str) -> Any:
    """Lists, texts, numbers and dictionaries by text as they are; all else marked with what it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(item, f"{where}[{n}]") for n, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$": "tuple", "items": _plain(list(value), where)}
    if isinstance(value, dict):
        pairs = [[_plain(key, where), _plain(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"$": "dict", "pairs": pairs}
    if isinstance(value, bytes):
        return {"$": "bytes", "data": b64encode(value).decode()}
    if isinstance(value, torch.Tensor) and value.dtype in DTYPES:
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        shape = list(value.shape)
        return {"$": "tensor", "dtype": DTYPES[value.dtype], "shape": shape, "data": b64encode(raw).decode()}
    raise UsageError(
        f"the loader's state holds a {type(value).__name__} at {where}, which cannot be saved",
        where="island",
        hint="numbers, texts, bytes, lists, tuples, dictionaries and tensors can; or join with data='external'",
    )


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value["$"] == "tuple":
        return tuple(_read(value["items"]))
    if value["$"] == "dict":
        return {_read(key): _read(item) for key, item in value["pairs"]}
    data = b64decode(value["data"])
    if value["$"] == "bytes":
        return data
    dtype = _DTYPES[value["dtype"]]
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(value["shape"]) if data else torch.empty(0).to(dtype)


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
