"""How a fragment's flat float32 vector travels.

| codec | bits per parameter | one value's error                                                                  |
|-------|--------------------|------------------------------------------------------------------------------------|
| fp32  | 32                 | none                                                                               |
| bf16  | 16                 | rounding to 8 bits of mantissa: at most 2^-8 of the value                          |
| int8  | 8 + 32/256 = 8.125 | at most half a step; a step is absmax / 127 of the block of 256                    |
| int4  | 4 + 16/64 = 4.25   | at most half a step and 2^-8 of absmax; a step is absmax / 7 of the block of 64    |

Bits count the scales. All round to the nearest (ties to even), so encoding is deterministic and odd: -x becomes minus
what x becomes. It is unbiased over values that are spread over many steps, and biased for any single value: what is
below half a step is always lost, round after round, unless error feedback carries it over.

Callers see to it that values are finite. What is not finite never arrives as something finite: at least the value
itself becomes NaN or infinite, at most its block does. int4 can do the same to values above 3.3e38. Blocks whose
step is below float32's normal range (absmax under 1.5e-36 for int8, 8.3e-38 for int4) become zeros.

Encoding and decoding go through `CHUNK` elements at a time, in buffers that stay in the cache: temporaries of a
fragment's size would cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from diloco_cli.algorithm import blockwise
from diloco_cli.algorithm.blockwise import CHUNK
from diloco_cli.algorithm.payload import Blank, Spec, views
from diloco_cli.errors import UsageError

Tensors = dict[str, torch.Tensor]
Read = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Codec:
    """Encodes [n] float32 into named tensors and back. Deterministic.

    `reader(tensors)` gives read(start, room), which decodes room.numel() elements from `start` on: into `room`, unless
    they lie somewhere as float32 already; `start` is a multiple of CHUNK, `room` holds CHUNK elements or all that are
    left. What is returned is for reading.
    """

    name: str
    bits: float
    spec: Callable[[int], Spec]
    encode_into: Callable[[torch.Tensor, Tensors], object]
    reader: Callable[[Tensors], Read]

    def encode(self, values: torch.Tensor) -> Tensors:
        """[n] float32 -> the tensors of the spec."""
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in self.spec(values.numel()).items()}
        self.encode_into(values, tensors)
        return tensors

    def decode(self, tensors: Tensors, out: torch.Tensor) -> None:
        """All of it into `out` [n] float32."""
        read = self.reader(tensors)
        for start in range(0, out.numel(), CHUNK):
            room = out[start : start + CHUNK]
            found = read(start, room)
            if found.data_ptr() != room.data_ptr():
                room.copy_(found)

    def to_bytes(self, values: torch.Tensor) -> bytes:
        """[n] float32 on the CPU -> payload."""
        blank = Blank(self.spec(values.numel()))
        self.encode_into(values, blank.tensors)
        return blank.seal()

    def from_bytes(self, data: bytes, num_elements: int) -> torch.Tensor:
        """Payload -> [n] float32. Raises PayloadError if it is not a payload of this codec and length."""
        values = torch.empty(num_elements, dtype=torch.float32)
        self.decode(views(data, self.spec(num_elements)), values)
        return values


def _plain(name: str, dtype: torch.dtype) -> Codec:
    def reader(tensors: Tensors) -> Read:
        values = tensors["values"]
        if dtype == torch.float32:
            return lambda start, room: values[start : start + room.numel()]
        return lambda start, room: room.copy_(values[start : start + room.numel()])

    return Codec(
        name=name,
        bits=dtype.itemsize * 8,
        spec=lambda n: {"values": (dtype, (n,))},
        encode_into=lambda values, tensors: tensors["values"].copy_(values),
        reader=reader,
    )


CODECS: dict[str, Codec] = {
    "fp32": _plain("fp32", torch.float32),
    "bf16": _plain("bf16", torch.bfloat16),
    "int8": Codec(
        name="int8",
        bits=8 + 32 / blockwise.INT8_BLOCK,
        spec=blockwise.int8_spec,
        encode_into=blockwise.int8_encode,
        reader=blockwise.int8_reader,
    ),
    "int4": Codec(
        name="int4",
        bits=4 + 16 / blockwise.INT4_BLOCK,
        spec=blockwise.int4_spec,
        encode_into=blockwise.int4_encode,
        reader=blockwise.int4_reader,
    ),
}


def codec(name: str) -> Codec:
    try:
        return CODECS[name]
    except KeyError:
        raise UsageError(f"unknown codec {name!r}; allowed: {', '.join(CODECS)}") from None
