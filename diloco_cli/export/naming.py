"""Under which names, and how turned, a run's trained tensors stand in exported files; and what stands beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import UsageError
from diloco_cli.layout import Layout
from diloco_cli.tasks.build import build_model, build_model_on_meta
from diloco_cli.tasks.weights import check_frozen
from diloco_cli.tensors.names import bare_model, bare_name
from diloco_cli.tensors.payload import Spec


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor of the files that is a trained tensor, or its transpose."""

    name: str
    transposed: bool = False


@dataclass(frozen=True)
class Naming:
    """`targets`: of each trained tensor, by its name in the run's layout. `beside`: tensors that no run trains."""

    targets: Mapping[str, tuple[ExportedTensor, ...]]
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)


def own_names(layout: Layout) -> Naming:
    """The trained tensors alone, under their names in the run."""
    return Naming({name: (ExportedTensor(name),) for name in shapes_of(layout)})


def shapes_of(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Every trained tensor of a run."""
    return {tensor.name: tensor.shape for fragment in layout.fragments for tensor in fragment.tensors}


def spec_of(naming: Naming, layout: Layout, dtype: torch.dtype) -> Spec:
    """The files' tensors, sorted by name. Integers beside the trained tensors keep their type."""
    shapes, found = shapes_of(layout), {}
    for name, targets in naming.targets.items():
        for target in targets:
            found[target.name] = (dtype, shapes[name][::-1] if target.transposed else shapes[name])
    for name, tensor in naming.beside.items():
        found[name] = (dtype if tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape))
    return dict(sorted(found.items()))


def whole_state(run: RunSettings, layout: Layout, *, tied: bool) -> Naming:
    """All that `load_state_dict` of the run's model demands: buffers and frozen parameters too, as the model's code
    builds them. `tied`: under all names of a tensor that has several; else under the first alone. Raises UsageError if
    the code now builds another model than the run's."""
    model = bare_model(build_model_on_meta(run))
    state = {bare_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    _check_same(state, layout)
    trained = {id(state[name]): name for name in shapes_of(layout)}
    targets: dict[str, tuple[ExportedTensor, ...]] = {}
    others = []
    for name, tensor in state.items():
        owner = trained.get(id(tensor))
        if owner is None:
            others.append(name)
        elif tied or name == owner:
            targets[owner] = (*targets.get(owner, ()), ExportedTensor(name))
    return Naming(targets, _built(run, others) if others else {})


def _built(run: RunSettings, names: list[str]) -> dict[str, torch.Tensor]:
    model = build_model(run)
    check_frozen(run, model)
    state = bare_model(model).state_dict()
    values = {bare_name(name): tensor for name, tensor in state.items()}
    return {name: values[name] for name in names}


def _check_same(state: Mapping[str, torch.Tensor | nn.Parameter], layout: Layout) -> None:
    for name, shape in shapes_of(layout).items():
        found = state.get(name)
        if found is None or tuple(found.shape) != shape:
            built = "has no such tensor" if found is None else f"has it as {list(found.shape)}"
            raise UsageError(
                f"the run trains {name} {list(shape)}, and the model that is built here {built}",
                where="model",
                hint="export with the code (and the release of transformers) that trained the run; or --to safetensors",
            )
