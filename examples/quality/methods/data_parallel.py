"""Data-parallel training on one process, with the semantics of torch's DistributedDataParallel.

Each of M ranks takes the mean loss of its own batch from its own shard; gradients are averaged over the ranks; then all
make the same step. The same replica, batches, clipping and learning-rate rule as a learner's.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import torch

from diloco_cli.errors import RunFailedError
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.syncer.evaluation import held_out_loss
from diloco_cli.tasks.build import Data, build_data, build_model
from diloco_cli.training.inner import step_learning_rate
from diloco_cli.training.replica import CPU, Replica


class DataParallel:
    """All islands of a run as the ranks of one data-parallel job: one set of parameters, M gradients a step."""

    def __init__(self, run: RunFormat, *, device: torch.device = CPU, data: Data | None = None) -> None:
        torch.set_num_threads(1)
        self.run = run
        self.model = build_model(run.settings).to(device)
        self.data = data if data is not None else build_data(run.settings)
        micro = run.islands[0].micro_batch_tokens
        self.replica = Replica(run.settings, self.model, self.data, 0, run.num_shards, device, micro)
        self.positions = [0] * len(run.islands)
        self.steps = 0

    @property
    def tokens(self) -> int:
        """Processed so far, by all ranks together."""
        return sum(self.positions)

    def step(self) -> float:
        """One step on one batch of every rank; returns the mean loss over the ranks, nats per token."""
        self.replica.optimizer.zero_grad(set_to_none=True)
        losses = []
        for rank, island in enumerate(self.run.islands):
            self.replica.shard = rank
            losses.append(self.replica.backward(self.positions[rank], island.batch_tokens))
        lr = step_learning_rate(self.run, min(1.0, self.tokens / self.run.settings.train.tokens), self.steps, False)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(len(losses))
        self.replica.apply(lr)
        for rank, island in enumerate(self.run.islands):
            self.positions[rank] += island.batch_tokens
        self.steps += 1
        loss = sum(losses) / len(losses)
        if not isfinite(loss):
            raise RunFailedError(f"the loss of data-parallel training is {loss} at step {self.steps}")
        return loss

    def held_out_loss(self, num_sequences: int) -> float:
        """Nats per token on the same sequences as every other method's."""
        self.model.eval()
        try:
            return held_out_loss(self.model, self.data, num_sequences)
        finally:
            self.model.train()


def train(run: RunFormat, on_step: Callable[[DataParallel], None] = lambda job: None) -> DataParallel:
    """Until `train.tokens` are processed; `on_step` may look at the job, e.g. evaluate it."""
    job = DataParallel(run)
    while job.tokens < run.settings.train.tokens:
        job.step()
        on_step(job)
    return job
