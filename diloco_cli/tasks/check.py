"""Checks that a model and its data work together: tried on two examples before any unit is started.

So an error in a user's code is reported here, with what was expected, and not in three learners' logs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import nn

from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import DilocoError, UsageError
from diloco_cli.tasks.build import CONTRACT, Batch, Data, build_data, build_model, losses_of, open_own_data
from diloco_cli.tasks.own_data import epochs_text, refuse_short

EXAMPLES = 2  # enough for a model that normalises over its batch
MAX_PARAMETERS_TRIED = 200_000_000  # above, building the model once more takes too long
BATCH = "batch(shard, num_shards, position, batch_tokens)"


def is_worth_a_try(run: RunSettings, num_parameters: int) -> bool:
    """Whether to try: presets are known to fit; a user's model or data is tried if it is small enough."""
    brought = run.model.entrypoint or run.model.huggingface or run.data.entrypoint or run.model.brought
    return run.model.is_built and bool(brought) and num_parameters <= MAX_PARAMETERS_TRIED


def check_own_data(run: RunSettings, num_shards: int, batch_tokens: int) -> str | None:
    """How often a run goes through its own tokens; None for other data. Raises UsageError if they are too short for
    `num_shards` streams in batches of so many tokens."""
    if not run.data.is_own:
        return None
    data = open_own_data(run)
    refuse_short(run, data, num_shards, batch_tokens)
    return epochs_text(run, data)


def check_task(run: RunSettings, batch_tokens: int) -> None:
    """Build both, and compute a step without applying it. Raises UsageError with the reason if that fails."""
    model, data = build_model(run), build_data(run)
    batch = _drawn(data, batch_tokens)
    model.train()
    loss, objective = losses_of(_tried(model, batch, "a batch"))
    _require_finite(loss, "the first loss", batch)
    if not objective.requires_grad:
        raise UsageError(
            "model: the loss has no gradient: it does not depend on a parameter, or was detached", where="model"
        )
    model.eval()
    with torch.inference_mode():
        held_out = _first_held_out(data)
        _require_finite(losses_of(_tried(model, held_out, "held-out data"))[0], "the first held-out loss", held_out)


def _drawn(data: Data, batch_tokens: int) -> Batch:
    """The first two examples of the first batch, drawn twice: a restart asks for the same position again."""
    once, again = (
        _called(lambda: data.batch(0, 1, 0, batch_tokens), f"{BATCH} of {batch_tokens} tokens") for _ in range(2)
    )
    batch = _as_batch(once, BATCH)
    if not all(torch.equal(a, b) for a, b in zip(batch, _as_batch(again, BATCH), strict=True)):
        raise UsageError(
            f"data: {BATCH} gave other tensors for the same position; a restart could not go on where it stopped",
            where="data",
            hint="draw from a generator that is seeded by shard and position",
        )
    return batch[0][:EXAMPLES], batch[1][:EXAMPLES]


def _first_held_out(data: Data) -> Batch:
    found = _called(lambda: next(iter(data.held_out(EXAMPLES)), None), "held_out(num_sequences)")
    if found is None:
        raise UsageError("data: held_out(num_sequences) gives no batch; the run would have no loss", where="data")
    return _as_batch(found, "held_out(num_sequences)")


def _as_batch(found: Any, what: str) -> Batch:
    """(inputs, targets): two tensors with the same number of examples, at least one."""
    pair = isinstance(found, (tuple, list)) and len(found) == 2 and all(isinstance(x, torch.Tensor) for x in found)
    if not pair:
        raise UsageError(
            f"data: {what} must give (tokens, targets), two tensors, not {type(found).__name__}", where="data"
        )
    inputs, targets = found
    sizes = [tensor.shape[0] if tensor.dim() else 0 for tensor in (inputs, targets)]
    if sizes[0] != sizes[1] or not sizes[0]:
        raise UsageError(
            f"data: {what} gave {list(inputs.shape)} and {list(targets.shape)}; "
            "the first dimension counts examples and must be the same, at least 1",
            where="data",
            hint="batch_tokens counts tokens: it must be at least one sequence",
        )
    return inputs, targets


def _tried(model: nn.Module, batch: Batch, what: str) -> Any:
    return _called(lambda: model(*batch), f"the model's forward on {what} ({_described(batch)})", "model")


def _require_finite(loss: torch.Tensor, what: str, batch: Batch) -> None:
    value = float(loss.detach())
    if not isfinite(value):
        raise UsageError(
            f"model: {what} is {value} ({_described(batch)})",
            where="model",
            hint="look at the model's initial weights and at the data's values",
        )


def _called(work: Callable[[], Any], what: str, where: str = "data") -> Any:
    """The result of a user's code; an error in it becomes a UsageError with its place."""
    try:
        return work()
    except DilocoError:
        raise
    except Exception as error:
        raise UsageError(
            f"{what} raised {type(error).__name__}: {error}",
            where=where,
            hint=f"see where with DILOCO_DEBUG=1; {CONTRACT}" if where == "model" else "see where with DILOCO_DEBUG=1",
        ) from error


def _described(batch: Batch) -> str:
    """`tokens [2, 128] int64 from 0 to 255, targets [2, 128] int64 from 0 to 255`."""
    parts = []
    for name, tensor in zip(("tokens", "targets"), batch, strict=True):
        kind = str(tensor.dtype).removeprefix("torch.")
        span = f" from {tensor.min().item():g} to {tensor.max().item():g}" if tensor.numel() else ""
        parts.append(f"{name} {list(tensor.shape)} {kind}{span}")
    return ", ".join(parts)
