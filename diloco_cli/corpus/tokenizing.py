"""Makes token shards of text, or writes the index of shards that are there already.

A shard is written under its name in one put; then `tokenizing.json` says which shards are whole and where in the text
the next one begins (of many shards, at each sixty-fourth part, since it names all of them). The index comes last;
nothing is read without it. After a kill the same command goes on behind the last noted shard, and ends with the same
bytes. The shards of a run's `data.text` lie in the user's cache.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.lib import format as npy

from diloco_cli.config.codec import from_plain, parse_object, to_plain
from diloco_cli.corpus.encoders import Encoder, Tokens, encoder_of, tokenizer_digest
from diloco_cli.corpus.index import (
    BLOCK_BYTES,
    INDEX_KEY,
    ITEM_BYTES,
    MAX_INDEX_BYTES,
    Index,
    Shard,
    block_sum,
    dtype_for,
    encode_index,
)
from diloco_cli.corpus.sources import TextPiece, find_sources
from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, NotFoundError, UsageError
from diloco_cli.paths import user_cache_directory
from diloco_cli.store.open import discard_leftovers_at, open_store
from diloco_cli.store.port import Store

PROGRESS_KEY = "tokenizing.json"
SUFFIX = ".bin"
SHARD_BYTES = 64 << 20
NOTED_PARTS = 64  # up to twice as many shards are noted one by one, more in such parts of what is there
AT_ONCE_BYTES = 8 << 20  # of pieces that a tokenizer gets together: it uses all cores


class Documents(Protocol):
    """What is tokenized, in an order of its own: text files, or the rows of a dataset."""

    def identity(self) -> str:
        """The same as long as the same documents come in the same order."""
        ...

    def pieces(self, number: int, offset: int) -> Iterator[TextPiece]:
        """All text from byte `offset` of document `number` on, in pieces that do not depend on where one began."""
        ...

    def where(self, number: int) -> str: ...

    def share(self, number: int, offset: int) -> float:
        """How much of all lies before byte `offset` of document `number`, from 0 to 1."""
        ...


@dataclass(frozen=True)
class Tokenized:
    """`work`: the digest of what is tokenized and how. The next shard begins at byte `offset` of document `file`."""

    work: str
    shards: tuple[Shard, ...] = ()
    file: int = 0
    offset: int = 0


OnShard = Callable[[Shard, Tokenized], None]


def tokenize(
    store: Store,
    sources: Documents,
    encoder: Encoder,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_shard: OnShard = lambda shard, progress: None,
) -> Index:
    """The index of the finished shards in `store`. Raises UsageError if the store holds other work, if a document is
    no UTF-8 text, if there is nothing in any, or if tokens do not fit `dtype`."""
    dtype = dtype or dtype_for(encoder.vocabulary)
    if encoder.vocabulary > 1 << (8 * ITEM_BYTES[dtype]):
        raise UsageError(f"--dtype {dtype}: {encoder.vocabulary} tokens do not fit", hint="--dtype uint32")
    refuse_finished(store)
    progress = _begun(store, f"{sources.identity()} {encoder.digest} {dtype} {shard_bytes}")
    pending: list[Tokens] = []
    held, wanted = 0, shard_bytes // ITEM_BYTES[dtype]
    for piece, tokens in _encoded(sources, encoder, progress):
        pending.append(tokens)
        held += len(tokens)
        if held >= wanted:
            progress = _kept(store, progress, pending, dtype, piece)
            on_shard(progress.shards[-1], progress)
            pending, held = [], 0
    if held:
        progress = _kept(store, progress, pending, dtype, None)
        on_shard(progress.shards[-1], progress)
    if not progress.shards:
        hint = "all that was read is empty; see it, and name other files, or another --column or --split of a dataset"
        raise UsageError("there is no text in it", where=sources.where(0), hint=hint)
    index = Index(dtype, encoder.vocabulary, progress.shards, encoder.digest)
    store.put(INDEX_KEY, encode_index(index))
    store.delete(PROGRESS_KEY)
    discard_leftovers_at(store.url)  # of earlier processes that were killed
    return index


def refuse_finished(store: Store) -> None:
    if store.stat(INDEX_KEY) is not None:
        hint = f"see them: diloco data show {store.url}; or write to another place with -o"
        raise UsageError("there are finished token shards already", where=store.url, hint=hint)


def refuse_unfinished(store: Store) -> None:
    if store.stat(PROGRESS_KEY) is not None:
        hint = "finish it: diloco data tokenize, as before"
        raise UsageError("text is being tokenized here, and not all of it is", where=store.url, hint=hint)


def _begun(store: Store, work: str) -> Tokenized:
    """How far this work has come here."""
    work = digest(work.encode())
    data = store.get(PROGRESS_KEY, MAX_INDEX_BYTES)
    if data is None:
        if any(name.endswith(SUFFIX) for name in store.list("")):
            hint = f"write to another place with -o; or, if these are your shards: diloco data index {store.url}"
            raise UsageError("there are other shards, which would be written over", where=store.url, hint=hint)
        store.put(PROGRESS_KEY, json.dumps(to_plain(Tokenized(work))).encode())
        return Tokenized(work)
    try:
        found = from_plain(Tokenized, parse_object(data, MAX_INDEX_BYTES))
    except (ValueError, UsageError):
        found = Tokenized("")
    if found.work != work:
        raise UsageError(
            "here lie shards of other text, of another tokenizer, or of text that has changed since",
            where=store.url,
            hint="write to another place with -o, or delete what is here",
        )
    return found


def _encoded(sources: Documents, encoder: Encoder, begin: Tokenized) -> Iterator[tuple[TextPiece, Tokens]]:
    """Each piece with its tokens, and with what ends its document."""
    end = np.asarray(encoder.end, np.uint32)
    for some in _together(sources.pieces(begin.file, begin.offset)):
        try:
            found = encoder.encode([piece.text for piece in some])
        except UnicodeDecodeError as error:
            raise _no_text(sources, some) from error
        for piece, tokens in zip(some, found, strict=True):
            yield piece, np.concatenate([tokens, end]) if piece.is_last else tokens


def _together(pieces: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    some: list[TextPiece] = []
    held = 0
    for piece in pieces:
        some.append(piece)
        held += len(piece.text)
        if held >= AT_ONCE_BYTES:
            yield some
            some, held = [], 0
    if some:
        yield some


def _no_text(sources: Documents, some: list[TextPiece]) -> UsageError:
    for piece in some:
        try:
            piece.text.decode()
        except UnicodeDecodeError as error:
            place = piece.end - len(piece.text) + error.start
            hint = "leave the file out, or convert it: iconv -f latin1 -t utf-8"
            return UsageError(f"is not UTF-8 text at byte {place}", where=sources.where(piece.file), hint=hint)
    raise AssertionError("every piece is text")


def _kept(store: Store, progress: Tokenized, pending: list[Tokens], dtype: str, piece: TextPiece | None) -> Tokenized:
    """Write a shard, then how far the work has come."""
    name = f"{len(progress.shards):06d}{SUFFIX}"
    data = np.concatenate(pending).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    sums = tuple(block_sum(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES))
    store.put(name, data)
    shard = Shard(name, len(data) // ITEM_BYTES[dtype], sums)
    file, offset = (0, 0) if piece is None else (piece.file, piece.end)
    progress = replace(progress, shards=(*progress.shards, shard), file=file, offset=offset)
    if piece is not None and len(progress.shards) % max(1, len(progress.shards) // NOTED_PARTS) == 0:
        store.put(PROGRESS_KEY, json.dumps(to_plain(progress)).encode())
    return progress


KEY_CHARACTERS = 32
LOCK = ".tokenizing"


def shards_of_text(pattern: str, tokenizer: str | None, on_shard: OnShard = lambda shard, progress: None) -> Store:
    """The store with the finished shards. Another process that makes them is waited for. Raises NotFoundError for a
    pattern without text, UsageError for what is no text or no tokenizer."""
    sources = find_sources([pattern])
    by = "bytes" if tokenizer is None else tokenizer_digest(tokenizer)
    folder = _folder(f"{sources.identity()} {by}")
    folder.mkdir(parents=True, exist_ok=True)
    store = open_store(str(folder), create=True)
    with (folder / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if store.stat(INDEX_KEY) is None:
            tokenize(store, sources, encoder_of(tokenizer), on_shard=on_shard)
    return store


def _folder(work: str) -> Path:
    return user_cache_directory("data") / f"text-{digest(work.encode()).rpartition('-')[2][:KEY_CHARACTERS]}"


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
