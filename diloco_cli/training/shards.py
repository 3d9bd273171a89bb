"""Fragments and the shards of an island's ranks: which rank holds which elements, and how they meet on rank 0.

FSDP2 divides each tensor by rows: rank r of n has rows r*c to (r+1)*c, c = ceil(rows / n), so that the last ranks may
have fewer rows, or none. A fragment has whole tensors or rows of them. So what a rank has of a fragment is a few
extents of its flat vector, and no padding is ever sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from diloco_cli.layout import Fragment, Layout
from diloco_cli.tensors.flat import flatten_into, unflatten

Tensors = Mapping[str, torch.Tensor]


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
