"""The state of an optimizer that a user's loop has made, as bytes: any whose state is tensors and numbers by parameter.

It is asked for its state, and given it back, by torch's own `state_dict` and `load_state_dict`, and the bytes are
safetensors that name what they hold, because only the optimizer knows what it keeps. Its groups, and with them its
rates, are the loop's own."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from diloco_cli.digests import digest
from diloco_cli.tensors.flat import bare_parameters
from diloco_cli.tensors.payload import DTYPES, to_bytes

KIND = "kind"  # no entry's name: it has no dot
NEUTRAL = {"lr", "weight_decay", "maximize", "foreach", "fused", "capturable", "differentiable"}  # for what it keeps
NUMBER = "="  # before the name of what is a number, and no tensor


def keeps_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Plain SGD has no state to lose."""
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def saved_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes | None:
    """With the optimizer's kind. None if there is none yet, or if it is more than tensors and numbers by parameter."""
    names, tensors = _names(model, optimizer), dict[str, torch.Tensor]()
    for index, state in optimizer.state_dict()["state"].items():
        for entry, value in state.items() if isinstance(state, dict) else [("", state)]:
            if value is None:
                continue
            if not isinstance(value, torch.Tensor | int | float) or index not in names or "." in entry:
                return None
            mark = "" if isinstance(value, torch.Tensor) else NUMBER
            tensors[f"{mark}{entry}.{names[index]}"] = tensor = _as_tensor(value)
            if tensor.dtype not in DTYPES:
                return None
    kind = torch.tensor(_kind(model, optimizer), dtype=torch.uint8)
    return to_bytes({KIND: kind, **dict(sorted(tensors.items()))}) if tensors else None


def restore_state(model: nn.Module, optimizer: torch.optim.Optimizer, data: bytes) -> bool:
    """False (and nothing changed) if the bytes are not the state of such an optimizer, or hold what is not finite.
    Each tensor is put back in its own type: torch casts it to the parameter's."""
    indices = {name: index for index, name in _names(model, optimizer).items()}
    states: dict[int, dict[str, Any]] = {}
    try:
        tensors = load(data)
    except (SafetensorError, ValueError):
        return False
    if tensors.pop(KIND, torch.empty(0)).tolist() != _kind(model, optimizer):
        return False
    for key, tensor in tensors.items():
        entry, _, name = key.partition(".")
        if name not in indices or not bool(torch.isfinite(tensor).all()):
            return False
        value = tensor.item() if entry.startswith(NUMBER) and not tensor.dim() else tensor
        states.setdefault(indices[name], {})[entry.removeprefix(NUMBER)] = value
    before = dict(optimizer.state)
    try:
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    except (KeyError, ValueError, RuntimeError, AssertionError):
        optimizer.state.clear()
        optimizer.state.update(before)
        return False
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in states.items():
        kept = optimizer.state[held[index]]
        for entry, value in state.items():
            cast = kept.get(entry)
            if isinstance(value, torch.Tensor) and isinstance(cast, torch.Tensor) and cast.dtype != value.dtype:
                kept[entry] = value.to(cast.device)
    return True


def _kind(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """The digest, as bytes, of what decides which entries there are: the optimizer's class, and of each parameter the
    shape and the options that are on (`amsgrad`, a momentum that is not 0)."""
    names, options = _names(model, optimizer), sorted(optimizer.defaults.keys() - NEUTRAL)
    held = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    of_each = {
        names[index]: [list(parameter.shape), [key for key in options if _is_on(group.get(key))]]
        for index, (parameter, group) in enumerate(held)
        if index in names
    }
    text = json.dumps([type(optimizer).__qualname__, sorted(of_each.items())])
    return list(digest(text.encode()).encode())


def _is_on(option: Any) -> bool:
    return isinstance(option, int | float) and bool(option)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Of the model's parameters, by their numbers in the optimizer's state."""
    names = {id(parameter): name for name, parameter in bare_parameters(model).items()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: names[id(parameter)] for index, parameter in enumerate(held) if id(parameter) in names}


def _as_tensor(value: torch.Tensor | float) -> torch.Tensor:
    """A number as what holds it exactly."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)
