"""Makes token shards of text.

A shard is written under its name in one put; then `tokenizing.json` says which shards are whole and where in the text
the next one begins (of many shards, at each sixty-fourth part, since it names all of them). The index comes last;
nothing is read without it. After a kill, or when a document that was no text is mended, the same command goes on
behind the last noted shard, and ends with the same bytes. The shards of a run's `data.text` lie in the user's cache.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

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
from diloco_cli.errors import UsageError
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

    def identity(self, last: int | None = None) -> str:
        """The same as long as the same documents come in the same order, up to number `last`."""
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
    """`work`: the digest of what was tokenized until here and how; what comes later may change. The next shard begins
    at byte `offset` of document `file`."""

    work: str
    shards: tuple[Shard, ...] = ()
    file: int = 0
    offset: int = 0


OnShard = Callable[[Shard, Tokenized], None]
Work = Callable[[int], str]  # of the documents up to this number


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
    _refuse_finished(store)

    def work(last: int) -> str:
        return digest(f"{sources.identity(last)} {encoder.digest} {dtype} {shard_bytes}".encode())

    progress = _begun(store, work)
    pending: list[Tokens] = []
    held, wanted = 0, shard_bytes // ITEM_BYTES[dtype]
    for piece, tokens in _encoded(sources, encoder, progress):
        pending.append(tokens)
        held += len(tokens)
        if held >= wanted:
            progress = _kept(store, progress, pending, dtype, piece, work)
            on_shard(progress.shards[-1], progress)
            pending, held = [], 0
    if held:
        progress = _kept(store, progress, pending, dtype, None, work)
        on_shard(progress.shards[-1], progress)
    if not progress.shards:
        hint = "all that was read is empty; see it, and name other files, or another --column or --split of a dataset"
        raise UsageError("there is no text in it", where=sources.where(0), hint=hint)
    index = Index(dtype, encoder.vocabulary, progress.shards, encoder.digest)
    store.put(INDEX_KEY, encode_index(index))
    store.delete(PROGRESS_KEY)
    discard_leftovers_at(store.url)  # of earlier processes that were killed
    return index


def _refuse_finished(store: Store) -> None:
    if store.stat(INDEX_KEY) is not None:
        hint = f"see them: diloco data show {store.url}; or write to another place with -o"
        raise UsageError("there are finished token shards already", where=store.url, hint=hint)


def _begun(store: Store, work: Work) -> Tokenized:
    """How far this work has come here."""
    data = store.get(PROGRESS_KEY, MAX_INDEX_BYTES)
    if data is not None:
        with suppress(ValueError, UsageError):
            found = from_plain(Tokenized, parse_object(data, MAX_INDEX_BYTES))
            if found.work == work(found.file):
                return found
    if any(name.endswith(SUFFIX) for name in store.list("")):
        what, hint = "here lie shards of other text, of another tokenizer, or of text that has changed since", ""
        if data is None:
            what = "there are other shards, which would be written over"
            hint = f"; or, if these are your shards: diloco data index {store.url}"
        raise UsageError(what, where=store.url, hint=f"write to another place with -o{hint}")
    begun = Tokenized(work(0))
    store.put(PROGRESS_KEY, json.dumps(to_plain(begun)).encode())
    return begun


def _encoded(sources: Documents, encoder: Encoder, begin: Tokenized) -> Iterator[tuple[TextPiece, Tokens]]:
    """Each piece with its tokens, and with what ends its document."""
    end = np.asarray(encoder.end, np.uint32)
    for some in _together(sources.pieces(begin.file, begin.offset)):
        found = encoder.encode([piece.text for piece in some])
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


def _kept(
    store: Store, progress: Tokenized, pending: list[Tokens], dtype: str, piece: TextPiece | None, work: Work
) -> Tokenized:
    """Write a shard, then how far the work has come."""
    name = f"{len(progress.shards):06d}{SUFFIX}"
    data = np.concatenate(pending).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    sums = tuple(block_sum(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES))
    store.put(name, data)
    shard = Shard(name, len(data) // ITEM_BYTES[dtype], sums)
    file, offset = (0, 0) if piece is None else (piece.file, piece.end)
    progress = replace(progress, shards=(*progress.shards, shard), file=file, offset=offset)
    if piece is not None and len(progress.shards) % max(1, len(progress.shards) // NOTED_PARTS) == 0:
        store.put(PROGRESS_KEY, json.dumps(to_plain(replace(progress, work=work(file)))).encode())
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
