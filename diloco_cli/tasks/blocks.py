"""A model's blocks, and what is done block by block: activation checkpointing, compiling.

Blocks are the members of the model's nn.ModuleList objects, of outermost ones alone, that have parts of their own: the
layers of a transformer, but not its experts or a list of plain heads. Both change a block's `forward` in place. The
module tree and the names of parameters stay as they are, and a rank's sharding, which works in a module's hooks, lies
around both.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from diloco_cli.config.settings import TrainSettings
from diloco_cli.errors import UsageError
from diloco_cli.tensors.names import bare_model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """In the model's order; those of lists come before those further down."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    others = [child for child in model.children() if not isinstance(child, nn.ModuleList)]
    found = [block for blocks in lists for block in blocks if next(block.children(), None) is not None]
    return [*found, *(block for child in others for block in blocks_of(child))]


def divides(model: nn.Module) -> bool:
    """Whether it can be sharded block by block: it has blocks, and each parameter is used in one, or outside of all."""
    blocks = blocks_of(model)
    inside = [id(p) for block in blocks for p in block.parameters()]
    within = {id(module) for block in blocks for module in block.modules()}
    outside = {id(p) for m in model.modules() if id(m) not in within for p in m.parameters(recurse=False)}
    return bool(blocks) and len(set(inside)) == len(inside) and outside.isdisjoint(inside)


def check_sharded(model: nn.Module) -> None:
    """Raises UsageError for a model that every rank would hold as a whole."""
    if not divides(model):
        raise UsageError(
            f"{type(model).__name__} cannot be sharded block by block: it has no nn.ModuleList of modules with parts of"
            " their own, or two of them share a parameter",
            where="train.sharding",
            hint="keep the model's layers in an nn.ModuleList, or --set train.sharding=ddp",
        )


def check_blocks(model: nn.Module, train: TrainSettings) -> None:
    """Raises UsageError if there is nothing to checkpoint."""
    if train.checkpointing and not blocks_of(model):
        raise UsageError(
            f"{type(model).__name__} has no blocks whose activations could be computed again: no nn.ModuleList of "
            "modules with parts of their own",
            where="train.checkpointing",
            hint="keep the model's layers in an nn.ModuleList, or --set train.checkpointing=false",
        )


def prepare(model: nn.Module, train: TrainSettings) -> None:
    """As the settings say: the forward pass of each block is compiled (of the whole model, if it has none), at the
    first step, and its activations are computed again in the backward pass, with the same random draws."""
    check_blocks(model, train)
    blocks = blocks_of(model)
    if train.compile:
        for part in blocks or [bare_model(model)]:
            part.forward = torch.compile(part.forward)
    if train.checkpointing:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
