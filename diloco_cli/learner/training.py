"""The training port of an island with one device: a replica in this process (protocol/actors/ports.py, `Training`)."""

from __future__ import annotations

from math import isfinite

import torch

from diloco_cli.errors import RunFailedError
from diloco_cli.learner.inner import inner_state, keeps_moments, restore_inner_state, step_learning_rate
from diloco_cli.learner.replica import Replica
from diloco_cli.protocol.actors.ports import Moments, Progression, Stepped
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.tensors.flat import gather, scatter
from diloco_cli.tensors.payload import to_bytes


class DeviceTraining:
    """`slowdown`: an emulated slower island sleeps so that a step takes so many times its own time."""

    def __init__(self, run: RunFormat, replica: Replica, slowdown: float = 1.0) -> None:
        self.run, self.replica, self.slowdown = run, replica, slowdown
        self._tensors = replica.tensors

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        started_s: float = yield Now()
        stepped = self.train(position, batch_tokens, at)
        if self.slowdown > 1.0:
            until_s = started_s + self.slowdown * ((yield Now()) - started_s)
            while (left_s := until_s - (yield Now())) > 0:  # news may end a sleep before its time
                yield Sleep(left_s)
        return stepped

    def train(self, position: int, batch_tokens: int, at: Progression) -> Stepped:
        lr = step_learning_rate(self.run, at.fraction, at.own_steps, at.moments_lost)
        loss = self.replica.step(position, batch_tokens, lr)
        if not isfinite(loss):
            raise RunFailedError(
                f"the loss is {loss} at token {position} of shard {self.replica.shard}",
                hint="lower train.inner.lr; a restart begins at the newest committed parameters",
            )
        return Stepped(batch_tokens, loss)

    def read(self, fragment: int) -> torch.Tensor:
        """[n] float32 on the CPU."""
        return gather(self.run.layout.fragments[fragment], self._tensors)

    def write(self, fragment: int, values: torch.Tensor) -> None:
        """[n] float32."""
        scatter(self.run.layout.fragments[fragment], values, self._tensors)

    def save(self) -> Moments | None:
        tensors = inner_state(self.replica.model, self.replica.optimizer)
        return None if tensors is None else Moments(int(tensors["step"][0]), lambda: to_bytes(tensors))

    def restore(self, moments: bytes) -> bool:
        return restore_inner_state(self.replica.model, self.replica.optimizer, moments)

    def reset(self) -> bool:
        if not keeps_moments(self.replica.optimizer):
            return False
        self.replica.optimizer.state.clear()
        return True
