"""Makes token shards of text. After a kill it goes on behind the last shard that it has noted, and ends with the same
bytes.

A shard is written under its name in one put; then `tokenizing.json` says which shards are whole and where in the text
the next one begins. It names all of them, so that of many shards only each sixty-fourth part is noted. Last comes the
index, without which nothing is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from diloco_cli.config.codec import from_plain, parse_object, to_plain
from diloco_cli.corpus.encoders import Encoder, Tokens
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
from diloco_cli.corpus.text import TextPiece
from diloco_cli.digests import digest
from diloco_cli.errors import UsageError
from diloco_cli.store.leftovers import discard_leftovers_at
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
    store: Store, sources: Documents, encoder: Encoder, dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES, on_shard: OnShard = lambda shard, progress: None,
) -> Index:  # fmt: skip
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
