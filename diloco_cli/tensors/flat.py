"""A model's parameters, and the buffers that training changes, as the flat vectors of a layout's fragments, and back.

Names are those of the bare model: torch.compile, activation checkpointing and DDP put a module of their own around
another, and its attribute into the names of all parameters below. A layout, saved moments and an export hold names, so
such a wrapper would make the same model another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from diloco_cli.errors import UsageError
from diloco_cli.layout import (
    BUFFER_BYTES,
    Fragment,
    Layout,
    LayoutSettings,
    ParameterFact,
    TensorSlot,
    buffer_names,
    make_layout,
    room_of,
    with_buffers,
)

WRAPPED_AS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})  # of torch.compile and checkpoint_wrapper

ROUTERS = frozenset({"router", "gate"})  # of a mixture's experts

CARRIED = (torch.float32, torch.bfloat16, torch.float16)  # what float32 holds without rounding


def parameter_facts(model: torch.nn.Module) -> list[ParameterFact]:
    """Every trained tensor once (tied weights share one name), in the model's order and by its bare name.

    Weights of torch.nn.Embedding count as embeddings, and the matrices of linear layers and attention inside a block as
    hidden, but for routers. So heads, patches, and what a model keeps in tensors of its own are neither.

    Of all else only buffers that training changes are exchanged (`buffer_facts`): the rest stays as the model's code
    builds it on every learner, in the evaluator, and in an export. Raises UsageError for a trained parameter that no
    float32 vector carries.
    """
    _refuse_unfit(model)
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    hidden = _hidden_in(model) - embedded
    return [
        ParameterFact(
            name,
            tuple(parameter.shape),
            id(parameter) in embedded,
            _type_of(parameter),
            hidden=id(parameter) in hidden,
        )
        for name, parameter in bare_parameters(model).items()
        if parameter.requires_grad
    ]


def _refuse_unfit(model: torch.nn.Module) -> None:
    for name, parameter in bare_parameters(model).items():
        if not parameter.requires_grad:
            continue
        if is_lazy(parameter):
            what, hint = (
                "has no shape before the first batch",
                "give its module all sizes: nn.Linear, not nn.LazyLinear",
            )
        elif parameter.dtype not in CARRIED:
            what = f"is {_type_of(parameter)}, and what is exchanged is float32"
            hint = "train it in float32, bfloat16 or float16; a complex one as two real ones (torch.view_as_real)"
        elif parameter.layout != torch.strided:
            what, hint = "is sparse", "make it dense"
        elif any(size > 1 and not stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            what, hint = "repeats the same values in one memory (expand), which nothing can write to", "clone() it"
        else:
            continue
        raise UsageError(f"{name} {what}", where="model", hint=hint)


def buffer_facts(model: torch.nn.Module, names: Collection[str]) -> list[ParameterFact]:
    """Of the persistent buffers with these names, each once, as far as they can be carried."""
    return [
        ParameterFact(name, tuple(value.shape), False, _type_of(value))
        for name, value in persistent_buffers(model).items()
        if name in names and value.layout == torch.strided and _type_of(value) in BUFFER_BYTES
    ]


def layout_like(layout: Layout, model: torch.nn.Module, sync: LayoutSettings) -> Layout:
    """The layout that `model` gives, with those of its buffers that `layout` carries."""
    return with_buffers(make_layout(parameter_facts(model), sync), buffer_facts(model, buffer_names(layout)))


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of the model holds beside its parameters, each once, by its bare name."""
    found = {
        bare_name(f"{at}.{name}" if at else name): value
        for at, module in bare_model(model).named_modules()
        for name, value in module._buffers.items()
        if value is not None and name not in module._non_persistent_buffers_set
    }
    first = {id(value): name for name, value in reversed(found.items())}
    return {name: value for name, value in found.items() if first[id(value)] == name}


