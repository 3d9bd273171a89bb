"""The models of this experiment and their data: small enough for dozens of runs on a laptop's cores."""

from __future__ import annotations

from functools import lru_cache

from torch import nn

from diloco_cli.config.models import GPTShape, MoEShape
from diloco_cli.tasks.build import Data

SEQUENCE = 64


def dense() -> nn.Module:
    """A GPT of 0.12 M parameters that reads 64 bytes."""
    from diloco_cli.tasks.models import build

    return build(GPTShape(layers=2, width=64, heads=2, sequence=SEQUENCE))


def moe() -> nn.Module:
    """The same with four experts of half the MLP's width in each layer, two of them for each byte."""
    from diloco_cli.tasks.models import build

    return build(
        MoEShape(layers=2, width=64, heads=2, sequence=SEQUENCE, experts=4, active_experts=2, expert_width=128)
    )


@lru_cache(maxsize=1)
def text(seed: int) -> Data:
    """The Python standard library, by bytes, in an order of its own for every seed; read once for trials in a row."""
    from diloco_cli.tasks.data import ByteText

    return ByteText(SEQUENCE, seed)
