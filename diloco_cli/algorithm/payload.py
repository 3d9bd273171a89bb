"""Tensors as bytes and back: valid safetensors, written as header + raw blocks.

Readers know every name, type and shape in advance, so a payload's header must equal the expected header byte for byte:
nothing that a stranger writes there is ever interpreted.
"""

from __future__ import annotations

import json

import torch

from diloco_cli.errors import DataCheckError

DTYPES: dict[torch.dtype, str] = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8", torch.int64: "I64",
}  # fmt: skip
Spec = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class PayloadError(DataCheckError):
    """A payload is not what the layout says it must be."""

    code = "payload"


def header_bytes(spec: Spec) -> bytes:
    """The safetensors header (8-byte length, JSON padded to 8 bytes) of tensors laid out in the given order."""
    entries: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in spec.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def to_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    """Contiguous CPU tensors to safetensors bytes, in the order of the dictionary."""
    spec: Spec = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return b"".join([header_bytes(spec), *(_raw(tensor) for tensor in tensors.values())])


def from_bytes(data: bytes, spec: Spec) -> dict[str, torch.Tensor]:
    """The tensors of `spec`, in memory of their own. Raises PayloadError unless header and size are right."""
    header = header_bytes(spec)
    sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in spec.values()]
    if len(data) != len(header) + sum(sizes):
        raise PayloadError(f"{len(data)} bytes instead of {len(header) + sum(sizes)}")
    if data[: len(header)] != header:
        raise PayloadError("the header names other tensors, shapes or types than the layout")
    tensors, offset = {}, len(header)
    for (name, (dtype, shape)), size in zip(spec.items(), sizes, strict=True):
        block = bytearray(memoryview(data)[offset : offset + size])
        tensors[name] = torch.frombuffer(block, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        offset += size
    return tensors


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    raw: bytes = flat.view(torch.uint8).numpy().tobytes()
    return raw
