"""A byte-level model that trains whole runs in seconds, and its data: the product's own, named as a user's."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from diloco_cli.config.models import GPTShape
from diloco_cli.tasks import models
from diloco_cli.tasks.data import ByteText

SEQUENCE = 32
SHAPE = GPTShape(layers=1, width=32, heads=2, sequence=SEQUENCE)


def model() -> nn.Module:
    return models.build(SHAPE)


class Text(ByteText):
    """Its batches take their time; on `noisy` shards every target is a random byte. `apart`: each shard's bytes are so
    many away from those of the one before, so that two shards can have no byte in common."""

    def __init__(self, seed: int, step_s: float, noisy: tuple[int, ...], apart: int) -> None:
        super().__init__(SEQUENCE, seed)
        self.step_s, self.noisy, self.apart = step_s, noisy, apart

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.step_s)
        inputs, targets = super().batch(shard, num_shards, position, batch_tokens)
        inputs, targets = ((ids + shard * self.apart) % 256 for ids in (inputs, targets))
        if shard in self.noisy:
            generator = torch.Generator().manual_seed(position)
            targets = torch.randint(256, targets.shape, generator=generator)
        return inputs, targets


def text(seed: int = 0, step_s: float = 0.0, noisy: tuple[int, ...] = (), apart: int = 0) -> Text:
    return Text(seed, step_s, tuple(noisy), apart)
