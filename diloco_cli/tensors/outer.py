"""Outer optimizers: how a merged delta moves the syncer's parameters. Delta is old minus new, so it is a gradient.

Nesterov (DiLoCo, arXiv 2311.08105; torch.optim.SGD with nesterov=True):
    buffer = momentum * buffer + delta;  parameters -= lr * (delta + momentum * buffer)
SGD:
    parameters -= lr * delta
"""

from __future__ import annotations

from math import isfinite

import torch

from diloco_cli.config.settings import OuterSettings
from diloco_cli.tensors.codecs import CHUNK
from diloco_cli.tensors.merge import Merging

Pair = tuple[torch.Tensor, torch.Tensor]


def outer_step(
    settings: OuterSettings, parameters: torch.Tensor, buffer: torch.Tensor, delta: torch.Tensor,
    new_parameters: torch.Tensor, new_buffer: torch.Tensor,
) -> None:  # fmt: skip
    """[n] parameters and momentum buffer into new ones, without temporaries; `delta` is used up."""
    if settings.name == "sgd":
        new_buffer.copy_(buffer)
    else:
        torch.mul(buffer, settings.momentum, out=new_buffer).add_(delta)
        delta.add_(new_buffer, alpha=settings.momentum)
    torch.add(parameters, delta, alpha=-settings.lr, out=new_parameters)


def apply_merge(settings: OuterSettings, merging: Merging, before: Pair, after: Pair) -> bool:
    """Merge and step chunk by chunk, from (parameters, momentum buffer) of [n] into others; whether all that came out
    is finite. What came out is void if `merging.unsound` says so."""
    finite = True
    for start, delta in merging.chunks(after[1]):
        chunk = slice(start, start + CHUNK)
        moved = (after[0][chunk], after[1][chunk])
        outer_step(settings, before[0][chunk], before[1][chunk], delta, *moved)
        finite = finite and _finite(moved[0])  # a buffer that is not finite makes parameters that are not
    return finite


def _finite(chunk: torch.Tensor) -> bool:
    """By its sum: much faster than looking at each value. A float32 sum may overflow, so then again in float64."""
    return isfinite(float(chunk.sum())) or isfinite(float(chunk.sum(dtype=torch.float64)))
