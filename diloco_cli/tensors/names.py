"""The names of a model's parameters: those of the bare model, whatever wraps it or its parts.

torch.compile, activation checkpointing and DDP put a module of their own around another, and its attribute into the
names of all parameters below. A layout, saved moments and an export hold names, so that such a wrapper would make the
same model another one.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

WRAPPED_AS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})  # of torch.compile and checkpoint_wrapper


def bare_name(name: str) -> str:
    """Without the attributes of wrappers. `module`, DDP's, is an attribute of many models too: `bare_parameters` tells
    them apart."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED_AS)


def bare_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every parameter once, by its bare name, in the model's order."""
    return {bare_name(name): parameter for name, parameter in bare_model(model).named_parameters()}


def bare_model(model: torch.nn.Module) -> torch.nn.Module:
    """What compile and DDP wrap as a whole, one around the other in any order."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
    return bare_model(inner) if isinstance(inner, torch.nn.Module) else model
