"""The digits of scikit-learn: 1,797 grey images of 8 x 8, ten classes (UCI, optical recognition of handwritten digits).

Nothing is downloaded: they come with scikit-learn, the extra `vision`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from diloco_cli.errors import UsageError
from diloco_cli.tasks.order import ShuffledEpochs

HELD_OUT = 297  # images, the same in every run; 1,500 remain to train on
SPLIT_SEED = 0
SHIFT = 1  # pixels, at most, up or down and left or right
NOISE = 0.5  # standard deviation of what is added to each pixel; the pixels' own is 1
DISTURBANCES = 4093  # a prime: an image meets another disturbance each epoch
HELD_OUT_VIEWS = 8  # of each held-out image
BRIGHTEST = 16.0
Batch = tuple[torch.Tensor, torch.Tensor]


class Digits:
    """Images [n, 8, 8] float32 with classes [n] int64; each drawn image is shifted a little and made noisy.

    Without that a small network knows 1,500 clean images by heart after some epochs, and its held-out loss says more
    about chance than about training. Positions and batches count tokens, one for each patch that a vision transformer
    sees: an image is `sequence` of them.
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
    """Images, and the disturbances that view number n of any of them gets."""

    def __init__(self, images: torch.Tensor, classes: torch.Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = classes
        self.side = images.shape[-1]
        self.padded = F.pad(images, (SHIFT, SHIFT, SHIFT, SHIFT), value=float(images.min()))
        self.noise = NOISE * torch.randn(DISTURBANCES, self.side, self.side, generator=generator)
        self.corner = torch.randint(2 * SHIFT + 1, (DISTURBANCES, 2), generator=generator)

    def draw(self, indices: list[int], numbers: list[int]) -> Batch:
        """Image indices[i] under disturbance numbers[i]: [n, side, side] and [n]."""
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
            hint="pip install 'diloco[vision]'",
        ) from error
    found = load_digits()
    return torch.from_numpy(found.images).float() / BRIGHTEST, torch.from_numpy(found.target).long()
