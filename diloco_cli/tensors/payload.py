"""Tensors as bytes and back: valid safetensors, written as header + raw blocks.

Readers know every name, type and shape in advance, so a payload's header must equal the expected header byte for byte:
header bytes from the bucket are never parsed.
"""

from __future__ import annotations

import io
import json
import warnings

import torch

from diloco_cli.errors import DataCheckError

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.bool: "BOOL",
}
Spec = dict[str, tuple[torch.dtype, tuple[int, ...]]]

with warnings.catch_warnings():  # torch says once a process that views of bytes must not be written to
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class PayloadError(DataCheckError):
    """A payload is not what the layout says it must be."""

    code = "payload"


def header_bytes(spec: Spec, metadata: dict[str, str] | None = None) -> bytes:
    """The safetensors header (8-byte length, JSON padded to 8 bytes) of tensors laid out in the given order. Payloads
    have no metadata."""
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in spec.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def to_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    """CPU tensors to safetensors bytes, in the order of the dictionary; copied once."""
    blank = Blank({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        blank.tensors[name].copy_(tensor.detach())
    return blank.seal()


class Blank:
    """A payload under construction: `tensors` of a spec, all zero, to be filled in place. So a payload takes only its
    own memory and is not copied (unless one of the tensors is still referenced when it is sealed)."""

    def __init__(self, spec: Spec) -> None:
        header = header_bytes(spec)
        self._file = io.BytesIO(bytes(len(header) + sum(_sizes(spec))))  # no copy: no other reference
        room = self._file.getbuffer()
        room[: len(header)] = header
        self.tensors = _views(room, spec, len(header))

    def seal(self) -> bytes:
        """The bytes, once all tensors are filled; they are not to be written to any more."""
        self.tensors = {}
        return self._file.getvalue()


def views(data: bytes | memoryview, spec: Spec) -> dict[str, torch.Tensor]:
    """The tensors of `spec` as they lie in `data`: nothing is copied, and nothing may be written to them. They keep
    `data` alive. Raises PayloadError unless header and size are right."""
    header = header_bytes(spec)
    size = len(header) + sum(_sizes(spec))
    if len(data) != size:
        raise PayloadError(f"{len(data)} bytes instead of {size}")
    if data[: len(header)] != header:
        raise PayloadError("the header names other tensors, shapes or types than the layout")
    return _views(data, spec, len(header))


def from_bytes(data: bytes, spec: Spec) -> dict[str, torch.Tensor]:
    """The tensors of `spec`, in memory of their own. Raises PayloadError unless header and size are right."""
    return {name: tensor.clone() for name, tensor in views(data, spec).items()}


def _sizes(spec: Spec) -> list[int]:
    return [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in spec.values()]


def _views(data: bytes | memoryview, spec: Spec, offset: int) -> dict[str, torch.Tensor]:
    """The tensors of `spec` as they lie in `data` from `offset` on."""
    tensors = {}
    for (name, (dtype, shape)), size in zip(spec.items(), _sizes(spec), strict=True):
        count = size // dtype.itemsize
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(shape)
        offset += size
    return tensors
