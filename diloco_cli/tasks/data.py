"""A run's data: the built-in ones, and a user's own tokens. Nothing is downloaded.

Built-in text is the Python standard library's own source, byte by byte: it is on every machine. Held-out files are
chosen by a hash of their name, so that training and evaluation never see the same file. Digits are those of
scikit-learn (the extra `vision`): 1,797 grey images of 8 x 8, ten classes (UCI, optical recognition of handwritten
digits).

Own tokens are shards in a folder or a bucket, or text that becomes shards first. A run's format carries the digest of
their index (`facts_of`), which fixes every token and its place; a machine whose data differ refuses before it trains.
"""

from __future__ import annotations

import os
import sysconfig
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from diloco_cli.config.settings import DataSettings, RunSettings
from diloco_cli.corpus.encoders import TOKENIZER, tokenizer_digest
from diloco_cli.corpus.fit import refuse_misfit, split_of
from diloco_cli.corpus.index import BLOCK_BYTES, Index, check_sizes, read_index
from diloco_cli.corpus.shards import HELD_BLOCKS, BlockCache, Place, TokenShards
from diloco_cli.corpus.shuffle import BlockShuffle, Numbers
from diloco_cli.corpus.sources import SHARDS_VARIABLE, shards_here
from diloco_cli.corpus.token_files import one_for_half, refuse_no_token, refuse_no_tokens
from diloco_cli.corpus.tokenizing import shards_of_text
from diloco_cli.errors import DataCheckError, DilocoError, NotFoundError, UsageError
from diloco_cli.paths import install_hint, user_cache_directory
from diloco_cli.quantities import format_count
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store, StoreGoneError
from diloco_cli.store.retry import RetryingStore

HELD_OUT_ONE_IN = 20  # files of the text
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "ensurepip"})
HELD_OUT = 297  # images, the same in every run; 1,500 remain to train on
SPLIT_SEED = 0
SHIFT = 1  # pixels, at most, up or down and left or right
NOISE = 0.5  # standard deviation of the noise added to each pixel; the pixels' own is 1
DISTURBANCES = 4093  # a prime, so that an image gets another disturbance in each epoch
HELD_OUT_VIEWS = 8  # of each held-out image
BRIGHTEST = 16.0
Batch = tuple[torch.Tensor, torch.Tensor]


