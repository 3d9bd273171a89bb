"""One model replica: what an inner step is, whoever calls it (the training loop, a tape's player, a baseline)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from diloco_cli.config.settings import RunSettings
from diloco_cli.learner.inner import build_optimizer, set_learning_rate
from diloco_cli.tasks.build import Data

CPU = torch.device("cpu")


@dataclass
class Replica:
    """A model with its inner optimizer, reading shard `shard` of `num_shards` of the data."""

    settings: RunSettings
    model: nn.Module
    data: Data
    shard: int
    num_shards: int
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(self.model, self.settings.train.inner)
        self.model.train()

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def step(self, position: int, batch_tokens: int, lr: float) -> float:
        """One inner step on the batch at `position` (tokens into the shard); returns the loss in nats per token."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.backward(position, batch_tokens)
        self.apply(lr)
        return loss

    def backward(self, position: int, batch_tokens: int) -> float:
        """Forward and backward on one batch; gradients are added to what is there."""
        tokens, targets = self.data.batch(self.shard, self.num_shards, position, batch_tokens)
        loss = self.model(tokens.to(self.device), targets.to(self.device))
        loss.backward()
        return float(loss.detach())

    def apply(self, lr: float) -> None:
        """Clip the gradients and let the optimizer step."""
        clip_norm = self.settings.train.inner.clip_norm
        if clip_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
