"""Merging deltas: weighted mean (Avg) and radial-directional averaging (RDA), arXiv 2604.21428, merge.

    Avg: delta = sum_m w_m delta_m / sum_m w_m
    RDA: delta = (sum_m w_m |delta_m| / sum_m w_m) * phi(sum_m w_m phi(delta_m) / sum_m w_m)
         phi(x) = x / |x|, phi(0) = 0

Learners' deltas are nearly orthogonal, so a plain mean of M equal norms shrinks like 1 / sqrt(M); RDA keeps the norm at
the weighted mean of norms. Where directions cancel, RDA falls back to Avg.

Inputs come in a fixed order; sums are float32 in that order, norms are accumulated in float64 and rounded once, so that
a replay gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from diloco_cli.layout import Fragment

MergeRule = Literal["rda", "avg"]
Granularity = Literal["fragment", "tensor", "row"]
TINY = torch.finfo(torch.float32).tiny  # shorter deltas count as zero: 1 / norm would not be finite
CANCELLED = 1e-6  # a mean of unit directions shorter than this has no direction


@dataclass(frozen=True)
class Span:
    """A [rows, width] block of a fragment's flat vector; each row has a norm of its own."""

    start: int
    rows: int
    width: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The block as a [rows, width] view."""
        return flat[self.start : self.start + self.rows * self.width].view(self.rows, self.width)


def spans(fragment: Fragment, granularity: Granularity) -> list[Span]:
    """What one norm covers: the whole fragment, each tensor, or each row of a matrix (vectors stay whole)."""
    if granularity == "fragment":
        return [Span(0, 1, fragment.num_parameters)]
    found = []
    for tensor in fragment.tensors:
        by_row = granularity == "row" and len(tensor.shape) > 1
        rows = tensor.shape[0] if by_row else 1
        found.append(Span(tensor.start, rows, tensor.num_elements // rows))
    return found


def average(deltas: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Weighted mean of [n] float32 deltas. The weights' sum must be positive."""
    total = sum(weights)
    merged = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        merged.add_(delta, alpha=weight / total)
    return merged


def rda(deltas: list[torch.Tensor], weights: list[float], blocks: list[Span]) -> torch.Tensor:
    """Radial-directional average of [n] float32 deltas, norm by norm as `blocks` say."""
    total = sum(weights)
    merged = torch.zeros_like(deltas[0])
    for block in blocks:
        _rda_block([block.of(delta) for delta in deltas], [w / total for w in weights], block.of(merged))
    return merged


def _rda_block(deltas: list[torch.Tensor], shares: list[float], out: torch.Tensor) -> None:
    norms = [row_norms(delta) for delta in deltas]
    radius = torch.zeros_like(norms[0])
    for norm, share in zip(norms, shares, strict=True):
        radius.add_(norm, alpha=share)
    for delta, norm, share in zip(deltas, norms, shares, strict=True):
        scale = torch.where(norm > TINY, share / norm, 0.0).float()
        out.addcmul_(delta, scale[:, None])
    length = row_norms(out)
    cancelled = (length < CANCELLED) & (radius > 0)
    out.mul_(torch.where(length > TINY, radius / length, 0.0).float()[:, None])
    if bool(cancelled.any()):
        mean = torch.zeros_like(out)
        for delta, share in zip(deltas, shares, strict=True):
            mean.add_(delta, alpha=share)
        out[cancelled] = mean[cancelled]


def row_norms(block: torch.Tensor) -> torch.Tensor:
    """[rows, width] float32 -> [rows] float64."""
    norms: torch.Tensor = torch.linalg.vector_norm(block, dim=1, dtype=torch.float64)
    return norms


def merge(
    rule: MergeRule, granularity: Granularity, fragment: Fragment, deltas: list[torch.Tensor], weights: list[float]
) -> torch.Tensor:
    """One fragment's merged delta, [n] float32. Learners of weight 0 take no part."""
    used = [(delta, weight) for delta, weight in zip(deltas, weights, strict=True) if weight > 0]
    if not used:
        raise ValueError("nothing to merge: all weights are 0")
    kept, shares = [delta for delta, _ in used], [weight for _, weight in used]
    if rule == "avg":
        return average(kept, shares)
    return rda(kept, shares, spans(fragment, granularity))
