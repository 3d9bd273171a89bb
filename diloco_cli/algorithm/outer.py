"""Outer optimizers: how a merged delta moves the syncer's parameters. Delta is old minus new, so it is a gradient.

Nesterov (DiLoCo, arXiv 2311.08105; torch.optim.SGD with nesterov=True):
    buffer = momentum * buffer + delta;  parameters -= lr * (delta + momentum * buffer)
SGD:
    parameters -= lr * delta
"""

from __future__ import annotations

import torch

from diloco_cli.config.settings import OuterSettings


def outer_step(
    settings: OuterSettings, parameters: torch.Tensor, buffer: torch.Tensor, delta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """New ([n] parameters, [n] momentum buffer); the given tensors stay as they are."""
    if settings.name == "sgd":
        return parameters.add(delta, alpha=-settings.lr), buffer.clone()
    moved = buffer.mul(settings.momentum).add_(delta)
    step = delta.add(moved, alpha=settings.momentum)
    return parameters.add(step, alpha=-settings.lr), moved
