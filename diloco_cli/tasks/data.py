"""The built-in data; nothing is downloaded.

Text is the Python standard library's own source, byte by byte: it is on every machine. Held-out files are chosen by a
hash of their name, so that training and evaluation never see the same file.

Digits are those of scikit-learn (the extra `vision`): 1,797 grey images of 8 x 8, ten classes (UCI, optical recognition
of handwritten digits).
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.paths import install_hint

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
