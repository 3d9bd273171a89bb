"""A delta's payload: the delta in the upload codec, and the norms of the decoded delta.

The norms (float32, one per fragment, tensor or row, as the merge needs them) let a syncer merge by RDA in one pass over
the payloads. They count only for a delta against the current version, and a syncer checks them while it merges. A
payload without them is complete too: then the syncer measures them.
"""

from __future__ import annotations

import numpy as np
import torch

from diloco_cli.config.settings import SyncSettings
from diloco_cli.layout import Fragment, Layout
from diloco_cli.tensors.codecs import Codec, Read, codec, reader_of
from diloco_cli.tensors.merge import cut_of
from diloco_cli.tensors.norms import Norms, measured_norms
from diloco_cli.tensors.payload import Blank, PayloadError, Spec, views


class DeltaFormat:
    """The payloads of one fragment's deltas."""

    def __init__(self, codec: Codec, fragment: Fragment, sync: SyncSettings) -> None:
        self.codec, self.cut = codec, cut_of(fragment, sync)
        self._with_norms: Spec = {
            "norms": (torch.float32, (self.cut.num_norms,)),
            **codec.spec(self.cut.size),
        }

    def encode(self, delta: torch.Tensor) -> bytes:
        """[n] float32 -> payload."""
        return self.encode_blocks(reader_of(delta))

    def encode_blocks(self, read: Read) -> bytes:
        """The payload of a delta that is read block by block, and never whole in memory."""
        blank = Blank(self._with_norms)
        self.codec.encode_into(self.cut.size, read, blank.tensors)
        norms = torch.from_numpy(measured_norms(self.cut, self.codec.reader(blank.tensors)))
        blank.tensors["norms"].copy_(norms)
        return blank.seal()

    def open(self, payload: bytes | memoryview) -> tuple[Read, Norms | None]:
        """A function that reads the delta chunk by chunk, and the norms that the payload claims. Raises PayloadError if
        it is not a payload of this codec and fragment."""
        try:
            tensors = views(payload, self._with_norms)
        except PayloadError:
            return self.codec.reader(views(payload, self.codec.spec(self.cut.size))), None
        return self.codec.reader(tensors), tensors["norms"].numpy().astype(np.float64)


def difference(base: torch.Tensor, values: torch.Tensor) -> Read:
    """base - values, both [n] float32, chunk by chunk."""
    return lambda start, room: torch.sub(
        base[start : start + room.numel()], values[start : start + room.numel()], out=room
    )


def delta_formats(layout: Layout, sync: SyncSettings) -> list[DeltaFormat]:
    """One per fragment."""
    return [DeltaFormat(codec(sync.codec), fragment, sync) for fragment in layout.fragments]


def anchored_anew(delta: Read, base: Read, current: torch.Tensor) -> Read:
    """A delta from an older base, relative to the current version: delta + (current - base), chunk by chunk."""

    def read(start: int, room: torch.Tensor) -> torch.Tensor:
        own = torch.empty_like(room)
        moved = torch.sub(current[start : start + room.numel()], base(start, own), out=own)
        return torch.add(delta(start, room), moved, out=room)

    return read
