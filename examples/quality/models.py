"""The three models of this experiment and their data: small enough for dozens of runs on a laptop's cores."""

from __future__ import annotations

from functools import lru_cache

from torch import nn

from diloco_cli.config.models import GPTShape, MoEShape, ViTShape
from diloco_cli.tasks.build import Data

LAYERS, WIDTH, HEADS = 2, 64, 2
TEXT_SEQUENCE = 64
EXPERTS, ACTIVE_EXPERTS, EXPERT_WIDTH = 4, 2, 128


def dense() -> nn.Module:
    """A GPT of 0.12 M parameters that reads 64 bytes."""
    from diloco_cli.tasks.models import build

    return build(GPTShape(LAYERS, WIDTH, HEADS, TEXT_SEQUENCE))


def moe() -> nn.Module:
    """The same with four experts of half the MLP's width in each layer, two of them for each byte."""
    from diloco_cli.tasks.models import build

    return build(
        MoEShape(
            LAYERS, WIDTH, HEADS, TEXT_SEQUENCE,
            experts=EXPERTS, active_experts=ACTIVE_EXPERTS, expert_width=EXPERT_WIDTH,
        )
    )  # fmt: skip


def vision() -> nn.Module:
    """A vision transformer of 0.1 M parameters; an image of 8 x 8 pixels is 16 tokens."""
    from diloco_cli.tasks.models import build

    return build(ViTShape(LAYERS, WIDTH, HEADS))


@lru_cache(maxsize=1)
def text(seed: int) -> Data:
    """The Python standard library, by bytes, in an order of its own for every seed; read once for trials in a row."""
    from diloco_cli.tasks.data import ByteText

    return ByteText(TEXT_SEQUENCE, seed)


@lru_cache(maxsize=1)
def digits(seed: int) -> Data:
    """Scikit-learn's digits."""
    from diloco_cli.tasks.data import Digits

    return Digits(ViTShape(LAYERS, WIDTH, HEADS).sequence, seed)
