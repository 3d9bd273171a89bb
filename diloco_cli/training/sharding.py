"""The model of an island of several ranks: sharded by FSDP2, or a copy on each rank; and fragments over the shards.

A sharded model is built without memory. Its parameters come from the run's committed versions, and only what these do
not hold, buffers and frozen parameters, comes from the model's own constructor (`constructed`): rank 0 runs it on the
host, and sends those tensors to the others. So no rank ever holds the whole model on its device. Where buffers alone
are wanted, and they depend on neither parameters nor chance, parameters get no memory: filling them takes 4 bytes each
and a minute or more for each ten billion.

FSDP2 divides each tensor by rows: rank r of n has rows r*c to (r+1)*c, c = ceil(rows / n), so that the last ranks may
have fewer rows, or none. A fragment has whole tensors or rows of them. So what a rank has of a fragment is a few
extents of its flat vector, and no padding is ever sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import UsageError
from diloco_cli.layout import Fragment, Layout, buffer_names
from diloco_cli.tasks.build import build_model
from diloco_cli.tasks.models import blocks_of, check_sharded
from diloco_cli.tasks.weights import check_frozen
from diloco_cli.tensors.flat import flatten_into, unflatten
from diloco_cli.training.inner import runs_in_bf16

Tensors = Mapping[str, torch.Tensor]
Name = tuple[str, str]  # of a module, and of its attribute


def copied_model(settings: RunSettings, device: torch.device) -> nn.Module:
    """The whole model on every rank; DDP adds up the gradients while they are computed."""
    model = build_model(settings)
    check_frozen(settings, model)
    model.to(device)
    _give_gradients(model, list(model.modules()))
    with warnings.catch_warnings():  # newer torch has another name for it
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def sharded_model(model: nn.Module, settings: RunSettings, device: torch.device) -> nn.Module:
    """`model`, which was built on meta, with its tensors divided by rows over the ranks. Values of trained ones are
    still to be written."""
    check_sharded(model)
    _refuse_scalars(model)
    missing = _without_values(model)
    _shard(model, settings, device)
    _give_memory(model, device)
    if missing:
        _fill(model, missing, settings, device)
    return model.to(device)


def refuse_buffers(layout: Layout) -> None:
    """Raises UsageError for a model with buffers that training changes: each rank would have its own."""
    for name in sorted(buffer_names(layout)):
        raise UsageError(
            f"training changes the buffer {name}, which would differ from rank to rank",
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


@dataclass(frozen=True)
class Extent:
    """`size` elements of the tensor `name`: from `in_shard` on in the shard of its rank, from `start` on in the
    fragment."""

    name: str
    in_shard: int
    start: int
    size: int

    def of_shard(self, tensors: Tensors) -> torch.Tensor:
        """A view, [size]."""
        return local(tensors[self.name]).view(-1)[self.in_shard : self.in_shard + self.size]

    def of_fragment(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.size]


def rows_of(num_rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows [first, end) of a tensor on this rank."""
    share = -(-num_rows // ranks)
    return min(rank * share, num_rows), min((rank + 1) * share, num_rows)


def extents_of(fragment: Fragment, rank: int, ranks: int) -> list[Extent]:
    """What this rank has of the fragment, in the fragment's order."""
    extents = []
    for slot in fragment.tensors:
        width, (own, own_end) = prod(slot.shape[1:]), rows_of(slot.shape[0], rank, ranks)
        first, end = slot.rows or (0, slot.shape[0])
        low, high = max(first, own), min(end, own_end)
        if low < high and width:
            start = slot.start + (low - first) * width
            extents.append(Extent(slot.name, (low - own) * width, start, (high - low) * width))
    return extents


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, in the tensor's own memory; one that is whole as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Shards:
    """The fragments of a layout over `ranks` ranks, of which this one is `rank`. All ranks call the same methods in the
    same order. Unless `sharded`, every rank holds all tensors whole."""

    layout: Layout
    rank: int
    ranks: int
    device: torch.device
    sharded: bool

    def of(self, names: Collection[str]) -> Shards:
        """The same of these parameters alone."""
        fragments = []
        for fragment in self.layout.fragments:
            start, slots = 0, []
            for slot in fragment.tensors:
                if slot.name in names:
                    slots.append(replace(slot, start=start))
                    start += slot.num_elements
            fragments.append(replace(fragment, tensors=tuple(slots), buffers=()))
        return replace(self, layout=replace(self.layout, fragments=tuple(fragments)))

    def gather(self, fragment: int, tensors: Tensors) -> torch.Tensor | None:
        """On rank 0 the fragment's values, [n] float32 on the device; None on the others."""
        if self.rank:
            if self.sharded:
                self._exchange(distributed.isend, {0: self._packed(fragment, tensors)})
            return None
        slots = self.layout.fragments[fragment]
        flat = torch.empty(slots.num_parameters, device=self.device)
        if not self.sharded:
            flatten_into(flat, slots, tensors)
            return flat
        rooms = self._rooms(fragment)
        self._exchange(distributed.irecv, rooms)
        for rank, room in rooms.items():
            self._unpack(fragment, rank, room, lambda extent: extent.of_fragment(flat))
        for extent in self._extents[fragment][0]:
            extent.of_fragment(flat).copy_(extent.of_shard(tensors))
        return flat

    def scatter(self, fragment: int, flat: torch.Tensor | None, tensors: Tensors) -> None:
        """Write [n] float32 values, which rank 0 has on the device, into the tensors, wherever their rows are."""
        if not self.sharded:
            slots = self.layout.fragments[fragment]
            values = torch.empty(slots.num_parameters, device=self.device) if flat is None else flat
            distributed.broadcast(values, 0)
            unflatten(slots, values, tensors)
        elif flat is None:
            room = self._room(fragment, self.rank)
            self._exchange(distributed.irecv, {0: room})
            self._unpack(fragment, self.rank, room, lambda extent: extent.of_shard(tensors))
        else:
            extents = self._extents[fragment]
            rooms = self._rooms(fragment)
            for rank, room in rooms.items():
                torch.cat([extent.of_fragment(flat) for extent in extents[rank]], out=room)
            self._exchange(distributed.isend, rooms)
            for extent in extents[0]:
                extent.of_shard(tensors).copy_(extent.of_fragment(flat))

    @cached_property
    def _extents(self) -> list[list[list[Extent]]]:
        """By fragment and rank."""
        return [[extents_of(fragment, r, self.ranks) for r in range(self.ranks)] for fragment in self.layout.fragments]

    def _room(self, fragment: int, rank: int) -> torch.Tensor:
        size = sum(extent.size for extent in self._extents[fragment][rank])
        return torch.empty(size, device=self.device)

    def _rooms(self, fragment: int) -> dict[int, torch.Tensor]:
        """For each other rank that has something of the fragment."""
        return {r: self._room(fragment, r) for r in range(1, self.ranks) if self._extents[fragment][r]}

    def _packed(self, fragment: int, tensors: Tensors) -> torch.Tensor:
        room = self._room(fragment, self.rank)
        at = 0
        for extent in self._extents[fragment][self.rank]:
            room[at : at + extent.size].copy_(extent.of_shard(tensors))
            at += extent.size
        return room

    def _unpack(self, fragment: int, rank: int, room: torch.Tensor, target: Callable[[Extent], torch.Tensor]) -> None:
        sizes = [extent.size for extent in self._extents[fragment][rank]]
        for extent, values in zip(self._extents[fragment][rank], torch.split(room, sizes), strict=True):
            target(extent).copy_(values)

    @staticmethod
    def _exchange(way: Callable[..., object], rooms: Mapping[int, torch.Tensor]) -> None:
        """`way`: isend or irecv, with each of these ranks; nothing where there is nothing to send."""
        operations: Sequence[distributed.P2POp] = [
            distributed.P2POp(way, room, rank) for rank, room in rooms.items() if room.numel()
        ]
        for work in distributed.batch_isend_irecv(list(operations)) if operations else ():
            work.wait()


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
