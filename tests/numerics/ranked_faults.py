"""Models that fail on one rank of several."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from tests.numerics.ranked import CountingText, gpt

text = CountingText


class FailingRank(nn.Module):
    """`how`: loss, gradient, memory or code."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.model, self.how = gpt(), how

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        if os.environ["RANK"] == "0":
            return loss
        match self.how:
            case "loss":
                return loss * float("nan")
            case "gradient":
                return loss + (0.0 * loss).sqrt()  # 0, and infinitely steep: 0 times infinity
            case "memory":
                raise torch.OutOfMemoryError("Tried to allocate 7.00 GiB")
        raise ValueError("this rank fails")


def loss() -> nn.Module:
    return FailingRank("loss")


def gradient() -> nn.Module:
    return FailingRank("gradient")


def memory() -> nn.Module:
    return FailingRank("memory")


def code() -> nn.Module:
    return FailingRank("code")