class ShuffledEpochs:
    """Example number n of an endless stream over `size` examples, shuffled anew each epoch; every process computes it
    from the seed. Learners share the stream: number i of shard s is number i * shards + s, so that in each epoch one
    learner draws every example exactly once."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._orders: dict[int, torch.Tensor] = {}

    def shard(self, shard: int, num_shards: int, first: int, count: int) -> list[int]:
        """The examples number `first` to `first + count` of a shard."""
        return [self[i * num_shards + shard] for i in range(first, first + count)]

    def __getitem__(self, number: int) -> int:
        epoch, index = divmod(number, self.size)
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._orders = {epoch: torch.randperm(self.size, generator=generator)}
        return int(self._orders[epoch][index])


def standard_library_files() -> list[Path]:
    """Every source file but tests, in the same order on every machine of the same Python version."""
    found: list[Path] = []
    for folder, below, names in os.walk(sysconfig.get_paths()["stdlib"]):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS]  # site-packages may hold 10,000s of files
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def is_held_out(path: Path) -> bool:
    return zlib.crc32(path.name.encode()) % HELD_OUT_ONE_IN == 0


class ByteText:
    """Sequences of bytes from the corpus, in the order of `ShuffledEpochs`."""

    def __init__(self, sequence: int, seed: int) -> None:
        self.sequence = sequence
        files = standard_library_files()
        self._train = _joined(path for path in files if not is_held_out(path))
        self._held_out = _joined(path for path in files if is_held_out(path))
        self._order = ShuffledEpochs((len(self._train) - 1) // sequence, seed)

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        """(tokens, targets), each [batch_tokens / sequence, sequence] int64, from `position` tokens of the shard on."""
        chosen = self._order.shard(shard, num_shards, position // self.sequence, batch_tokens // self.sequence)
        return self._cut(self._train, chosen)

    def held_out(self, num_sequences: int, batch_size: int = 32) -> Iterator[Batch]:
        """The same sequences every time, spread evenly over the held-out files."""
        available = (len(self._held_out) - 1) // self.sequence
        count = min(num_sequences, available)
        windows = [i * available // count for i in range(count)]
        for start in range(0, count, batch_size):
            yield self._cut(self._held_out, windows[start : start + batch_size])

    def _cut(self, corpus: np.ndarray[tuple[int], np.dtype[np.uint8]], windows: list[int]) -> Batch:
        rows = np.stack([corpus[w * self.sequence : (w + 1) * self.sequence + 1] for w in windows])
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1], both[:, 1:]


def _joined(files: Iterator[Path]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    data = b"\n".join(path.read_bytes() for path in files)
    if not data:
        raise NotFoundError(
            "this Python has no standard library source to train on",
            hint="set data.entrypoint in the run file to a function of your own",
        )
    return np.frombuffer(data, dtype=np.uint8)


class Digits:
    """Images [n, 8, 8] float32 with classes [n] int64; each drawn image is shifted a little and made noisy.

    Without that a small network memorises 1,500 clean images after some epochs, and its held-out loss then depends more
    on chance than on training. Positions and batches count tokens, one for each patch of a vision transformer: an image
    is `sequence` of them.
    """

    def __init__(self, sequence: int, seed: int) -> None:
        self.sequence = sequence
        images, classes = _load()
        split = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
        train, held_out = split[HELD_OUT:], split[:HELD_OUT]
        images = (images - images[train].mean()) / images[train].std()
        self._train = _Views(images[train], classes[train], seed + 1)
        self._held_out = _Views(images[held_out], classes[held_out], SPLIT_SEED)
        self._order = ShuffledEpochs(len(train), seed)

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        """Images [batch_tokens / sequence, 8, 8] and classes, from `position` tokens of the shard on."""
        first, count = position // self.sequence, batch_tokens // self.sequence
        numbers = [i * num_shards + shard for i in range(first, first + count)]
        return self._train.draw(self._order.shard(shard, num_shards, first, count), numbers)

    def held_out(self, num_sequences: int, batch_size: int = 64) -> Iterator[Batch]:
        """The same views every time: up to eight of each of the 297 held-out images."""
        count = min(num_sequences, HELD_OUT * HELD_OUT_VIEWS)
        for start in range(0, count, batch_size):
            numbers = list(range(start, min(count, start + batch_size)))
            yield self._held_out.draw([number % HELD_OUT for number in numbers], numbers)


class _Views:
    """Images, and the disturbance of view number n of any of them."""

    def __init__(self, images: torch.Tensor, classes: torch.Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = classes
        self.side = images.shape[-1]
        self.padded = F.pad(images, (SHIFT, SHIFT, SHIFT, SHIFT), value=float(images.min()))
        self.noise = NOISE * torch.randn(DISTURBANCES, self.side, self.side, generator=generator)
        self.corner = torch.randint(2 * SHIFT + 1, (DISTURBANCES, 2), generator=generator)

    def draw(self, indices: list[int], numbers: list[int]) -> Batch:
        """Image indices[i] with disturbance numbers[i]: [n, side, side] and [n]."""
        chosen = torch.tensor(numbers) % DISTURBANCES
        inside = torch.arange(self.side)
        rows = self.corner[chosen, 0, None, None] + inside[:, None]
        columns = self.corner[chosen, 1, None, None] + inside
        which = torch.tensor(indices)
        return self.padded[which[:, None, None], rows, columns] + self.noise[chosen], self.classes[which]


def _load() -> Batch:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            "data: the preset digits needs scikit-learn, which is not installed here",
            where="data.preset",
            hint=install_hint("vision"),
        ) from error
    found = load_digits()
    return torch.from_numpy(found.images).float() / BRIGHTEST, torch.from_numpy(found.target).long()


PATIENCE_S = 120.0  # a bucket that does not answer for so long ends the process, which is started again
DIGEST_SHOWN = 16
MOST_KEPT = 4 * HELD_BLOCKS  # blocks that were fetched ahead and are not asked for again


class OwnTokens:
    """Sequences of the model's length out of one stream of tokens, in the order of BlockShuffle."""

    def __init__(self, shards: TokenShards, sequence: int, seed: int, held_out: float) -> None:
        self.sequence, self.shards = sequence, shards
        self.split = split_of(shards.num_tokens, sequence, held_out)
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
    check_sizes(store, index)
    refuse_misfit(run, index.num_tokens, index.vocabulary, sequence, vocabulary)
    return OwnTokens(shards, sequence, run.train.seed, run.data.held_out)


def facts_of(run: RunSettings, data: OwnTokens, pretrained: Path | None = None) -> dict[str, Any]:
    """What a run's format says of its data. `pretrained`: the folder of the model, if its weights know tokens already.
    Raises UsageError if another tokenizer made them than the run names, or than the one in that folder; and if they are
    no tokens."""
    index = data.shards.index
    _refuse_no_tokens(run, data.shards)
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


def _refuse_no_tokens(run: RunSettings, shards: TokenShards) -> None:
    """Looks at the first ones: an index may be another tool's, or of bytes that are none."""
    index, first = shards.index, shards.index.shards[0]
    tokens, where = _first(shards), f"{shards.store.url}/{first.name}"
    if not run.data.text and index.tokenizer is None and first.offset == 0:
        refuse_no_tokens(tokens.tobytes(), index.dtype, where)
    refuse_no_token(int(tokens.max()), index.vocabulary, where)


def _first(shards: TokenShards) -> Numbers:
    return shards.read(0, min(shards.index.shards[0].tokens, BLOCK_BYTES // shards.index.item_bytes))


def epochs_text(run: RunSettings, data: OwnTokens) -> str:
    """How often the run goes through the data."""
    trained, held_out = (count * data.sequence for count in (data.split.train, data.split.held_out))
    epochs, odd = run.train.tokens / trained, one_for_half(_first(data.shards))
    return (
        f"data: {format_count(trained)} tokens to train on, {format_count(held_out)} held out; the run's"
        f" {format_count(run.train.tokens)} are {epochs:.3g} epochs{f'; warning: {odd}' if odd else ''}"
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
    tokens = data.args.get("tokens")
    others = "as many tokens, but others" if tokens == index.num_tokens else f"{tokens} tokens, here {index.num_tokens}"
    raise DataCheckError(
        f"these are not the data that the run began with: {others}",
        where=data.text or where,
        hint="bring back what changed; or start another run with these data: diloco launch RUN.yaml --set name=NAME",
    )


def _maker(data: DataSettings, index: Index) -> str:
    if index.tokenizer is None:
        return "none: they are the text's bytes" if data.text else "none that is known"
    return _short(index.tokenizer)


def _short(name: str) -> str:
    return name[: len("blake3-") + DIGEST_SHOWN]
