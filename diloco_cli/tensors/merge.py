"""Merging deltas: weighted mean (Avg) and radial-directional averaging (RDA), arXiv 2604.21428, merge.

    Avg: delta = sum_m w_m delta_m / sum_m w_m
    RDA: delta = (sum_m w_m |delta_m| / sum_m w_m) * phi(sum_m w_m phi(delta_m) / sum_m w_m)
         phi(x) = x / |x|, phi(0) = 0

Learners' deltas are nearly orthogonal, so a plain mean of M equal norms shrinks like 1 / sqrt(M); RDA keeps the norm at
the weighted mean of norms. Where directions cancel, RDA falls back to Avg.

A merge reads its deltas block by block from their payloads and adds them up in float32, in the order in which they are
given: no whole decoded delta is held, and a replay gives the same bits, on any number of threads. Norms are known
before: a learner publishes those of its payload, or they are measured. The merge checks published norms, and names a
delta that has other ones.

Outer optimizers: how a merged delta moves the syncer's parameters. Delta is old minus new, so it is a gradient.

Nesterov (DiLoCo, arXiv 2311.08105; torch.optim.SGD with nesterov=True):
    buffer = momentum * buffer + delta;  parameters -= lr * (delta + momentum * buffer)
SGD:
    parameters -= lr * delta

A delta's payload: the delta in the upload codec, and the norms of the decoded delta.

The norms (float32, one per fragment, tensor or row, as the merge needs them) let a syncer merge by RDA in one pass over
the payloads. They count only for a delta against the current version, and a syncer checks them while it merges. A
payload without them is complete too: then the syncer measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np
import torch

from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.layout import Fragment, Layout
from diloco_cli.methods import OUTER_OPTIMIZERS, arithmetic_of
from diloco_cli.tensors.buffers import BUFFERS, buffers_spec
from diloco_cli.tensors.codecs import CHUNK, Codec, Read, codec, over_blocks, reader_of
from diloco_cli.tensors.norms import (
    PRECISE,
    QUICK,
    Cut,
    NormMeter,
    Norms,
    Piece,
    agree,
    measured_norms,
    spans,
)
from diloco_cli.tensors.payload import Blank, PayloadError, Spec, views

MergeRule = Literal["rda", "avg"]
TINY = float(torch.finfo(torch.float32).tiny)  # shorter deltas count as zero: 1 / norm would not be finite
SAMPLED_CHUNKS = 16  # of a fragment, for cosines
ROUNDING = 1e-12  # of a delta's square: a rest that is shorter is none
CANCELLED = 1e-6  # a mean of unit directions shorter than this has no direction
Use = Callable[[int, torch.Tensor], None]
Tensors = Mapping[str, torch.Tensor]
OuterStep = Callable[[OuterSettings, Tensors, torch.Tensor, Tensors], None]
"""(settings, version, delta, next version): writes the next version's `parameters` and buffers, [n] each, without
temporaries; `delta` may be overwritten."""


def rule_of(fragment: Fragment, sync: SyncSettings) -> MergeRule:
    """Embeddings are averaged: a row moves in few learners, and radial averaging would take a row that only one of them
    saw for a full step of all."""
    return "avg" if fragment.embedding else sync.merge


def cut_of(fragment: Fragment, sync: SyncSettings) -> Cut:
    """The spans of the norms of this fragment's deltas, as the merge needs them: for radial averaging the rows of a
    matrix, each one neuron's input, so that each keeps its own direction and length; for an average whole tensors."""
    return Cut(spans(fragment, "tensor" if rule_of(fragment, sync) == "avg" else "row"))


@dataclass(frozen=True)
class DeltaSource:
    """One learner's delta: `read` decodes a part of it, `norms` [num_norms] are finite. `claimed`: the norms are the
    learner's claim and not checked yet. `scale` shortens the delta. `made`: the norm of the delta as its learner made
    it, where it was re-anchored since; `own` reads that. `buffers`: the bytes of those beside the delta, if any."""

    read: Read
    norms: Norms
    claimed: bool = False
    scale: float = 1.0
    made: float | None = None
    own: Read | None = None
    buffers: torch.Tensor | None = None

    @property
    def norm(self) -> float:
        """Of the whole delta as its learner made it, not scaled."""
        return float(np.linalg.norm(self.norms)) if self.made is None else self.made


