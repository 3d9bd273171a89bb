"""The index beside token shards: which files, how many tokens, of which type, and what each block of them holds.

    index.json  {"format": 1, "dtype": "uint16", "vocabulary": 50257, "tokenizer": "blake3-..." or null,
                 "block_bytes": 4194304,
                 "shards": [{"name": "000000.bin", "tokens": 33554432, "offset": 0, "blocks": ["<32 hex>", ...]}]}

A shard is one file of tokens, little-endian, from byte `offset` on (0, or after the header of a `.npy` file). The
shards in their order are one stream of tokens. `blocks` has the first 128 bits of the blake3 digest of every 4 MiB of
tokens, so that whatever was read can be checked, and a changed shard is found where it is read. `tokenizer` is the
digest of the tokenizer's file; null for bytes, and for tokens of unknown origin.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from blake3 import blake3

from diloco_cli.config.codec import from_plain, parse_object, to_plain
from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, NotFoundError, UsageError
from diloco_cli.store.open import answers
from diloco_cli.store.port import Store, is_key_part

INDEX_KEY = "index.json"
FORMAT = 1
MAX_INDEX_BYTES = 256 << 20  # 46 bytes for 4 MiB of tokens: 24 TB of them
BLOCK_BYTES = 4 << 20
ITEM_BYTES = {"uint16": 2, "uint32": 4}
SUM_CHARACTERS = 32


@dataclass(frozen=True)
class Shard:
    """One file: `tokens` of them from byte `offset` on, in blocks of BLOCK_BYTES (the last one may be shorter)."""

    name: str
    tokens: int
    blocks: tuple[str, ...]
    offset: int = 0


@dataclass(frozen=True)
class Index:
    """`vocabulary`: every token is below it."""

    dtype: str
    vocabulary: int
    shards: tuple[Shard, ...]
    tokenizer: str | None = None
    block_bytes: int = BLOCK_BYTES
    format: int = FORMAT

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def digest(self) -> str:
        """Of all that it says: two folders with the same one hold the same tokens in the same shards."""
        return digest(encode_index(self))


def block_sum(data: bytes | memoryview) -> str:
    """What an index says of a block with these bytes."""
    return blake3(data).hexdigest()[:SUM_CHARACTERS]


def encode_index(index: Index) -> bytes:
    return json.dumps(to_plain(index), sort_keys=True, indent=1).encode() + b"\n"


def dtype_for(vocabulary: int) -> str:
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def parse_index(data: bytes, where: str) -> Index:
    """Raises UsageError for what is no index, or one of a newer format."""
    try:
        plain = parse_object(data, MAX_INDEX_BYTES)
        if plain.get("format") != FORMAT:
            raise ValueError(f"format must be {FORMAT}, not {plain.get('format')!r}")
        found = from_plain(Index, plain)
        _check(found)
    except (ValueError, UsageError) as error:
        hint = "diloco data index writes one for a folder of shards"
        raise UsageError(f"no index of token shards: {error}", where=where, hint=hint) from error
    return found


def _check(index: Index) -> None:
    """Raises ValueError for what no reader could use."""
    if index.dtype not in ITEM_BYTES or index.block_bytes != BLOCK_BYTES:
        raise ValueError(f"dtype must be {' or '.join(ITEM_BYTES)}, block_bytes {BLOCK_BYTES}")
    if not 1 <= index.vocabulary <= 1 << (8 * index.item_bytes):
        raise ValueError(f"a vocabulary of {index.vocabulary} does not fit {index.dtype}")
    if not index.shards:
        raise ValueError("it names no shard")
    for shard in index.shards:
        blocks = -(-shard.tokens * index.item_bytes // BLOCK_BYTES)
        if not is_key_part(shard.name) or shard.tokens < 1 or shard.offset < 0 or len(shard.blocks) != blocks:
            raise ValueError(f"shard {shard.name[:80]!r}: a plain name, tokens, and a sum for each block")


def read_index(store: Store) -> Index:
    """The index in this store. Raises NotFoundError if there is none, UsageError if it cannot be read."""
    data = store.get(INDEX_KEY, MAX_INDEX_BYTES)
    if data is None:
        raise NotFoundError(
            f"no {INDEX_KEY}: no token shards here, or not finished yet",
            where=store.url,
            hint=f"make them of text: diloco data tokenize INPUT -o {store.url}; or of .bin or .npy files that are"
            f" there: diloco data index {store.url}",
        )
    return parse_index(data, f"{store.url}/{INDEX_KEY}")


def check_sizes(store: Store, index: Index) -> None:
    """Whether every shard is there with the bytes that the index says. Raises DataCheckError."""
    found = answers(store.stat, [shard.name for shard in index.shards])
    for shard, stat in zip(index.shards, found, strict=True):
        wanted = shard.offset + shard.tokens * index.item_bytes
        if stat is None:
            raise changed(store, shard, "is missing")
        if stat.size_bytes != wanted:
            raise changed(store, shard, f"has {stat.size_bytes} bytes, the index says {wanted}")


def changed(store: Store, shard: Shard, what: str) -> DataCheckError:
    return DataCheckError(
        f"shard {shard.name} {what}: it has changed since the index was written",
        where=store.url,
        hint=f"bring the shard back; what else differs: diloco data show {store.url} --check",
    )
