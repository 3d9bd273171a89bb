"""How a fragment's flat float32 vector travels: fp32, bf16, or int8 with one scale per block.

| codec | bits per parameter, scales included | bias |
|-------|-------------------------------------|------|
| fp32  | 32                                  | none, exact |
| bf16  | 16                                  | rounds to nearest even |
| int8  | 8 + 32/256 = 8.125                  | rounds to nearest even; absmax / 127 per block of 256 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from diloco_cli.algorithm.payload import Spec, from_bytes, to_bytes
from diloco_cli.errors import UsageError

INT8_BLOCK = 256
CHUNK = 1 << 16  # elements worked on at once: temporaries stay in the cache


@dataclass(frozen=True)
class Codec:
    """Encodes [n] float32 into named tensors and back. Deterministic."""

    name: str
    bits: float
    spec: Callable[[int], Spec]
    encode: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    decode: Callable[[dict[str, torch.Tensor], torch.Tensor], object]

    def to_bytes(self, values: torch.Tensor) -> bytes:
        """[n] float32 on the CPU -> payload."""
        return to_bytes(self.encode(values))

    def from_bytes(self, data: bytes, num_elements: int) -> torch.Tensor:
        """Payload -> [n] float32. Raises PayloadError if it is not a payload of this codec and length."""
        values = torch.empty(num_elements, dtype=torch.float32)
        self.decode(from_bytes(data, self.spec(num_elements)), values)
        return values


def _plain(name: str, dtype: torch.dtype) -> Codec:
    return Codec(
        name=name,
        bits=dtype.itemsize * 8,
        spec=lambda n: {"values": (dtype, (n,))},
        encode=lambda values: {"values": values.to(dtype)},
        decode=lambda tensors, out: out.copy_(tensors["values"]),
    )


def _num_blocks(n: int) -> int:
    return -(-n // INT8_BLOCK)


def _int8_encode(values: torch.Tensor) -> dict[str, torch.Tensor]:
    n = values.numel()
    quantised = torch.empty(n, dtype=torch.int8)
    scales = torch.empty(_num_blocks(n), dtype=torch.float32)
    for start in range(0, n, CHUNK):
        _int8_chunk(values[start : start + CHUNK], quantised[start : start + CHUNK], scales[start // INT8_BLOCK :])
    return {"quantised": quantised, "scales": scales}


def _int8_chunk(values: torch.Tensor, quantised: torch.Tensor, scales: torch.Tensor) -> None:
    blocks = _num_blocks(values.numel())
    padded = values
    if values.numel() % INT8_BLOCK:
        padded = torch.zeros(blocks * INT8_BLOCK)
        padded[: values.numel()] = values
    rows = padded.view(blocks, INT8_BLOCK)
    scale = rows.abs().amax(dim=1).div_(127.0)
    scales[:blocks] = scale
    safe = torch.where(scale > 0, scale, 1.0)
    quantised.copy_((rows / safe[:, None]).round_().clamp_(-127, 127).view(-1)[: values.numel()])


def _int8_decode(tensors: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    quantised, scales = tensors["quantised"], tensors["scales"]
    n = out.numel()
    whole = n - n % INT8_BLOCK
    rows = out[:whole].view(-1, INT8_BLOCK)
    rows.copy_(quantised[:whole].view(-1, INT8_BLOCK))
    rows.mul_(scales[: rows.shape[0], None])
    if whole < n:
        out[whole:] = quantised[whole:].float() * scales[-1]


CODECS: dict[str, Codec] = {
    "fp32": _plain("fp32", torch.float32),
    "bf16": _plain("bf16", torch.bfloat16),
    "int8": Codec(
        name="int8",
        bits=8 + 32 / INT8_BLOCK,
        spec=lambda n: {"quantised": (torch.int8, (n,)), "scales": (torch.float32, (_num_blocks(n),))},
        encode=_int8_encode,
        decode=_int8_decode,
    ),
}


def codec(name: str) -> Codec:
    try:
        return CODECS[name]
    except KeyError:
        raise UsageError(f"unknown codec {name!r}; allowed: {', '.join(CODECS)}") from None
