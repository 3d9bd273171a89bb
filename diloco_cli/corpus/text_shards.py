"""The token shards of text files on this machine: made once, in the user's cache, and found there afterwards."""

from __future__ import annotations

import fcntl
from pathlib import Path

from diloco_cli.corpus.encoders import encoder_of, tokenizer_digest
from diloco_cli.corpus.index import INDEX_KEY
from diloco_cli.corpus.text import digest_of_sources, find_sources
from diloco_cli.corpus.tokenizing import OnShard, tokenize
from diloco_cli.digests import digest
from diloco_cli.paths import user_cache_directory
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store

KEY_CHARACTERS = 32
LOCK = ".tokenizing"


def shards_of_text(pattern: str, tokenizer: str | None, on_shard: OnShard = lambda shard, progress: None) -> Store:
    """The store with the finished shards. Another process that makes them is waited for. Raises NotFoundError for a
    pattern without text, UsageError for what is no text or no tokenizer."""
    sources = find_sources([pattern])
    by = "bytes" if tokenizer is None else tokenizer_digest(tokenizer)
    folder = _folder(f"{digest_of_sources(sources)} {by}")
    folder.mkdir(parents=True, exist_ok=True)
    store = open_store(str(folder), create=True)
    with (folder / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if store.stat(INDEX_KEY) is None:
            tokenize(store, sources, encoder_of(tokenizer), on_shard=on_shard)
    return store


def _folder(work: str) -> Path:
    return user_cache_directory("data") / f"text-{digest(work.encode()).rpartition('-')[2][:KEY_CHARACTERS]}"
