"""Tokens drawn one after the other from a model's logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_cli.inference.causal import Causal, finite


@dataclass(frozen=True)
class Draw:
    """How a token is chosen. `temperature` 0: the most likely one; `top_k` 0: among all."""

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 0


def sample(model: Causal, prompt: list[int], count: int, draw: Draw, allowed: int | None = None) -> Iterator[int]:
    """`count` tokens after a prompt of at least one, each below `allowed`; the same for the same seed, on any device up
    to rounding. The model sees the newest `context` tokens."""
    generator = torch.Generator().manual_seed(draw.seed)
    tokens = list(prompt)
    for _ in range(count):
        last = model.logits([tokens[-model.context :]])[0, -1, :allowed]
        tokens.append(choose(finite(last), draw, generator))
        yield tokens[-1]


def choose(logits: Tensor, draw: Draw, generator: torch.Generator) -> int:
    """Logits [vocabulary] -> a token."""
    if draw.temperature == 0:
        return int(logits.argmax())
    if 0 < draw.top_k < logits.numel():
        least = logits.topk(draw.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    chances = ((logits - logits.max()).double() / draw.temperature).softmax(dim=-1)  # also at the least temperature
    return int(torch.multinomial(chances, 1, generator=generator))
