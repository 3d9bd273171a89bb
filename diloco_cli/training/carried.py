"""A model's state beside its trained parameters: which buffers training changes, and what no exchange carries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from diloco_cli.errors import UsageError
from diloco_cli.tensors.flat import bare_model, bare_name, persistent_buffers

State = Mapping[str, Any]


def state_of(model: nn.Module) -> State:
    """A copy of what a checkpoint of the model holds beside its trained parameters: persistent buffers, frozen
    parameters, extra state."""
    found = bare_model(model).state_dict(keep_vars=True)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    return {
        bare_name(name): _as_bytes(value) if isinstance(value, torch.Tensor) else repr(value)
        for name, value in found.items()
        if id(value) not in trained
    }


def changed_in(before: State, after: State) -> list[str]:
    return [name for name in {**before, **after} if not _same(before.get(name), after.get(name))]


def refuse_changed(before: State, after: State, may_change: Collection[str] = ()) -> None:
    """Changed state would be lost without a word unless the run carries it (`may_change`)."""
    changed = [name for name in changed_in(before, after) if name not in may_change]
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UsageError(
            f"training changes {changed[0]}{more}, which is not exchanged: it would differ from island to island and be"
            " lost in the export",
            where="model",
            hint="a new run carries persistent buffers that the first two steps change, where launch has the model and"
            " its data to try them; register what is only a cache with persistent=False",
        )


def buffers_of(model: nn.Module) -> State:
    """The same of persistent buffers alone, as frozen parameters may be large."""
    return {name: _as_bytes(value) for name, value in persistent_buffers(model).items()}


def _as_bytes(value: torch.Tensor) -> torch.Tensor | str:
    """A copy: of any type, with NaN equal to itself."""
    if value.is_quantized or value.layout != torch.strided:
        return repr(value)
    return value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _same(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return torch.equal(a, b) if both else type(a) is type(b) and a == b
