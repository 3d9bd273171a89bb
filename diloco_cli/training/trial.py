"""A trial of a run's model and data on two examples, before any unit is started and anything is written.

It makes real steps of a learner, on a model of its own that goes with it, so that an error in a user's code, and state
that no exchange would carry, is reported by `launch`, with what was expected, and not in every learner's log, or never.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import torch
from torch import nn

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import UsageError
from diloco_cli.layout import ParameterFact
from diloco_cli.tasks.build import Batch, Data, build_data, build_model, called, described_batch, losses_of, tried
from diloco_cli.tensors.flat import (
    bare_model,
    bare_name,
    bare_parameters,
    buffer_facts,
    parameter_facts,
    persistent_buffers,
)
from diloco_cli.training.replica import (
    Replica,
    State,
    changed_in,
    refuse_changed,
    refuse_shared_memory,
    state_of,
)

EXAMPLES = 2  # enough for a model that normalises over its batch
BATCH = "batch(shard, num_shards, position, batch_tokens)"


def check_task(run: RunSettings, batch_tokens: int, by_own_loops: bool = False) -> frozenset[str]:
    """Build both, and make two steps. The buffers that these change. Raises UsageError with the reason if anything
    fails, or would not be carried. `by_own_loops`: no learner draws a batch; what the evaluator reads stands in."""
    model, data = build_model(run), build_data(run, ("held_out",) if by_own_loops else ("batch", "held_out"))
    parameter_facts(model)  # refuses what no vector of a layout can hold
    batch = _some_of(_first_held_out(data)) if by_own_loops else _drawn(data, batch_tokens)
    model.train()
    before, first = state_of(model), _every_buffer(model)
    loss, objective = losses_of(tried(model, batch, "a batch"))
    _require_finite(loss, "the first loss", batch)
    if not objective.requires_grad:
        raise UsageError("the loss has no gradient: it does not depend on a parameter, or was detached", where="model")
    del loss, objective
    _make_steps(run, model, batch)
    buffers = _changed_buffers(model, before, first)
    _evaluate(model, data)
    refuse_shared_memory(model)
    return buffers


def check_evaluated(run: RunSettings) -> None:
    """What the evaluator needs, whoever trains. Raises UsageError with the reason if it fails."""
    model = build_model(run)
    parameter_facts(model)
    _evaluate(model, build_data(run, ("held_out",)))


def _evaluate(model: nn.Module, data: Data) -> None:
    model.eval()
    with torch.inference_mode():
        held_out = _first_held_out(data)
        _require_finite(losses_of(tried(model, held_out, "held-out data"))[0], "the first held-out loss", held_out)


class _Two:
    """A learner's data that are always the same two examples."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        return self._batch

    def held_out(self, num_sequences: int) -> Iterator[Batch]:
        yield self._batch


def _make_steps(run: RunSettings, model: nn.Module, batch: Batch) -> None:
    """A learner's first step, and the forward and backward pass of its second; nothing is compiled, which may take
    minutes. The rate is the first that is not zero as a learner's warms up."""
    train = replace(run.train, compile=False)
    parameters = bare_parameters(model)
    replica = Replica(replace(run, train=train), model, _Two(batch), 0, 1)
    replica.carried = persistent_buffers(model)
    tokens, lr = max(1, batch[1].numel()), train.inner.lr / (1 + train.inner.warmup_steps)
    what = f"of the model on a batch ({described_batch(batch)})"
    for step in ("first", "second"):
        replica.optimizer.zero_grad(set_to_none=True)
        loss = called(lambda: replica.backward(0, tokens), f"a forward and backward pass {what}", "model")
        _refuse_replaced(parameters, model)
        _refuse_sparse(model)
        if not isfinite(loss):
            raise UsageError(
                f"the loss of the {step} step is {loss} ({described_batch(batch)})",
                where="model",
                hint="lower train.inner.lr, or give it more train.inner.warmup_steps",
            )
        if step == "first":
            called(lambda: replica.apply(lr), f"the first step of {train.inner.name} {what}", "model")


