"""A codec of two bits for this study alone: what deltas of a quarter of int8's size would cost.

A value becomes -1.5, -.5, .5 or 1.5 steps; a step is the root mean square of its block of 64 (bfloat16). The best
uniform step for normally distributed values is .996 of their standard deviation (J. Max, Quantizing for minimum
distortion, 1960). What lies beyond 1.5 steps is cut, so it needs error feedback. 2 + 16/64 = 2.25 bits a parameter.
"""

from __future__ import annotations

import torch

from diloco_cli.methods import CODECS, CodecRecord
from diloco_cli.tensors.codecs import Codec, Read, Tensors
from diloco_cli.tensors.payload import Spec

NAME = "int2"
BLOCK, A_BYTE = 64, 4
SHIFTS = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)


def register() -> str:
    """Its name, which every process of a trial must have made known to the product's own codecs."""
    CODECS.setdefault(NAME, CodecRecord(2 + 16 / BLOCK, "this study's", "methods.two_bits:INT2"))
    return NAME


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _spec(n: int) -> Spec:
    return {"scales": (torch.bfloat16, (_blocks(n),)), "packed": (torch.uint8, (_blocks(n) * BLOCK // A_BYTE,))}


def _encode(n: int, read: Read, tensors: Tensors) -> None:
    """A block with a value that is not finite becomes NaN or infinite."""
    rows = torch.zeros(_blocks(n) * BLOCK)
    rows[:n] = read(0, torch.empty(n))
    rows = rows.view(-1, BLOCK)
    counts = torch.full((len(rows),), float(BLOCK))
    counts[-1] -= len(rows) * BLOCK - n
    steps = tensors["scales"].copy_((rows.square().sum(dim=1) / counts).sqrt()).float()[:, None]
    levels = (rows / steps.where(steps > 0, 1.0)).add_(2.0).floor_().clamp_(0, 3).to(torch.uint8)
    tensors["packed"].copy_((levels.view(-1, A_BYTE) << SHIFTS).sum(dim=1, dtype=torch.uint8))


def _reader(tensors: Tensors) -> Read:
    levels = (tensors["packed"][:, None] >> SHIFTS & 3).view(-1, BLOCK)
    values = ((levels - 1.5) * tensors["scales"].float()[:, None]).view(-1)
    return lambda start, room: room.copy_(values[start : start + room.numel()])


INT2 = Codec(_spec, _encode, _reader)
