"""One model replica and its inner step, used by the training loop and by baselines; and the training
port of an island with one device (protocol/actors/ports.py, `Training`), a replica in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import nn

from diloco_cli.clock import monotonic_s
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import RunFailedError, UsageError
from diloco_cli.layout import ParameterFact, make_layout
from diloco_cli.protocol.actors.ports import Moments, Progression, Stepped
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.tasks.build import Batch, Data, losses_of
from diloco_cli.tasks.models import prepare
from diloco_cli.tasks.weights import check_frozen
from diloco_cli.tensors.flat import flatten, parameter_facts, unflatten
from diloco_cli.tensors.names import bare_parameters
from diloco_cli.training.faults import enough_memory
from diloco_cli.training.inner import (
    autocast,
    build_optimizer,
    clip_gradients,
    finite_norm,
    keeps_moments,
    make_step,
    restore_inner_state,
    saved_moments,
    set_learning_rate,
    step_learning_rate,
)
from diloco_cli.training.micro_batch import micro_batches

CPU = torch.device("cpu")


@dataclass
class Replica:
    """A model with its inner optimizer, reading shard `shard` of `num_shards` of the data.

    `micro_batch_tokens`: tokens of one forward and backward pass; None: as the settings say, with auto the whole batch.
    `gradient_norm` is that of the last step, before clipping; `passed`: the share of the batch that was computed.
    `data_s`: how long its steps have waited for their batches, all together; not the first, which opens the data.
    `before_update` is called before the optimizer changes anything.
    """

    settings: RunSettings
    model: nn.Module
    data: Data
    shard: int
    num_shards: int
    device: torch.device = CPU
    gradient_norm: float = field(default=0.0, init=False)
    passed: float = field(default=0.0, init=False)
    data_s: float | None = field(default=None, init=False)
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.micro_batch_tokens is None and self.settings.train.micro_batch_tokens != "auto":
            self.micro_batch_tokens = self.settings.train.micro_batch_tokens
        prepare(self.model, self.settings.train)
        self.optimizer = build_optimizer(self.model, self.settings.train.inner)
        self.before_update: Callable[[], None] = lambda: None
        self.model.train()

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return bare_parameters(self.model)

    @property
    def called(self) -> str:
        """In errors."""
        return str(self.device)

    def step(self, position: int, batch_tokens: int, lr: float) -> float:
        """One inner step on the batch at `position` (tokens into the shard); returns the loss in nats per token.

        If the loss is not finite it is returned and no parameter is changed: the caller reports it. Raises
        RunFailedError if the gradients are not finite.
        """
        self.optimizer.zero_grad(set_to_none=True)
        mean = self._accumulate(position, batch_tokens)
        norm = clip_gradients(self.model, self.settings.train.inner.clip_norm)
        both = torch.stack([mean.reshape(()), norm.to(mean.device)])
        loss, norm_here = both.tolist()  # the step's only wait for the device
        if isfinite(loss):
            self._optimize(norm_here, lr)
        return float(loss)

    def backward(self, position: int, batch_tokens: int) -> float:
        """Forward and backward on one batch; gradients are added to what is there. Returns the mean loss."""
        return float(self._accumulate(position, batch_tokens))

    def apply(self, lr: float) -> None:
        """Clip the gradients and let the optimizer step. Raises RunFailedError before it if they are not finite."""
        self._optimize(float(clip_gradients(self.model, self.settings.train.inner.clip_norm)), lr)

    def _optimize(self, norm: float, lr: float) -> None:
        """`norm`: of the gradients, before they were clipped."""
        self.gradient_norm = finite_norm(norm)
        set_learning_rate(self.optimizer, lr)
        self.before_update()
        make_step(self.optimizer)

    def _accumulate(self, position: int, batch_tokens: int) -> torch.Tensor:
        """Forward and backward on one micro-batch after the other; the mean loss, a scalar still on the device.

        Each micro-batch counts with its share of the targets, so that the mean loss over the whole batch is what is
        differentiated and returned. An auxiliary term of the model is weighted likewise; it is trained on but is no
        part of the loss that is returned. A batch of one micro-batch is computed as it is.
        """
        asked_s = monotonic_s()
        batch, micro = self.data.batch(self.shard, self.num_shards, position, batch_tokens), self.micro_batch_tokens
        self.data_s = 0.0 if self.data_s is None else self.data_s + monotonic_s() - asked_s
        self.passed = 0.0
        losses = [self._pass(part, share) for part, share in micro_batches(batch, batch_tokens, micro)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _pass(self, part: Batch, share: float) -> torch.Tensor:
        """Forward and backward on one micro-batch; its share of the loss, still on the device."""
        at_once = self.device.type == "cuda"  # from pinned memory, without waiting
        inputs, targets = (tensor.to(self.device, non_blocking=at_once) for tensor in part)
        with autocast(self.settings.train.precision, self.device):
            loss, objective = losses_of(self.model(inputs, targets))
        (objective if share == 1.0 else share * objective).backward()  # type: ignore[no-untyped-call]
        self.passed += share
        return loss.detach() if share == 1.0 else share * loss.detach()


def check_layout(run: RunFormat, model: nn.Module) -> None:
    """Raises UsageError if this learner's model has another parameter list than the run, or other frozen values."""
    facts = parameter_facts(model)
    if not _has_tensors_of(run, facts):
        raise UsageError(
            f"the model built here is not the run's: {_first_difference(run, facts)}",
            where="FORMAT.json",
            hint="use the same version of the model's code on every island",
        )
    check_frozen(run.settings, model)


