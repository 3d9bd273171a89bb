"""The spans that norms cover, and how norms are measured chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from diloco_cli.layout import Fragment
from diloco_cli.tensors.codecs import BLOCK, CHUNK, Read, merged_block, over_blocks

Granularity = Literal["tensor", "row"]
Norms = npt.NDArray[np.float64]
PRECISE = 1e-4  # relative; two processors' float64 norms of the same values agree far better
QUICK = 5e-4  # float32 sums of a chunk are right to about 1e-5


@dataclass(frozen=True)
class Span:
    """A [rows, width] block of a fragment's flat vector; each row has a norm of its own."""

    start: int
    rows: int
    width: int


@dataclass(frozen=True)
class Piece:
    """The part of a span in one chunk or block: `rows` whole rows of `width`, or a part of one row. `start` counts from
    its beginning; its norms have the numbers from `first` on."""

    start: int
    rows: int
    width: int
    first: int

    def of(self, chunk: torch.Tensor) -> torch.Tensor:
        """[rows, width] view; [width] if it is one row or a part of one."""
        if self.rows == 1 and self.width == chunk.numel():
            return chunk  # the usual case: a view would cost as much as arithmetic on a chunk
        flat = chunk[self.start : self.start + self.rows * self.width]
        return flat if self.rows == 1 else flat.view(self.rows, self.width)


def spans(fragment: Fragment, granularity: Granularity) -> list[Span]:
    """The spans with one norm each: each tensor (or piece of one), or each row of a matrix (vectors stay whole)."""
    found = []
    for tensor in fragment.tensors:
        if tensor.num_elements == 0:
            continue
        by_row = granularity == "row" and len(tensor.shape) > 1
        rows = tensor.piece_shape[0] if by_row else 1
        found.append(Span(tensor.start, rows, tensor.num_elements // rows))
    return found


class Cut:
    """Spans that cover a fragment of `size` elements without a gap, cut into chunks for sums, blocks for merges.

    `block`: how many elements a merge works on at a time."""

    def __init__(self, covering: list[Span]) -> None:
        self.size = sum(span.rows * span.width for span in covering)
        self.num_norms = sum(span.rows for span in covering)
        self.firsts = np.cumsum([0] + [span.rows for span in covering[:-1]])
        self.sizes = np.array([float(span.rows * span.width) for span in covering])
        self.rows = np.array([span.rows for span in covering])
        self.chunks = _pieces(covering, self.size, CHUNK)
        self.block = merged_block(self.size)
        self._blocks = _pieces(covering, self.size, self.block)

    def pieces(self, start: int) -> list[Piece]:
        """Of the block that begins there."""
        return self._blocks[start // self.block]


def _pieces(covering: list[Span], size: int, length: int) -> list[list[Piece]]:
    """Of each part of `length` elements of the fragment."""
    parts: list[list[Piece]] = [[] for _ in range(-(-size // length))]
    first = 0
    for span in covering:
        at, row, left = span.start, 0, span.width
        while row < span.rows:
            room = length - at % length
            whole = min(room // span.width, span.rows - row) if left == span.width else 0
            rows, width = (whole, span.width) if whole else (1, min(room, left))
            parts[at // length].append(Piece(at % length, rows, width, first + row))
            at += rows * width
            left = span.width if whole or width == left else left - width
            row += whole if whole else left == span.width
        first += span.rows
    return parts


class NormMeter:
    """Adds up squares: float32 within one piece of a chunk (quick) or float64, float64 over the chunks in their order.
    Several threads may add, each chunk once."""

    def __init__(self, cut: Cut, *, precise: bool = False) -> None:
        self.cut, self.precise = cut, precise
        self._found: list[Norms] = [np.zeros(0)] * len(cut.chunks)

    def add(self, start: int, values: torch.Tensor) -> None:
        """The fragment's elements from `start`, a multiple of CHUNK, on: whole chunks, or to the end."""
        for offset in range(0, values.numel(), CHUNK):
            index, chunk = (start + offset) // CHUNK, values[offset : offset + CHUNK]
            found = [self._squares(piece, chunk) for piece in self.cut.chunks[index]]
            self._found[index] = found[0] if len(found) == 1 else np.concatenate(found)

    def _squares(self, piece: Piece, chunk: torch.Tensor) -> Norms:
        part = piece.of(chunk)
        if piece.rows == 1 and not self.precise:
            return np.array([float(torch.dot(part, part))])
        rows = part.view(piece.rows, piece.width)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64 if self.precise else None)
        found: Norms = norms.double().square_().numpy()
        return found

    @property
    def norms(self) -> Norms:
        """[num_norms]; not finite where the values are not, or where their squares overflow."""
        squares = np.zeros(self.cut.num_norms)
        for pieces, found in zip(self.cut.chunks, self._found, strict=True):
            squares[pieces[0].first : pieces[0].first + len(found)] += found  # no norm has two pieces in one chunk
        norms: Norms = np.sqrt(squares)
        return norms


def measured_norms(cut: Cut, read: Read) -> Norms:
    """[num_norms] float64: exact up to rounding for every finite float32."""
    meter = NormMeter(cut, precise=True)

    def measure(starts: range) -> None:
        room = torch.empty(BLOCK)
        for start in starts:
            meter.add(start, read(start, room[: min(BLOCK, cut.size - start)]))

    over_blocks(cut.size, measure)
    return meter.norms


def agree(found: Norms, claimed: Norms, tolerance: float) -> bool:
    """Whether each claimed norm is the one that was found."""
    return bool(np.all(np.abs(found - claimed) <= tolerance * claimed))