def _every_buffer(model: nn.Module) -> dict[str, ParameterFact]:
    """That can be carried."""
    return {fact.name: fact for fact in buffer_facts(model, persistent_buffers(model))}


def _changed_buffers(model: nn.Module, before: State, first: Mapping[str, ParameterFact]) -> frozenset[str]:
    """Raises UsageError for changed state that no exchange carries."""
    after, there = state_of(model), persistent_buffers(model)
    changed = set(changed_in(before, after))
    found = {name for name, fact in _every_buffer(model).items() if name in changed and first.get(name) == fact}
    ids = {id(there[name]) for name in found}
    state = bare_model(model).state_dict(keep_vars=True)
    refuse_changed(before, after, {bare_name(name) for name, value in state.items() if id(value) in ids})
    for name in sorted(found):
        if not bool(there[name].isfinite().all()):
            raise UsageError(
                f"the buffer {name} is not finite after two steps: no mean of it can be made", where="model"
            )
    return frozenset(found)


def _refuse_replaced(before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """No optimizer and no exchange would see the new ones."""
    now = bare_parameters(model)
    changed = [name for name in {**before, **now} if before.get(name) is not now.get(name)]
    if changed:
        raise UsageError(
            f"{changed[0]} is made anew, or taken away, by the model's forward",
            where="model",
            hint="make all parameters in the constructor, and change them in place",
        )


def _refuse_sparse(model: nn.Module) -> None:
    for name, parameter in bare_parameters(model).items():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UsageError(
                f"{name} gets sparse gradients, which can be neither clipped nor stepped on",
                where="model",
                hint="build its module with sparse=False",
            )


def _drawn(data: Data, batch_tokens: int) -> Batch:
    """The first two examples of the first batch, drawn twice: a restart asks for the same position again."""
    once, again = (
        called(lambda: data.batch(0, 1, 0, batch_tokens), f"{BATCH} of {batch_tokens} tokens") for _ in range(2)
    )
    batch = _as_batch(once, BATCH)
    if not all(torch.equal(a, b) for a, b in zip(batch, _as_batch(again, BATCH), strict=True)):
        raise UsageError(
            f"{BATCH} gave other tensors for the same position; a restart could not go on where it stopped",
            where="data",
            hint="draw from a generator that is seeded by shard and position",
        )
    return _some_of(batch)


def _some_of(batch: Batch) -> Batch:
    return batch[0][:EXAMPLES], batch[1][:EXAMPLES]


def _first_held_out(data: Data) -> Batch:
    found = called(lambda: next(iter(data.held_out(EXAMPLES)), None), "held_out(num_sequences)")
    if found is None:
        raise UsageError("held_out(num_sequences) gives no batch; the run would have no loss", where="data")
    return _as_batch(found, "held_out(num_sequences)")


def _as_batch(found: Any, what: str) -> Batch:
    """(inputs, targets): two tensors with the same number of examples, at least one."""
    pair = isinstance(found, (tuple, list)) and len(found) == 2 and all(isinstance(x, torch.Tensor) for x in found)
    if not pair:
        raise UsageError(f"{what} must give (tokens, targets), two tensors, not {type(found).__name__}", where="data")
    inputs, targets = found
    sizes = [tensor.shape[0] if tensor.dim() else 0 for tensor in (inputs, targets)]
    if sizes[0] != sizes[1] or not sizes[0]:
        raise UsageError(
            f"{what} gave {list(inputs.shape)} and {list(targets.shape)}; "
            "the first dimension counts examples and must be the same, at least 1",
            where="data",
            hint="batch_tokens counts tokens: it must be at least one sequence",
        )
    return inputs, targets


def _require_finite(loss: torch.Tensor, what: str, batch: Batch) -> None:
    value = float(loss.detach())
    if not isfinite(value):
        raise UsageError(
            f"{what} is {value} ({described_batch(batch)})",
            where="model",
            hint="look at the model's initial weights and at the data's values",
        )
