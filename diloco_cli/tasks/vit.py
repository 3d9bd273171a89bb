"""A small vision transformer (arXiv 2010.11929): patches in, mean over patches, a linear head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco_cli.config.presets import ViTShape
from diloco_cli.tasks.gpt import Block, initialise


class ViT(nn.Module):
    """Images [batch, side, side] float32 and classes [batch] int64 -> mean cross-entropy in nats per image."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.patch = shape.patch
        self.patch_in = nn.Linear(shape.patch**2, shape.width, bias=False)
        self.positions = nn.Parameter(torch.empty(shape.sequence, shape.width))
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads, causal=False) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.classes, bias=False)
        initialise(self, shape.layers)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(images).float(), classes)

    def logits(self, images: Tensor) -> Tensor:
        """[batch, side, side] -> [batch, classes]."""
        rows = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        x = self.patch_in(rows.flatten(3).flatten(1, 2)) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).mean(dim=1))
        return out


def build(shape: ViTShape) -> nn.Module:
    return ViT(shape)