class _Rooms:
    """The buffers of one thread: 12 MiB for a large fragment."""

    def __init__(self, cut: Cut) -> None:
        self.decoded, self.sum, self.out = (torch.empty(min(cut.block, cut.size)) for _ in range(3))


class Merging:
    """One merge of one fragment. Sources of weight 0 take no part; the weights' sum must be positive.

    After `each`, `unsound` has the reasons why sources must not be merged, by index: then the blocks that were used are
    invalid."""

    def __init__(
        self,
        rule: MergeRule,
        cut: Cut,
        sources: Sequence[DeltaSource],
        weights: Sequence[float],
    ) -> None:
        total = sum(weights)
        if not total > 0:
            raise ValueError("nothing to merge: all weights are 0")
        self.rule, self.cut = rule, cut
        used = [index for index, weight in enumerate(weights) if weight > 0]
        self._indexes, self._sources = used, [sources[index] for index in used]
        self._shares = [weights[index] / total for index in used]
        self._norms = np.stack([source.norms for source in self._sources])
        self._scales = np.array([source.scale for source in self._sources])[:, None]
        self._means = list(np.array(self._shares)[:, None] * self._scales * np.ones_like(self._norms))
        self._meters = [NormMeter(cut) if source.claimed else None for source in self._sources]
        self._num_all = len(sources)
        self.unsound: dict[int, str] = {}

    def each(self, directions: torch.Tensor, use: Use) -> None:
        """Call use(start, merged block) for every block of the fragment, which it may overwrite; several at the same
        time. `directions` [n] float32 is working memory, of which a block that is used is no longer needed."""
        self._average(use) if self.rule == "avg" else self._rda(directions, use)

    def cosines(self) -> tuple[float, ...]:
        """Between each source and the weighted sum of the others, as their learners made them but scaled, whatever the
        rule of the merge; 0 where one of the two is zero. Of some even parts of the fragment: re-reading whole deltas
        would cost as much as the merge."""
        shares = [share * source.scale for share, source in zip(self._shares, self._sources, strict=True)]
        reads = [source.own or source.read for source in self._sources]
        products = np.zeros((len(reads), 3))
        blocks = range(0, self.cut.size, self.cut.block)
        for start in blocks[:: -(-len(blocks) // SAMPLED_CHUNKS)]:
            room, summed, others = (torch.zeros(min(CHUNK, self.cut.size - start)) for _ in range(3))
            for read, share in zip(reads, shares, strict=True):
                summed.add_(read(start, room), alpha=share)
            for place, (read, share) in enumerate(zip(reads, shares, strict=True)):
                values = read(start, room)
                torch.sub(summed, values, alpha=share, out=others)
                pairs = ((values, others), (values, values), (others, others))
                products[place] += [float(torch.dot(one, other)) for one, other in pairs]
        own, rest = np.square(shares) * products[:, 1], products[:, 2]
        lengths = np.where(rest > ROUNDING * own, np.sqrt(products[:, 1] * rest), 0.0)
        cosines = np.divide(products[:, 0], lengths, out=np.zeros(len(reads)), where=lengths > 0)
        found = dict(zip(self._indexes, np.clip(np.nan_to_num(cosines), -1.0, 1.0), strict=True))
        return tuple(float(found.get(index, 0.0)) for index in range(self._num_all))

    # -- the two rules ------------------------------------------------------------------------------------------

    def _average(self, use: Use) -> None:
        def average(starts: range) -> None:
            rooms = _Rooms(self.cut)
            for start in starts:
                use(start, self._add_up(start, self._means, self._meters, rooms))

        over_blocks(self.cut.size, average, self.cut.block)
        self._check_norms()

    def _rda(self, directions: torch.Tensor, use: Use) -> None:
        norms = self._norms
        shares = np.array(self._shares)[:, None]
        moves = norms > TINY
        units = list(np.where(moves, shares / np.where(moves, norms, 1.0), 0.0))
        radius = (shares * self._scales * norms).sum(axis=0)
        length = NormMeter(self.cut)

        def direct(starts: range) -> None:
            rooms = _Rooms(self.cut)
            for start in starts:
                summed = self._add_up(start, units, self._meters, rooms)
                length.add(start, summed)
                directions[start : start + self.cut.block].copy_(summed)

        over_blocks(self.cut.size, direct, self.cut.block)
        self._check_norms()
        if not self.unsound:
            self._stretch(directions, radius, length.norms, use)

    def _stretch(self, directions: torch.Tensor, radius: Norms, length: Norms, use: Use) -> None:
        """The second pass: directions to their radius; the mean itself where they cancelled each other."""
        cancelled = (length < CANCELLED) & (radius > 0)
        factors = np.where(length > TINY, radius / np.where(length > TINY, length, 1.0), 0.0)
        factors[cancelled] = 0.0
        means = [np.where(cancelled, mean, 0.0) for mean in self._means] if cancelled.any() else []

        def stretch(starts: range) -> None:
            rooms = _Rooms(self.cut)
            for start in starts:
                pieces, block = self.cut.pieces(start), directions[start : start + self.cut.block]
                stretched = _stretched(pieces, block, factors, rooms.out)
                if any(cancelled[piece.first : piece.first + piece.rows].any() for piece in pieces):
                    stretched.add_(self._add_up(start, means, [None] * len(means), rooms))
                use(start, stretched)

        over_blocks(self.cut.size, stretch, self.cut.block)

    # -- what both share ----------------------------------------------------------------------------------------

    def _add_up(
        self, start: int, factors: list[Norms], meters: Sequence[NormMeter | None], rooms: _Rooms
    ) -> torch.Tensor:
        """The block from `start` on of sum_m factor_m delta_m, with a factor for each norm."""
        size = min(self.cut.block, self.cut.size - start)
        summed = rooms.sum[:size].zero_()
        for source, factor, meter in zip(self._sources, factors, meters, strict=True):
            values = source.read(start, rooms.decoded[:size])
            if meter is not None:
                meter.add(start, values)
            for piece in self.cut.pieces(start):
                if piece.rows == 1:
                    piece.of(summed).add_(piece.of(values), alpha=float(factor[piece.first]))
                else:
                    by_row = torch.from_numpy(factor[piece.first : piece.first + piece.rows]).float()
                    piece.of(summed).addcmul_(piece.of(values), by_row[:, None])
        return summed

    def _check_norms(self) -> None:
        for index, source, meter in zip(self._indexes, self._sources, self._meters, strict=True):
            if meter is not None and not agree(meter.norms, source.norms, QUICK):
                reason = why_unsound(self.cut, source)  # squares may have left float32's range: look again
                if reason is not None:
                    self.unsound[index] = reason


def _stretched(pieces: list[Piece], block: torch.Tensor, factors: Norms, room: torch.Tensor) -> torch.Tensor:
    out = room[: block.numel()]
    for piece in pieces:
        if piece.rows == 1:
            torch.mul(piece.of(block), float(factors[piece.first]), out=piece.of(out))
        else:
            by_row = torch.from_numpy(factors[piece.first : piece.first + piece.rows]).float()
            torch.mul(piece.of(block), by_row[:, None], out=piece.of(out))
    return out


def why_unsound(cut: Cut, source: DeltaSource) -> str | None:
    """The reason why a delta must not be merged, by measuring its norms precisely; None if there is none."""
    found = measured_norms(cut, source.read)
    if not np.isfinite(found).all():
        return "non_finite"
    return None if agree(found, source.norms, PRECISE) else "bad_norms"


def nesterov(settings: OuterSettings, before: Tensors, delta: torch.Tensor, after: Tensors) -> None:
    momentum = float(settings.momentum)
    torch.mul(before["momentum"], momentum, out=after["momentum"]).add_(delta)
    delta.add_(after["momentum"], alpha=momentum)
    sgd(settings, before, delta, after)


def sgd(settings: OuterSettings, before: Tensors, delta: torch.Tensor, after: Tensors) -> None:
    torch.add(before["parameters"], delta, alpha=-float(settings.lr), out=after["parameters"])


def apply_merge(settings: OuterSettings, merging: Merging, before: Tensors, after: Tensors) -> bool:
    """Merge and step block by block, from one version (`parameters` and the optimizer's buffers, [n] each) into the
    next; whether all results are finite. The results are invalid if `merging.unsound` has entries."""
    finite = True
    record = OUTER_OPTIMIZERS[settings.name]
    outer_step: OuterStep = arithmetic_of(record)

    def step(start: int, delta: torch.Tensor) -> None:
        nonlocal finite
        block = slice(start, start + delta.numel())
        moved = {name: tensor[block] for name, tensor in after.items()}
        outer_step(settings, {name: tensor[block] for name, tensor in before.items()}, delta, moved)
        if not _finite(moved["parameters"]):  # a buffer that is not finite makes parameters that are not
            finite = False

    directions = after[record.buffers[0]] if record.buffers else torch.empty_like(after["parameters"])
    merging.each(directions, step)
    return finite


def _finite(block: torch.Tensor) -> bool:
    """By its sum: much faster than looking at each value. A float32 sum may overflow, so then again in float64."""
    return isfinite(float(block.sum())) or isfinite(float(block.sum(dtype=torch.float64)))


class DeltaFormat:
    """The payloads of one fragment's deltas."""

    def __init__(self, codec: Codec, fragment: Fragment, sync: SyncSettings) -> None:
        self.codec, self.cut, self.fragment = codec, cut_of(fragment, sync), fragment
        self._without_norms: Spec = {**buffers_spec(fragment), **codec.spec(self.cut.size)}
        self._with_norms: Spec = {"norms": (torch.float32, (self.cut.num_norms,)), **self._without_norms}

    def encode(self, delta: torch.Tensor, buffers: torch.Tensor | None = None) -> bytes:
        """[n] float32 -> payload."""
        return self.encode_blocks(reader_of(delta), buffers)

    def encode_blocks(self, read: Read, buffers: torch.Tensor | None = None) -> bytes:
        """The payload of a delta that is read block by block, and never whole in memory; and of the fragment's buffers
        beside it, if it has any."""
        blank = Blank(self._with_norms)
        if buffers is not None and BUFFERS in blank.tensors:
            blank.tensors[BUFFERS].copy_(buffers)
        self.codec.encode_into(self.cut.size, read, blank.tensors)
        norms = torch.from_numpy(measured_norms(self.cut, self.codec.reader(blank.tensors)))
        blank.tensors["norms"].copy_(norms)
        return blank.seal()

    def open(self, payload: bytes | memoryview) -> tuple[Read, Norms | None]:
        """A function that reads the delta chunk by chunk, and the norms that the payload claims. Raises PayloadError if
        it is not a payload of this codec and fragment."""
        tensors = self._views(payload)
        norms = tensors.get("norms")
        return self.codec.reader(tensors), None if norms is None else norms.numpy().astype(np.float64)

    def buffers(self, payload: bytes | memoryview) -> torch.Tensor | None:
        """The bytes of those beside the delta; None if the fragment has none. Raises PayloadError as `open` does."""
        return self._views(payload).get(BUFFERS)

    def _views(self, payload: bytes | memoryview) -> dict[str, torch.Tensor]:
        try:
            return views(payload, self._with_norms)
        except PayloadError:
            return views(payload, self._without_norms)


def difference(base: torch.Tensor, values: torch.Tensor) -> Read:
    """base - values, both [n] float32, chunk by chunk."""
    return lambda start, room: torch.sub(
        base[start : start + room.numel()], values[start : start + room.numel()], out=room
    )


def delta_formats(layout: Layout, sync: SyncSettings) -> list[DeltaFormat]:
    """One per fragment."""
    return [DeltaFormat(codec(sync.codec), fragment, sync) for fragment in layout.fragments]


def anchored_anew(delta: Read, base: Read, current: torch.Tensor) -> Read:
    """A delta from an older base, relative to the current version: delta + (current - base), chunk by chunk."""

    def read(start: int, room: torch.Tensor) -> torch.Tensor:
        own = torch.empty_like(room)
        moved = torch.sub(current[start : start + room.numel()], base(start, own), out=own)
        return torch.add(delta(start, room), moved, out=room)

    return read
