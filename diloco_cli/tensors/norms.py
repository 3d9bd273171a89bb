"""The spans that norms cover, and how norms are measured chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from diloco_cli.layout import Fragment
from diloco_cli.tensors.codecs import CHUNK, Read

Granularity = Literal["fragment", "tensor", "row"]
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
    """The part of a span in one chunk: `rows` whole rows of `width`, or a part of one row. `start` counts from the
    chunk's beginning; its norms have the numbers from `first` on."""

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
    """The spans with one norm each, or one per row: the whole fragment, each tensor (or piece of one), or each row of a
    matrix (vectors stay whole)."""
    if granularity == "fragment":
        return [Span(0, 1, fragment.num_parameters)]
    found = []
    for tensor in fragment.tensors:
        if tensor.num_elements == 0:
            continue
        by_row = granularity == "row" and len(tensor.shape) > 1
        rows = tensor.piece_shape[0] if by_row else 1
        found.append(Span(tensor.start, rows, tensor.num_elements // rows))
    return found


class Cut:
    """Spans that cover a fragment of `size` elements without a gap, cut into chunks."""

    def __init__(self, covering: list[Span]) -> None:
        self.size = sum(span.rows * span.width for span in covering)
        self.num_norms = sum(span.rows for span in covering)
        self.firsts = np.cumsum([0] + [span.rows for span in covering[:-1]])
        self.sizes = np.array([float(span.rows * span.width) for span in covering])
        self.rows = np.array([span.rows for span in covering])
        self.chunks: list[list[Piece]] = [[] for _ in range(-(-self.size // CHUNK))]
        first = 0
        for span in covering:
            self._add(span, first)
            first += span.rows

    def starts(self) -> range:
        return range(0, self.size, CHUNK)

    def _add(self, span: Span, first: int) -> None:
        at, row, left = span.start, 0, span.width
        while row < span.rows:
            room = CHUNK - at % CHUNK
            whole = min(room // span.width, span.rows - row) if left == span.width else 0
            rows, width = (whole, span.width) if whole else (1, min(room, left))
            self.chunks[at // CHUNK].append(Piece(at % CHUNK, rows, width, first + row))
            at += rows * width
            left = span.width if whole or width == left else left - width
            row += whole if whole else left == span.width


class NormMeter:
    """Adds up squares, chunk by chunk: float32 within one piece (quick) or float64, float64 over pieces."""

    def __init__(self, cut: Cut, *, precise: bool = False) -> None:
        self.cut, self.precise = cut, precise
        self._squares = np.zeros(cut.num_norms)

    def add(self, index: int, values: torch.Tensor) -> None:
        """Chunk number `index` of the fragment, float32."""
        for piece in self.cut.chunks[index]:
            part = piece.of(values)
            if piece.rows == 1 and not self.precise:
                self._squares[piece.first] += float(torch.dot(part, part))
            else:
                rows = part.view(piece.rows, piece.width)
                norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64 if self.precise else None)
                self._squares[piece.first : piece.first + piece.rows] += norms.double().square_().numpy()

    @property
    def norms(self) -> Norms:
        """[num_norms]; not finite where the values are not, or where their squares overflow."""
        found: Norms = np.sqrt(self._squares)
        return found


def measured_norms(cut: Cut, read: Read) -> Norms:
    """[num_norms] float64: exact up to rounding for every finite float32."""
    meter, room = NormMeter(cut, precise=True), torch.empty(CHUNK)
    for index, start in enumerate(cut.starts()):
        meter.add(index, read(start, room[: min(CHUNK, cut.size - start)]))
    return meter.norms


def evened(cut: Cut, norms: Norms, times: float) -> Norms:
    """[sources, num_norms] -> factors of the same shape that shorten each tensor of a source so that it has no more
    than `times` the share of the source's norm that it has in the others (the upper median); where these do not move
    it, no more than its number of elements gives it. Of fewer than three sources nobody can tell, and all are 1."""
    if len(norms) < 3:
        return np.ones_like(norms)
    lengths = np.sqrt(np.add.reduceat(norms**2, cut.firsts, axis=1))
    whole = np.sqrt((lengths**2).sum(axis=1, keepdims=True))
    shares = np.divide(lengths, whole, out=np.zeros_like(lengths), where=whole > 0)
    rising, middle = np.sort(shares, axis=0), (len(shares) - 1) // 2
    others = np.where(shares <= rising[middle], rising[middle + 1], rising[middle])
    most = np.where(others > 0, times * others, np.sqrt(cut.sizes / cut.size))
    factors = np.divide(most, shares, out=np.ones_like(shares), where=shares > most)
    return np.repeat(factors, cut.rows, axis=1)


def agree(found: Norms, claimed: Norms, tolerance: float) -> bool:
    """Whether each claimed norm is the one that was found."""
    return bool(np.all(np.abs(found - claimed) <= tolerance * claimed))
