"""Tensors of a model that no committed version holds, as the model's own constructor makes them.

A constructor fills all parameters with random values, for 4 bytes of memory each and a minute or more for each ten
billion; only to be replaced by committed ones. Where buffers alone are wanted, and they depend on neither parameters
nor chance, parameters get no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from diloco_cli.config.settings import RunSettings
from diloco_cli.tasks.build import build_model
from diloco_cli.tasks.weights import check_frozen

Name = tuple[str, str]  # of a module, and of its attribute


def constructed(settings: RunSettings, wanted: Sequence[Name]) -> list[torch.Tensor]:
    """These tensors of the run's model, in memory."""
    found = _without_parameters(settings, wanted)
    if found is None:
        model = build_model(settings)
        check_frozen(settings, model)
        found = _tensors(model, wanted)
    return found


def _without_parameters(settings: RunSettings, wanted: Sequence[Name]) -> list[torch.Tensor] | None:
    """None if they, or the constructor, need the values of parameters, or if they differ from seed to seed."""
    other = replace(settings, train=replace(settings.train, seed=settings.train.seed + 1))
    made = []
    for run in (settings, other):
        try:
            with _parameters_on_meta():
                made.append(_tensors(build_model(run), wanted))
        except Exception:  # the constructor's own: with parameters it may not be raised
            return None
    first, second = made
    same = all(not a.is_meta and torch.equal(_bytes(a), _bytes(b)) for a, b in zip(first, second, strict=True))
    return first if same else None


def _tensors(model: nn.Module, names: Sequence[Name]) -> list[torch.Tensor]:
    return [getattr(model.get_submodule(module), name).detach() for module, name in names]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """So that NaN equals NaN."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A parameter that a module gets loses its memory at once."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
