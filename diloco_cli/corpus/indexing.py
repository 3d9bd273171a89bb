"""Writes the index of token shards that are there already: `.bin` files of bare tokens, or `.npy` files of numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from math import prod

import numpy as np
from numpy.lib import format as npy

from diloco_cli.corpus.encoders import Encoder
from diloco_cli.corpus.index import (
    BLOCK_BYTES,
    INDEX_KEY,
    ITEM_BYTES,
    Index,
    Shard,
    block_sum,
    encode_index,
)
from diloco_cli.corpus.tokenizing import refuse_finished, refuse_unfinished
from diloco_cli.errors import DataCheckError, NotFoundError, UsageError
from diloco_cli.store.port import Store

BARE, NUMPY = ".bin", ".npy"
PAGE = 1000
MAX_HEADER_BYTES = 64 << 10
Told = Callable[[str, int], None]


@dataclass(frozen=True)
class _TokenFile:
    """Tokens of `dtype` from byte `offset` on."""

    name: str
    offset: int
    tokens: int
    dtype: str


def index_shards(
    store: Store, dtype: str | None = None, encoder: Encoder | None = None, tell: Told = lambda name, num_bytes: None
) -> Index:
    """The index of all shards in the store, sorted by name, now written there. `dtype`: of bare files, uint16 unless
    said; `encoder`: what made the tokens, if that is known. Each shard is read once. Raises UsageError, NotFoundError.
    """
    refuse_finished(store)
    refuse_unfinished(store)
    files = [_file(store, name, dtype or "uint16") for name in _names(store)]
    if not files:
        hint = "diloco data tokenize INPUT -o OUT makes shards of text"
        raise NotFoundError(f"there are no {BARE} or {NUMPY} files", where=store.url, hint=hint)
    kinds = sorted({file.dtype for file in files})
    if len(kinds) > 1:
        raise UsageError(f"the shards are of several types: {', '.join(kinds)}", where=store.url)
    shards, largest = [], 0
    for file in files:
        shard, most = _summed(store, file, tell)
        shards.append(shard)
        largest = max(largest, most)
    vocabulary = encoder.vocabulary if encoder else largest + 1
    if largest >= vocabulary:
        raise UsageError(
            f"wrong tokenizer: there is a token {largest}, and it has only {vocabulary}",
            where=store.url,
            hint="give the tokenizer that made these tokens, or none",
        )
    index = Index(kinds[0], vocabulary, tuple(shards), encoder.digest if encoder else None)
    store.put(INDEX_KEY, encode_index(index))
    return index


def _names(store: Store) -> Iterator[str]:
    after = ""
    while page := store.list("", after, PAGE):
        yield from (name for name in page if "/" not in name and name.endswith((BARE, NUMPY)))
        after = page[-1]


def _file(store: Store, name: str, dtype: str) -> _TokenFile:
    stat, where = store.stat(name), f"{store.url}/{name}"
    if stat is None:
        raise DataCheckError("went while it was read", where=where)
    if name.endswith(NUMPY):
        found = _numpy_file(name, store.get_range(name, 0, MAX_HEADER_BYTES) or b"", where)
        wanted = found.offset + found.tokens * ITEM_BYTES[found.dtype]
        if stat.size_bytes != wanted:
            raise DataCheckError(f"has {stat.size_bytes} bytes, its header says {wanted}", where=where)
    else:
        found = _TokenFile(name, 0, stat.size_bytes // ITEM_BYTES[dtype], dtype)
        if stat.size_bytes % ITEM_BYTES[dtype]:
            raise UsageError(f"its {stat.size_bytes} bytes are no whole number of {dtype}", where=where)
    if not found.tokens:
        raise UsageError("is empty", where=where, hint="remove it")
    return found


def _numpy_file(name: str, head: bytes, where: str) -> _TokenFile:
    stream = BytesIO(head)
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, by_columns, dtype = read(stream)
    except ValueError as error:
        raise UsageError(f"no array of numpy: {error}", where=where) from error
    if dtype not in (np.dtype("<u2"), np.dtype("<u4")) or (by_columns and len(shape) > 1):
        raise UsageError(
            f"holds {dtype}{' by columns' if by_columns else ''}; allowed: uint16, uint32, by rows",
            where=where,
            hint="numpy.save(FILE, tokens.astype('uint16'))",
        )
    return _TokenFile(
        name, stream.tell(), prod(shape), "uint16" if dtype.itemsize == ITEM_BYTES["uint16"] else "uint32"
    )


def _summed(store: Store, file: _TokenFile, tell: Told) -> tuple[Shard, int]:
    """The shard, and its largest token."""
    size = file.tokens * ITEM_BYTES[file.dtype]
    sums, largest = [], 0
    for start in range(0, size, BLOCK_BYTES):
        end = min(size, start + BLOCK_BYTES)
        data = store.get_range(file.name, file.offset + start, file.offset + end)
        if data is None or len(data) < end - start:
            raise DataCheckError("changed while it was read", where=f"{store.url}/{file.name}")
        sums.append(block_sum(data))
        largest = max(largest, int(np.frombuffer(data, np.dtype(file.dtype).newbyteorder("<")).max()))
        tell(file.name, len(data))
    return Shard(file.name, file.tokens, tuple(sums), file.offset), largest
