"""One model replica: what an inner step is, whoever calls it (the training loop, a tape's player, a baseline)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import nn

from diloco_cli.config.settings import RunSettings
from diloco_cli.learner.inner import autocast, build_optimizer, clip_gradients, set_learning_rate
from diloco_cli.tasks.build import Data
from diloco_cli.tasks.contract import losses_of

CPU = torch.device("cpu")


@dataclass
class Replica:
    """A model with its inner optimizer, reading shard `shard` of `num_shards` of the data.

    `gradient_norm` is that of the last step, before clipping.
    """

    settings: RunSettings
    model: nn.Module
    data: Data
    shard: int
    num_shards: int
    device: torch.device = CPU
    gradient_norm: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(self.model, self.settings.train.inner)
        self.model.train()

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def step(self, position: int, batch_tokens: int, lr: float) -> float:
        """One inner step on the batch at `position` (tokens into the shard); returns the loss in nats per token.

        If the loss is not finite it is returned and nothing is changed: the caller says whose it is. Raises
        RunFailedError if the gradients are not finite.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.backward(position, batch_tokens)
        if isfinite(loss):
            self.apply(lr)
        return loss

    def backward(self, position: int, batch_tokens: int) -> float:
        """Forward and backward on one batch; gradients are added to what is there. An auxiliary term of the model is
        trained on but is no part of the loss that is returned."""
        tokens, targets = self.data.batch(self.shard, self.num_shards, position, batch_tokens)
        with autocast(self.settings.train.precision, self.device):
            loss, objective = losses_of(self.model(tokens.to(self.device), targets.to(self.device)))
        objective.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def apply(self, lr: float) -> None:
        """Clip the gradients and let the optimizer step. Raises RunFailedError before it if they are not finite."""
        self.gradient_norm = clip_gradients(self.model, self.settings.train.inner.clip_norm)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
