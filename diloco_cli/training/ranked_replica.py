"""One rank's part of an island's replica: its rows of each batch, and its shards, or its copy, of the model.

All ranks call `step` with the same arguments, and all find the same loss and norm. Gradients are weighted by targets:
their sum over the ranks is the gradient of the mean loss over the whole batch, as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from diloco_cli.errors import UsageError
from diloco_cli.tasks.build import Batch, losses_of
from diloco_cli.training.inner import autocast
from diloco_cli.training.micro_batch import examples_at_once
from diloco_cli.training.replica import Replica
from diloco_cli.training.shards import local


def rank_batches(
    batch: Batch, batch_tokens: int, micro_batch_tokens: int | None, rank: int, ranks: int
) -> Iterator[tuple[Batch, float]]:
    """This rank's micro-batches, each with its share of the whole batch's targets: as many on every rank, because each
    is a meeting of all. A rank that has fewer rows repeats its first one, with a share of 0.

    Raises UsageError for a batch that cannot be divided by examples, or has fewer than there are ranks.
    """
    examples, at_once = examples_at_once(batch, batch_tokens, micro_batch_tokens)
    if examples < ranks:
        raise UsageError(
            f"a batch of {examples} examples cannot be divided over {ranks} ranks",
            where="data",
            hint="give the island a larger batch_tokens, or fewer ranks",
        )
    inputs, targets = batch
    first, end = rank * examples // ranks, (rank + 1) * examples // ranks
    for start in range(0, -(-examples // ranks), at_once):
        rows = slice(first + start, min(first + start + at_once, end))
        if rows.start < rows.stop:
            yield (inputs[rows], targets[rows]), targets[rows].numel() / targets.numel()
        else:
            yield (inputs[first : first + 1], targets[first : first + 1]), 0.0


@dataclass
class RankedReplica(Replica):
    """`model`: wrapped by `ranked_model.py`, as are its gradients: of a DTensor, sharded; of DDP's, whole on each."""

    rank: int = 0
    ranks: int = 1

    @property
    def called(self) -> str:
        return f"rank {self.rank} of {self.ranks}"

    @property
    def _is_copy(self) -> bool:
        return isinstance(self.model, DistributedDataParallel)

    def step(self, position: int, batch_tokens: int, lr: float) -> float:
        """As Replica.step; the loss and the norm are those of the whole island, on every rank."""
        self.optimizer.zero_grad(set_to_none=True)
        mean = self._accumulate(position, batch_tokens)
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        loss_and_squares = torch.stack([mean.double(), _squares(gradients)])
        distributed.all_reduce(loss_and_squares[:1] if self._is_copy else loss_and_squares)
        norm = loss_and_squares[1].sqrt()
        _shorten(gradients, norm, self.settings.train.inner.clip_norm)
        found: list[float] = loss_and_squares.tolist()  # the step's only wait for the device
        loss, squares = found
        if isfinite(loss):
            self._optimize(squares**0.5, lr)
        return loss

    def _accumulate(self, position: int, batch_tokens: int) -> torch.Tensor:
        """This rank's share of the mean loss, a scalar still on the device."""
        batch = self.data.batch(self.shard, self.num_shards, position, batch_tokens)
        parts = list(rank_batches(batch, batch_tokens, self.micro_batch_tokens, self.rank, self.ranks))
        self.passed = 0.0
        losses = []
        for index, (part, share) in enumerate(parts):
            with self._adding_up(last=index == len(parts) - 1):
                losses.append(self._pass(part, share))
            self.passed = (index + 1) / len(parts)
        return torch.stack(losses).sum()

    def _adding_up(self, last: bool) -> AbstractContextManager[object]:
        """Copies add up their gradients once a step; shards in each backward pass, because no rank has room for the
        gradients of the whole model."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[object] = self.model.no_sync()
        return context

    def _pass(self, part: Batch, share: float) -> torch.Tensor:
        """Forward and backward on one micro-batch; its share of the loss. Both ways of sharding take the mean of the
        ranks' gradients; times their number it is the sum."""
        at_once = self.device.type == "cuda"  # from pinned memory, without waiting
        inputs, targets = (tensor.to(self.device, non_blocking=at_once) for tensor in part)
        with autocast(self.settings.train.precision, self.device):
            loss, objective = losses_of(self.model(inputs, targets))
        (share * self.ranks * objective).backward()  # type: ignore[no-untyped-call]
        return share * loss.detach()


def _squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all elements, a float64 scalar."""
    norms = torch._foreach_norm(gradients)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _shorten(gradients: list[torch.Tensor], norm: torch.Tensor, clip_norm: float) -> None:
    """As torch's clip_grad_norm_, with a norm that is known; 0: leave them."""
    if clip_norm:
        factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