def _first_difference(run: RunFormat, facts: list[ParameterFact]) -> str:
    """The first tensor that differs, in the model's order, with its shape in the run and here."""
    wanted = {tensor.name: str(list(tensor.shape)) for part in run.layout.fragments for tensor in part.tensors}
    built = {fact.name: str(list(fact.shape)) for fact in facts}
    other = [name for name in {**built, **wanted} if wanted.get(name) != built.get(name)]
    if not other:
        return "its tensors have the same names and shapes, but other types or another order"
    first, more = other[0], f"; {len(other) - 1} more differ" if len(other) > 1 else ""
    return f"{first} is {wanted.get(first, 'missing')} in the run and {built.get(first, 'missing')} here{more}"


def _has_tensors_of(run: RunFormat, facts: list[ParameterFact]) -> bool:
    """By the digest of the layout that these give; where nothing in the run builds the model, by names and shapes
    alone, for its layout was made of these."""
    if run.settings.model.is_built:
        return make_layout(facts, run.settings.sync).digest == run.layout.digest
    there = {tensor.name: tensor.shape for fragment in run.layout.fragments for tensor in fragment.tensors}
    return {fact.name: fact.shape for fact in facts} == there


class DeviceTraining:
    """`slowdown`: to emulate a slower island, it sleeps until a step has taken `slowdown` times its own time."""

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
        place = f"at token {position} of shard {self.replica.shard}"
        try:
            loss = self._step(position, batch_tokens, lr)
        except RunFailedError as error:
            raise RunFailedError(f"{error.message} {place}", hint=error.hint) from error
        if not isfinite(loss):
            raise RunFailedError(
                f"the loss is {loss} {place}",
                hint="lower train.inner.lr; a restart begins at the newest committed parameters",
            )
        return Stepped(batch_tokens, loss)

    def _step(self, position: int, batch_tokens: int, lr: float) -> float:
        with enough_memory(self.replica.called, self.replica.micro_batch_tokens):
            return self.replica.step(position, batch_tokens, lr)

    def read(self, fragment: int) -> torch.Tensor:
        """[n] float32 on the CPU."""
        return flatten(self.run.layout.fragments[fragment], self._tensors)

    def write(self, fragment: int, values: torch.Tensor) -> None:
        """[n] float32."""
        unflatten(self.run.layout.fragments[fragment], values, self._tensors)

    def save(self) -> Moments | None:
        return saved_moments(self.replica.model, self.replica.optimizer)

    def restore(self, moments: bytes) -> bool:
        return restore_inner_state(self.replica.model, self.replica.optimizer, moments)

    def reset(self) -> bool:
        if not keeps_moments(self.replica.optimizer):
            return False
        self.replica.optimizer.state.clear()
        return True

    def keep_alive(self) -> None:
        """To be called while there is nothing to do."""

    def close(self, status: int) -> None:
        """To be called at the end, however it came; `status`: this process's exit status."""
