"""A user's own tokens as a run's data: shards in a folder or a bucket, or text that becomes shards first.

A run's format carries what the launcher found (`facts`): above all the digest of the index, which fixes every token and
its place. A machine whose data differ refuses before it trains.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diloco_cli.config.settings import DataSettings, RunSettings
from diloco_cli.corpus.cache import BlockCache
from diloco_cli.corpus.encoders import tokenizer_digest
from diloco_cli.corpus.hub import TOKENIZER
from diloco_cli.corpus.index import BLOCK_BYTES, Index, read_index
from diloco_cli.corpus.places import SHARDS_VARIABLE, shards_here
from diloco_cli.corpus.shards import HELD_BLOCKS, Place, TokenShards
from diloco_cli.corpus.shuffle import BlockShuffle, Numbers
from diloco_cli.corpus.split import Split
from diloco_cli.corpus.text_shards import shards_of_text
from diloco_cli.corpus.tokenizing import OnShard
from diloco_cli.errors import DataCheckError, DilocoError, NotFoundError, UsageError
from diloco_cli.paths import user_cache_directory
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store, StoreGoneError
from diloco_cli.store.retry import RetryingStore
from diloco_cli.units import format_count

PATIENCE_S = 120.0  # a bucket that does not answer for so long ends the process, which is started again
DIGEST_SHOWN = 16
MOST_KEPT = 4 * HELD_BLOCKS  # blocks that were fetched ahead and are not asked for again
Batch = tuple[torch.Tensor, torch.Tensor]


class OwnTokens:
    """Sequences of the model's length out of one stream of tokens, in the order of BlockShuffle."""

    def __init__(self, shards: TokenShards, sequence: int, seed: int, held_out: float) -> None:
        self.sequence, self.shards = sequence, shards
        self.split = Split((shards.num_tokens - 1) // sequence, held_out)
        block = -(-BLOCK_BYTES // (sequence * shards.index.item_bytes))
        self._order = BlockShuffle(self.split.train, block, seed)
        self._ahead = threading.Thread()
        self._kept: set[Place] = set()

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        """(tokens, targets), each [batch_tokens / sequence, sequence] int64, from `position` tokens of the shard on."""
        first, count = position // self.sequence, batch_tokens // self.sequence
        if self.shards.cache is not None and not self._ahead.is_alive():
            self._read_ahead(self._numbers(shard, num_shards, first + self._order.window // 2, count))
        return self._cut(self._numbers(shard, num_shards, first, count))

    def held_out(self, num_sequences: int, batch_size: int = 32) -> Iterator[Batch]:
        """The same sequences every time, spread evenly over the whole."""
        chosen = np.array(self.split.evaluated(num_sequences), np.int64)
        for start in range(0, len(chosen), batch_size):
            yield self._cut(chosen[start : start + batch_size])

    def _numbers(self, shard: int, num_shards: int, first: int, count: int) -> Numbers:
        """Of sequences of the whole stream."""
        return self.split.trained(self._order.shard(shard, num_shards, first, count))

    def _read_ahead(self, numbers: Numbers) -> None:
        """Beside the training, what a batch half a window later needs comes from the bucket into the local cache."""
        places = [
            place
            for place in self.shards.blocks_at(numbers * self.sequence, self.sequence + 1)
            if place not in self._kept
        ]
        if not places:  # as for most batches: those of a window share its blocks, and a thread costs milliseconds
            return
        self._kept = {*places} if len(self._kept) > MOST_KEPT else self._kept | {*places}

        def fetch() -> None:
            with suppress(DilocoError):  # raised where the blocks are read
                self.shards.keep_ahead(places)

        self._ahead = threading.Thread(target=fetch, name="read-ahead", daemon=True)
        self._ahead.start()

    def _cut(self, numbers: Numbers) -> Batch:
        """Read in the order in which they lie, so that no block is read twice for a batch."""
        self.shards.load(self.shards.blocks_at(numbers * self.sequence, self.sequence + 1))
        rows = np.empty((len(numbers), self.sequence + 1), np.int64)
        for row in np.argsort(numbers, kind="stable"):
            begin = int(numbers[row]) * self.sequence
            rows[row] = self.shards.read(begin, begin + self.sequence + 1)
        both = torch.from_numpy(rows)
        return both[:, :-1], both[:, 1:]


def open_own_data(run: RunSettings, sequence: int, vocabulary: int | None) -> OwnTokens:
    """The data of a run, whole and fit for it. `vocabulary`: the model's; None if only its own code knows it. Raises
    DataCheckError if they are not those that the run began with, UsageError if they do not fit."""
    store = _store_of(run.data)
    index = read_index(store)
    _refuse_changed(run.data, index, store.url)
    cache = None
    if not store.url.startswith("file:"):
        cache = BlockCache(user_cache_directory("data") / "blocks", run.data.cache_bytes)
    shards = TokenShards(store, index, cache)
    shards.check_sizes()
    if vocabulary is not None and index.vocabulary > vocabulary:
        raise UsageError(
            f"the model's vocabulary of {vocabulary} is too small: the data have tokens up to {index.vocabulary - 1}",
            where="model",
            hint=f"a preset takes another: --set model.vocabulary={index.vocabulary}; or tokenize by the model's own"
            " tokenizer",
        )
    data = OwnTokens(shards, sequence, run.train.seed, run.data.held_out)
    _refuse_small(run, data)
    return data


def facts_of(run: RunSettings, data: OwnTokens, pretrained: Path | None = None) -> dict[str, Any]:
    """What a run's format says of its data. `pretrained`: the folder of the model, if its weights know tokens already.
    Raises UsageError if another tokenizer made them than the run names, or than the one in that folder."""
    index = data.shards.index
    known = str(pretrained) if pretrained is not None and (pretrained / TOKENIZER).is_file() else None
    for folder in filter(None, (run.data.tokenizer, known)):
        wanted = tokenizer_digest(folder)
        if wanted != index.tokenizer:
            again = f"tokenize again: diloco data tokenize INPUT -o OUT --tokenizer {folder}"
            raise UsageError(
                f"wrong tokenizer: the tokens were made by {_maker(run.data, index)}, this one is {_short(wanted)}",
                where=folder,
                hint=f"--set data.tokenizer={folder}" if run.data.text else again,
            )
    return {
        "digest": index.digest,
        "tokens": index.num_tokens,
        "vocabulary": index.vocabulary,
        "tokenizer": index.tokenizer,
    }


def epochs_text(run: RunSettings, data: OwnTokens) -> str:
    """How often the run goes through the data."""
    trained, held_out = (count * data.sequence for count in (data.split.train, data.split.held_out))
    epochs = run.train.tokens / trained
    return (
        f"data: {format_count(trained)} tokens to train on, {format_count(held_out)} held out; the run's"
        f" {format_count(run.train.tokens)} are {epochs:.3g} epochs"
    )


def refuse_short(run: RunSettings, data: OwnTokens, num_shards: int, batch_tokens: int) -> None:
    """Raises UsageError if a stream of the data is shorter than a batch: one step would see a sequence twice."""
    stream = data.split.train // num_shards * data.sequence
    if stream < batch_tokens:
        raise UsageError(
            f"the data are too short: {format_count(data.split.train * data.sequence)} tokens to train on, in"
            f" {num_shards} streams of {format_count(stream)}, and one batch has {format_count(batch_tokens)}",
            where="data",
            hint=f"add data, or --set train.batch_tokens={max(1, stream // data.sequence) * data.sequence}",
        )


def prepare_text(data: DataSettings, on_shard: OnShard) -> None:
    """Tokenize a run's text now, if it has any and that was not done before."""
    if data.text:
        shards_of_text(data.text, data.tokenizer, on_shard)


def _store_of(data: DataSettings) -> Store:
    here = shards_here() if data.args.get("digest") else None
    if here is None and data.text:
        try:
            return shards_of_text(data.text, data.tokenizer)
        except NotFoundError as error:
            if not data.args.get("digest"):
                raise
            raise NotFoundError(  # on a machine that did not launch the run
                f"the run's text is not on this machine: {error.message}",
                where=error.where,
                hint=f"bring it to the same place; or make token shards of it, and name them: {SHARDS_VARIABLE}=FOLDER",
            ) from error
    place = here or data.tokens or ""
    try:
        return RetryingStore(open_store(place), PATIENCE_S)
    except StoreGoneError as error:
        bring = f"bring them to the same place; or name a copy, a folder or a URL: {SHARDS_VARIABLE}=FOLDER"
        raise StoreGoneError(
            f"the run's token shards are not on this machine: {error.message}",
            where=error.where,
            hint=bring if data.args.get("digest") else f"make them: diloco data tokenize FILES -o {error.where}",
        ) from error


def _refuse_changed(data: DataSettings, index: Index, where: str) -> None:
    wanted = data.args.get("digest")
    if wanted in (None, index.digest):
        return
    told = ", ".join(
        f"{there} {what} there, {here} here"
        for what, there, here in (
            ("tokens", data.args.get("tokens"), index.num_tokens),
            ("symbols", data.args.get("vocabulary"), index.vocabulary),
        )
        if there != here
    )
    raise DataCheckError(
        f"these are not the data that the run began with: {told or 'as many tokens, but others'}",
        where=data.text or where,
        hint="bring back what changed; or start another run with these data: diloco launch RUN.yaml --set name=NAME",
    )


def _refuse_small(run: RunSettings, data: OwnTokens) -> None:
    split, wanted = data.split, run.evaluation.sequences
    if split.held_out < wanted <= split.size // 4:
        share = min(0.5, 1.5 * wanted / split.size)
        raise UsageError(
            f"the held-out part is too small: {split.held_out} sequences of {data.sequence}, and evaluation.sequences"
            f" is {wanted}",
            where="data.held_out",
            hint=f"--set data.held_out={share:.2g}, or --set evaluation.sequences={max(1, split.held_out)}",
        )
    if split.held_out < wanted:
        raise UsageError(
            f"the data are too short: {split.size} sequences of {data.sequence} tokens, of which {wanted} are to be"
            " held out (evaluation.sequences)",
            where="data",
            hint=f"add data, or --set evaluation.sequences={max(1, split.size // 8)} --set data.held_out=0.2",
        )


def _maker(data: DataSettings, index: Index) -> str:
    if index.tokenizer is None:
        return "none: they are the text's bytes" if data.text else "none that is known"
    return _short(index.tokenizer)


def _short(name: str) -> str:
    return name[: len("blake3-") + DIGEST_SHOWN]
