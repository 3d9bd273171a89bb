"""The model of an island of several ranks: sharded by FSDP2, or a copy on each rank.

A sharded model is built without memory. Its parameters come from the run's committed versions, and only what these do
not hold, buffers and frozen parameters, comes from the model's own constructor (constructed.py): rank 0 runs it on the
host, and sends those tensors to the others. So no rank ever holds the whole model on its device.
"""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import UsageError
from diloco_cli.tasks.build import build_model
from diloco_cli.tasks.models import blocks_of, check_sharded
from diloco_cli.tasks.weights import check_frozen
from diloco_cli.training.constructed import Name, constructed
from diloco_cli.training.inner import runs_in_bf16
from diloco_cli.training.shards import local, rows_of


def copied_model(settings: RunSettings, device: torch.device) -> nn.Module:
    """The whole model on every rank; DDP adds up the gradients while they are computed."""
    model = build_model(settings)
    check_frozen(settings, model)
    refuse_training_buffers(model)
    model.to(device)
    _give_gradients(model, list(model.modules()))
    with warnings.catch_warnings():  # newer torch has another name for it
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def sharded_model(model: nn.Module, settings: RunSettings, device: torch.device) -> nn.Module:
    """`model`, which was built on meta, with its tensors divided by rows over the ranks. Values of trained ones are
    still to be written."""
    refuse_training_buffers(model)
    check_sharded(model)
    _refuse_scalars(model)
    missing = _without_values(model)
    _shard(model, settings, device)
    _give_memory(model, device)
    if missing:
        _fill(model, missing, settings, device)
    return model.to(device)


def refuse_training_buffers(model: nn.Module) -> None:
    """Raises UsageError for a model whose buffers change while it trains: each rank would have its own."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            raise UsageError(
                f"{name or 'the model'} keeps running statistics, which would differ from rank to rank",
                where="model",
                hint="use LayerNorm, GroupNorm or track_running_stats=False; or ranks: 1 in inventory.yaml",
            )


def _refuse_scalars(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise UsageError(
                f"{name} is a scalar, which cannot be divided over ranks",
                where="model",
                hint="give it the shape [1], or --set train.sharding=ddp",
            )


def _shard(model: nn.Module, settings: RunSettings, device: torch.device) -> None:
    """Block by block, so that one block's whole parameters are on a device at a time. On CUDA they are gathered in the
    type that autocast gives their matrix products; what lies around them, and all sums of gradients, stay float32. On
    a CPU blocks stay so, too: its norms take values and weights of one type only."""
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:
        raise UsageError(
            f"sharded ranks need torch 2.6 or newer; here is {torch.__version__}",
            hint="install it on every node, or --set train.sharding=ddp",
        ) from None

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    half = torch.bfloat16 if device.type == "cuda" and runs_in_bf16(settings.train.precision, device) else None
    policy = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=None if half is None else torch.float32, cast_forward_inputs=False
    )
    blocks = blocks_of(model)
    for block in blocks:
        _give_gradients(block, list(block.modules()))
        fully_shard(block, mesh=mesh, mp_policy=policy)
    inside = {id(module) for block in blocks for module in block.modules()}
    _give_gradients(model, [module for module in model.modules() if id(module) not in inside])
    fully_shard(model, mesh=mesh)


class _WithGradients(torch.autograd.Function):
    """Its first argument as it is, and a gradient of zeros for the others."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return values.detach()  # a view that a function made may not be changed in place: x = block(x); x += y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=on).expand(shape) for shape, dtype, on in ctx.like)
        return gradient, *zeros


def _give_gradients(part: nn.Module, modules: list[nn.Module]) -> None:
    """To every trained parameter of these modules whenever `part` is computed back, of zeros if it was not used.

    Ranks may use different parameters in a step: of experts, by their own tokens. FSDP2 adds up, of each part that it
    gathers, the gradients that a rank has, and would silently add up unlike ones; DDP would wait for those that never
    come. Unlike on one device, a parameter that no rank uses has a gradient, too: its weight decays."""
    forward = part.forward

    def with_gradients(*args: Any, **named: Any) -> Any:
        found = forward(*args, **named)
        leaves, structure = tree_flatten(found)
        at = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)
        if at is not None:
            own = [p for module in modules for p in module.parameters(recurse=False) if p.requires_grad]
            leaves[at] = _WithGradients.apply(leaves[at], *own)  # type: ignore[no-untyped-call]
        return tree_unflatten(leaves, structure)

    part.forward = with_gradients


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """To every sharded parameter that has none, its values unknown. Tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]


def _without_values(model: nn.Module) -> list[Name]:
    """The tensors that no committed version holds and that were built on meta: buffers, frozen parameters, and tensors
    that a module keeps as plain attributes."""
    found = []
    for module_name, module in model.named_modules():
        frozen = ((name, p) for name, p in module._parameters.items() if p is not None and not p.requires_grad)
        for name, tensor in chain(frozen, module._buffers.items(), vars(module).items()):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                found.append((module_name, name))
    return found


def _fill(model: nn.Module, missing: list[Name], settings: RunSettings, device: torch.device) -> None:
    """Each of these tensors as the model's own constructor makes it."""
    frozen = any(name in model.get_submodule(module)._parameters for module, name in missing)
    made = constructed(settings, missing, frozen) if distributed.get_rank() == 0 else [None] * len(missing)
    for (module_name, name), tensor in zip(missing, made, strict=True):
        module = model.get_submodule(module_name)
        found = getattr(module, name)
        value = torch.empty(found.shape, dtype=found.dtype, device=device)
        if tensor is not None:
            value.copy_(tensor)
        distributed.broadcast(value.view(-1).view(torch.uint8), 0)  # gloo has no bool
        if name in module._parameters:
            first, end = rows_of(len(value), distributed.get_rank(), distributed.get_world_size())
            local(found).copy_(value[first:end])
        elif name in module._buffers:
            module._buffers[name] = value
        else:
            setattr(module, name, value)
