"""A model's state beside its trained parameters: which buffers training changes, and what no exchange carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from diloco_cli.errors import UsageError
from diloco_cli.tensors.flat import bare_model, bare_name, bare_parameters, persistent_buffers

State = Mapping[str, Any]
MARKS = 251  # bfloat16 holds as many integers


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


@torch.no_grad()
def refuse_shared_memory(model: nn.Module) -> None:
    """Parameters that are views of the same memory would be written to one after the other: each is marked, and gets
    its values back."""
    trained = [(name, p) for name, p in bare_parameters(model).items() if p.requires_grad and p.numel()]
    places = Counter(p.untyped_storage().data_ptr() for _, p in trained)
    near = [(name, p, p.clone()) for name, p in trained if places[p.untyped_storage().data_ptr()] > 1]
    for index, (_, parameter, _) in enumerate(near):
        parameter.fill_(index % MARKS)
    found = [name for index, (name, p, _) in enumerate(near) if not bool((p == index % MARKS).all())]
    for _, parameter, values in near:
        parameter.copy_(values)
    if found:
        raise UsageError(
            f"{found[0]} shares memory with another parameter, and is not the same one",
            where="model",
            hint="tie them: give both modules the same torch.nn.Parameter",
        )


def carried_text(model: nn.Module, carried: Collection[str]) -> str:
    """`carried: 12,345 parameters in 8 tensors (1 tied), 2 buffers (such as norm.running_mean); ...`."""
    every = list(model.named_parameters(remove_duplicate=False))
    unique = bare_parameters(model).values()
    trained = [p for p in unique if p.requires_grad]
    frozen, buffers = len(unique) - len(trained), len(list(model.buffers())) - len(carried)
    tied = len(every) - len(unique)
    text = f"carried: {sum(p.numel() for p in trained):,} parameters in {len(trained)} tensors"
    text += f" ({tied} tied)" if tied else ""
    text += f", {len(carried)} buffers (such as {min(carried)})" if carried else ""
    return f"{text}; as the model's code makes them, not exchanged: {frozen} frozen tensors, {buffers} buffers"


def _as_bytes(value: torch.Tensor) -> torch.Tensor | str:
    """A copy: of any type, with NaN equal to itself."""
    if value.is_quantized or value.layout != torch.strided:
        return repr(value)
    return value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _same(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return torch.equal(a, b) if both else type(a) is type(b) and a == b