def running_statistics(model: torch.nn.Module) -> set[str]:
    """The buffers that training changes for sure, without a trial: those of torch's own normalising modules."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    theirs = {id(value) for module in norms for value in module._buffers.values()}
    return {name for name, value in persistent_buffers(model).items() if id(value) in theirs}


def _type_of(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _hidden_in(model: torch.nn.Module) -> set[int]:
    """The ids of matrices in blocks: members of a ModuleList, or alike in a Sequential, with parts of their own."""
    found = set()
    for module in model.modules():
        if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        kinds = Counter(map(type, module))
        for block in module:
            is_repeated = isinstance(module, torch.nn.ModuleList) or kinds[type(block)] > 1
            if is_repeated and next(block.children(), None) is not None:
                found |= {id(p) for at, part in block.named_modules() for p in _matrices_of(at, part)}
    return found


def _matrices_of(at: str, module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Conv1D is how transformers' GPT-2 names its linear layers. A router gives each token few numbers."""
    is_one = isinstance(module, torch.nn.Linear | torch.nn.MultiheadAttention) or type(module).__name__ == "Conv1D"
    matrices = [p for p in module.parameters(recurse=False) if p.dim() == 2 and min(p.shape) > 1] if is_one else []
    return [p for p in matrices if ROUTERS.isdisjoint(at.split(".")) or p.shape[0] >= p.shape[1]]


def flatten(fragment: Fragment, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The fragment's tensors as one vector on the CPU."""
    flat = torch.empty(fragment.size, dtype=torch.float32)
    flatten_into(flat, fragment, tensors)
    return flat


def flatten_into(flat: torch.Tensor, fragment: Fragment, tensors: Mapping[str, torch.Tensor]) -> None:
    """The same into a float32 vector of the fragment's size, on any device."""
    for slot in fragment.tensors:
        flat[slot.start : slot.start + slot.num_elements].copy_(_piece(slot, tensors[slot.name].detach()).reshape(-1))
    pack_buffers(fragment, buffers_behind(fragment, flat), tensors)


@torch.no_grad()
def unflatten(fragment: Fragment, flat: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a vector into the fragment's tensors, in place, on whatever device and dtype they have."""
    for slot in fragment.tensors:
        values = flat[slot.start : slot.start + slot.num_elements].view(slot.piece_shape)
        _piece(slot, tensors[slot.name]).copy_(values)
    for slot, values in unpack_buffers(fragment, buffers_behind(fragment, flat)):
        tensors[slot.name].copy_(values)


def buffers_behind(fragment: Fragment, flat: torch.Tensor) -> torch.Tensor:
    """The bytes of the fragment's buffers in its vector."""
    return flat[fragment.num_parameters :].view(torch.uint8)


def pack_buffers(fragment: Fragment, packed: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Into [buffer_bytes] bytes."""
    for slot in fragment.buffers:
        data = tensors[slot.name].detach().reshape(-1).contiguous().view(torch.uint8)
        room = packed[slot.start : slot.start + room_of(slot)]
        room[: data.numel()].copy_(data)
        room[data.numel() :] = 0


def unpack_buffers(fragment: Fragment, packed: torch.Tensor) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
    """Each with its values, in memory of their own."""
    for slot in fragment.buffers:
        end = slot.start + slot.num_elements * BUFFER_BYTES[slot.dtype]
        dtype: torch.dtype = getattr(torch, slot.dtype)
        yield slot, packed[slot.start : end].clone().view(dtype).view(slot.shape)


def _piece(slot: TensorSlot, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a tensor that lie in the fragment, as a view."""
    return tensor if slot.rows is None else tensor[slot.rows[0] : slot.rows[1]]


def bare_name(name: str) -> str:
    """Without the attributes of wrappers. `module`, DDP's, is an attribute of many models too: `bare_parameters` tells
    them apart."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED_AS)


def bare_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every parameter once, by its bare name, in the model's order."""
    return {bare_name(name): parameter for name, parameter in bare_model(model).named_parameters()}


def bare_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and every buffer that a checkpoint holds, as they are now: code may put another tensor in a
    buffer's place."""
    return {**persistent_buffers(model), **bare_parameters(model)}


def bare_model(model: torch.nn.Module) -> torch.nn.Module:
    """What compile and DDP wrap as a whole, one around the other in any order."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
    return bare_model(inner) if isinstance(inner, torch.nn.Module) else model
