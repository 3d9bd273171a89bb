"""How the buffers that training changes are exchanged: as they are, not as deltas, beside a fragment's parameters.

Running statistics are no parameters: no gradient moves them, so no outer step, clip or codec may. A payload and a
version hold their bytes in their own types, so that a counter is exact. Merged they become, by their kind,

    floating point         the mean, by the weights of the deltas beside them
    one integer            the maximum: a counter goes on from the island that has counted furthest
    more integers, bool    those of the heaviest delta

What moves parameters is bounded, so this is too. Beside a delta that is clipped they do not count. A mean leaves out
who moves one of a buffer's values more than `APART` times as far as the median of at least three who move the buffer
moves any, or of as many times more tokens; between fewer nobody can tell. A counter rises by no more than the tokens
that are believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median_low

import torch

from diloco_cli.layout import Fragment
from diloco_cli.tensors.codecs import Codec, read_all, reader_of
from diloco_cli.tensors.flat import pack_buffers, unpack_buffers
from diloco_cli.tensors.payload import Blank, Spec, views

BUFFERS = "buffers"  # as payloads and versions name them
APART = 10.0  # chance and unequal rounds stay far below it


@dataclass(frozen=True)
class BuffersOffer:
    """The [buffer_bytes] bytes beside a delta, its weight and scale, and how many of its tokens are believed."""

    packed: torch.Tensor
    weight: float
    scale: float
    believed: int


def buffers_spec(fragment: Fragment) -> Spec:
    """Nothing for a fragment without any, so that its objects are as if there were no buffers."""
    return {BUFFERS: (torch.uint8, (fragment.buffer_bytes,))} if fragment.buffers else {}


def vector_of(parameters: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The fragment's whole vector, of a payload's or a version's `tensors`."""
    return torch.cat([parameters, tensors[BUFFERS].view(torch.float32)]) if BUFFERS in tensors else parameters


def are_finite(fragment: Fragment, packed: torch.Tensor) -> bool:
    return all(bool(values.isfinite().all()) for _, values in unpack_buffers(fragment, packed))


def merge_buffers(
    fragment: Fragment, current: torch.Tensor, offers: Sequence[BuffersOffer], into: torch.Tensor
) -> None:
    """From the [buffer_bytes] bytes of the `current` version and of the offers into those of the next version."""
    counted = [offer for offer in offers if offer.weight > 0 and offer.scale >= 1]
    each = [{slot.name: values for slot, values in unpack_buffers(fragment, offer.packed)} for offer in counted]
    weights, merged = [offer.weight for offer in counted], {}
    for slot, before in unpack_buffers(fragment, current):
        found = [one[slot.name] for one in each]
        if not found:
            merged[slot.name] = before
        elif before.is_floating_point():
            merged[slot.name] = _mean(before, found, counted)
        elif before.dim() or before.dtype == torch.bool:
            merged[slot.name] = found[weights.index(max(weights))]
        else:
            most = [int(before) + offer.believed for offer in counted]
            merged[slot.name] = torch.tensor(max(map(min, most, map(int, found))), dtype=before.dtype)
    pack_buffers(fragment, into, merged)


def _mean(before: torch.Tensor, found: Sequence[torch.Tensor], offers: Sequence[BuffersOffer]) -> torch.Tensor:
    if not before.numel():
        return before
    moves = [float((one.double() - before.double()).abs().max()) for one in found]  # exact on any number of threads
    movers = [(move, offer.believed) for move, offer in zip(moves, offers, strict=True) if move > 0]
    usual, tokens = map(median_low, zip(*movers, strict=True)) if len(movers) > 2 else (inf, 1)
    weights, more = [offer.weight for offer in offers], [max(1.0, offer.believed / max(1, tokens)) for offer in offers]
    fit = [index for index, move in enumerate(moves) if move <= APART * usual * more[index]]
    total, heaviest = sum(weights[index] for index in fit), max(fit, key=lambda index: weights[index])
    base = found[heaviest].double()  # what all agree on stays as it is, to the bit
    steps = [(found[index].double() - base) * (weights[index] / total) for index in fit]
    return (base + torch.stack(steps).sum(dim=0)).to(before.dtype)


class WeightsFormat:
    """What learners download of one fragment: its parameters in a codec, and its buffers."""

    def __init__(self, codec: Codec, fragment: Fragment) -> None:
        self._codec, self._fragment = codec, fragment
        self.spec: Spec = {**buffers_spec(fragment), **codec.spec(fragment.num_parameters)}

    def to_bytes(self, version: dict[str, torch.Tensor]) -> bytes:
        """Of the tensors of a state."""
        values, blank = version["parameters"], Blank(self.spec)
        self._codec.encode_into(values.numel(), reader_of(values), blank.tensors)
        if BUFFERS in self.spec:
            blank.tensors[BUFFERS].copy_(version[BUFFERS])
        return blank.seal()

    def from_bytes(self, data: bytes) -> torch.Tensor:
        """The fragment's vector, for reading only. Raises PayloadError if it is not a payload of this format."""
        count = self._fragment.num_parameters
        if BUFFERS not in self.spec:
            return self._codec.from_bytes(data, count)
        tensors = views(data, self.spec)
        return vector_of(read_all(count, self._codec.reader(tensors)), tensors)
