"""Tensors of a model that no committed version holds, as the model's own constructor makes them.

A constructor fills all parameters with random values, for 4 bytes of memory each and a minute or more for each ten
billion; only to be replaced by committed ones. Where buffers alone are wanted, and they depend on neither parameters
nor chance, parameters get no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from diloco_cli.config.settings import RunSettings
from diloco_cli.tasks.build import build_model
from diloco_cli.tasks.weights import check_frozen

Name = tuple[str, str]  # of a module, and of its attribute


def constructed(settings: RunSettings, wanted: Sequence[Name], frozen: bool) -> list[torch.Tensor]:
    """These tensors of the run's model, in memory. `frozen`: there are parameters among them."""
    found = None if frozen else _without_parameters(settings, wanted)
    if found is None:
        model = build_model(settings)
        check_frozen(settings, model)
        found = _tensors(model, wanted)
    return found


def _without_parameters(settings: RunSettings, wanted: Sequence[Name]) -> list[torch.Tensor] | None:
    """None if they, or the constructor, need the values of parameters, or if anything was drawn by chance: then what
    is drawn depends on what parameters drew before."""
    try:
        with _parameters_on_meta():
            found = _tensors(build_model(settings), wanted)
    except Exception as error:  # the constructor's own: with parameters it may not be raised
        if isinstance(error, MemoryError):
            raise
        return None
    undrawn = torch.Generator().manual_seed(settings.train.seed).get_state()
    if any(tensor.is_meta for tensor in found) or not torch.equal(torch.get_rng_state(), undrawn):
        return None
    return found


def _tensors(model: nn.Module, names: Sequence[Name]) -> list[torch.Tensor]:
    return [getattr(model.get_submodule(module), name).detach() for module, name in names]


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
