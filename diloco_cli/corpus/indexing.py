"""Writes the index of shards that are there already.

Every file of tokens in the folder becomes a shard, in the order of their names. What lies there besides, or instead, is
said: tokens that are trained on must be those that were meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from diloco_cli.corpus.encoders import Encoder
from diloco_cli.corpus.index import BLOCK_BYTES, INDEX_KEY, ITEM_BYTES, Index, Shard, block_sum, encode_index
from diloco_cli.corpus.sources import ROWS_SUFFIXES, SAVED, SAVED_SPLITS
from diloco_cli.corpus.token_files import (
    BARE,
    MAX_TOKEN,
    NUMPY,
    TokenFile,
    one_for_half,
    refuse_no_token,
    token_file,
)
from diloco_cli.corpus.tokenizing import PROGRESS_KEY
from diloco_cli.errors import DataCheckError, NotFoundError, UsageError
from diloco_cli.store.port import Store, all_keys

HELD_OUT = re.compile(r"(?<![a-z])(val|valid|validation|test|eval)(?![a-z])")
Told = Callable[[str, int], None]


def index_shards(
    store: Store,
    dtype: str | None = None,
    encoder: Encoder | None = None,
    tell: Told = lambda name, num_bytes: None,
    warn: Callable[[str], object] = lambda line: None,
) -> Index:
    """The index of all shards in the store, sorted by name, now written there. `dtype`: of bare files, uint16 unless
    said; `encoder`: what made the tokens, if that is known. Each shard is read once. Raises UsageError, NotFoundError.
    """
    _refuse_indexed(store)
    names = list(all_keys(store))
    here = [name for name in names if "/" not in name and name.endswith((BARE, NUMPY))]
    files = [token_file(store, name, dtype or "uint16") for name in here]
    if not files:
        raise _nothing(store.url, names)
    kinds = sorted({file.dtype for file in files})
    if len(kinds) > 1:
        raise UsageError(f"the shards are of several types: {', '.join(kinds)}", where=store.url)
    shards, largest = [], 0
    for file in files:
        shard, most = _summed(store, file, tell, warn)
        shards.append(shard)
        largest = max(largest, most)
    vocabulary = encoder.vocabulary if encoder else largest + 1
    if largest >= vocabulary:
        raise UsageError(
            f"wrong tokenizer: there is a token {largest}, and it has only {vocabulary}",
            where=store.url,
            hint="give the tokenizer that made these tokens, or none",
        )
    held_out = [file.name for file in files if HELD_OUT.search(file.name.lower())]
    if held_out and len(held_out) < len(files):
        warn(f"{held_out[0]} is trained on like the rest: move it elsewhere, and index anew, if it is to be held out")
    index = Index(kinds[0], vocabulary, tuple(shards), encoder.digest if encoder else None)
    store.put(INDEX_KEY, encode_index(index))
    return index


def _refuse_indexed(store: Store) -> None:
    if store.stat(INDEX_KEY) is not None:
        hint = f"see it: diloco data show {store.url}; to make it anew, remove {INDEX_KEY}"
        raise UsageError("there is an index already", where=store.url, hint=hint)
    if store.stat(PROGRESS_KEY) is not None:
        hint = "finish it: diloco data tokenize, as before"
        raise UsageError("text is being tokenized here, and not all of it is", where=store.url, hint=hint)


def _nothing(url: str, names: list[str]) -> NotFoundError:
    """What to type instead, by what is there."""
    hint = "diloco data tokenize INPUT -o OUT makes shards of text"
    below = next((name for name in names if name.endswith((BARE, NUMPY))), None)
    if any(name.endswith((*ROWS_SUFFIXES, SAVED, SAVED_SPLITS)) for name in names):
        folder = url.removeprefix("file://")
        hint = f"a Hugging Face dataset becomes shards: diloco data tokenize --dataset {folder} -o OUT"
    elif any(name.endswith(".ds") for name in names):
        hint = "datatrove's .ds are bare tokens: name them .bin; and --dtype uint32 for a vocabulary above 65,536"
    elif any(name.endswith(".mds") for name in names):
        hint = "MosaicML's .mds are read by their own library alone: write the tokens with numpy.save"
    elif below is not None:
        hint = f"they lie further down: diloco data index {url}/{below.rpartition('/')[0]}"
    return NotFoundError(f"there are no {BARE} or {NUMPY} files", where=url, hint=hint)


def _summed(store: Store, file: TokenFile, tell: Told, warn: Callable[[str], object]) -> tuple[Shard, int]:
    """The shard, and its largest token."""
    size, where = file.tokens * ITEM_BYTES[file.dtype], f"{store.url}/{file.name}"
    sums, largest = [], 0
    for start in range(0, size, BLOCK_BYTES):
        end = min(size, start + BLOCK_BYTES)
        data = store.get_range(file.name, file.offset + start, file.offset + end)
        if data is None or len(data) < end - start:
            raise DataCheckError("changed while it was read", where=where)
        sums.append(block_sum(data))
        tokens = np.frombuffer(data, np.dtype(file.dtype).newbyteorder("<"))
        largest = max(largest, int(tokens.max()))
        refuse_no_token(largest, MAX_TOKEN, where)
        if start == 0 and (odd := one_for_half(tokens)) is not None:
            warn(f"{file.name}: {odd}")
        tell(file.name, len(data))
    return Shard(file.name, file.tokens, tuple(sums), file.offset), largest
