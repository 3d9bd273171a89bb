"""How the buffers that training changes are exchanged: as they are, not as deltas, beside a fragment's parameters.

Running statistics are no parameters: no gradient moves them, so no outer step, clip or codec may. A payload and a
version hold their bytes in their own types, so that a counter is exact. Merged they become, by their type,

    floating point    the mean, by the weights of the deltas beside them
    integers          the maximum: a counter goes on from the island that has counted furthest
    others            those of the heaviest delta
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from diloco_cli.layout import Fragment
from diloco_cli.tensors.codecs import Codec, read_all, reader_of
from diloco_cli.tensors.flat import pack_buffers, unpack_buffers
from diloco_cli.tensors.payload import Blank, Spec, views

BUFFERS = "buffers"  # as payloads and versions name them


def buffers_spec(fragment: Fragment) -> Spec:
    """Nothing for a fragment without any, so that its objects are as if there were no buffers."""
    return {BUFFERS: (torch.uint8, (fragment.buffer_bytes,))} if fragment.buffers else {}


def vector_of(parameters: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The fragment's whole vector, of a payload's or a version's `tensors`."""
    return torch.cat([parameters, tensors[BUFFERS].view(torch.float32)]) if BUFFERS in tensors else parameters


def are_finite(fragment: Fragment, packed: torch.Tensor) -> bool:
    return all(bool(values.isfinite().all()) for _, values in unpack_buffers(fragment, packed))


def merge_buffers(
    fragment: Fragment, packed: Sequence[torch.Tensor], weights: Sequence[float], into: torch.Tensor
) -> None:
    """From the [buffer_bytes] bytes of each delta into those of the next version. The weights' sum must be positive."""
    total, heaviest = sum(weights), weights.index(max(weights))
    each = [{slot.name: values for slot, values in unpack_buffers(fragment, one)} for one in packed]
    used = [index for index, weight in enumerate(weights) if weight > 0]
    merged = {}
    for name, chosen in each[heaviest].items():
        if chosen.is_floating_point():
            base = chosen.double()  # what all agree on stays as it is, to the bit
            moves = [(each[index][name].double() - base) * (weights[index] / total) for index in used]
            merged[name] = (base + torch.stack(moves).sum(dim=0)).to(chosen.dtype)
        elif chosen.dtype == torch.bool:
            merged[name] = chosen
        else:
            merged[name] = torch.stack([each[index][name] for index in used]).amax(dim=0)
    pack_buffers(fragment, into, merged)


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
