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

The norms (float32, one per fragment, tensor or row) let a syncer merge by RDA in one pass over the payloads. They count
only for a delta against the current version; a payload without them is complete too.

Buffers that training changes are exchanged as they are, not as deltas, beside a fragment's parameters. Running
statistics are no parameters: no gradient moves them, so no outer step, clip or codec may. A payload and a version hold
their bytes in their own types, so that a counter is exact. Merged they become, by their kind,

    floating point         the mean, by the weights of the deltas beside them
    one integer            the maximum: a counter goes on from the island that has counted furthest
    more integers, bool    those of the heaviest delta

What moves parameters is bounded, so this is too. Beside a delta that is clipped they do not count. A mean leaves out
who moves one of a buffer's values more than `APART` times as far as the median of at least three who move the buffer
moves any, or of as many times more tokens; between fewer nobody can tell. A counter rises by no more than the tokens
that are believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median_low
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.layout import Fragment, Layout
from diloco_cli.methods import OUTER_OPTIMIZERS, arithmetic_of
from diloco_cli.tensors.codecs import BLOCK, CHUNK, Codec, Read, codec, merged_block, over_blocks, read_all, reader_of
from diloco_cli.tensors.flat import pack_buffers, unpack_buffers
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
temporaries; `delta` may be overwritten, and the next version's first buffer holds anything before. Parameters alone are
checked for finite values: a step that makes a buffer infinite must make them so, too."""


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
        if not _finite(moved["parameters"]):
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


BUFFERS = "buffers"  # as payloads and versions name them
APART = 10.0  # chance and unequal rounds stay far below it


@dataclass(frozen=True)
class BuffersOffer:
    """The [buffer_bytes] bytes beside a delta, its weight and scale, and how many of its tokens are believed."""

    packed: torch.Tensor
    weight: float
    scale: float
    believed: int


def buffers_spec(fragment: Fragment) -> Spec:
    """Nothing for a fragment without any, so that its objects are as if there were no buffers."""
    return {BUFFERS: (torch.uint8, (fragment.buffer_bytes,))} if fragment.buffers else {}


def vector_of(parameters: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The fragment's whole vector, of a payload's or a version's `tensors`."""
    return torch.cat([parameters, tensors[BUFFERS].view(torch.float32)]) if BUFFERS in tensors else parameters


def are_finite(fragment: Fragment, packed: torch.Tensor) -> bool:
    return all(bool(values.isfinite().all()) for _, values in unpack_buffers(fragment, packed))


def merge_buffers(
    fragment: Fragment, current: torch.Tensor, offers: Sequence[BuffersOffer], into: torch.Tensor
) -> None:
    """From the [buffer_bytes] bytes of the `current` version and of the offers into those of the next version."""
    counted = [offer for offer in offers if offer.weight > 0 and offer.scale >= 1]
    each = [{slot.name: values for slot, values in unpack_buffers(fragment, offer.packed)} for offer in counted]
    weights, merged = [offer.weight for offer in counted], {}
    for slot, before in unpack_buffers(fragment, current):
        found = [one[slot.name] for one in each]
        if not found:
            merged[slot.name] = before
        elif before.is_floating_point():
            merged[slot.name] = _mean(before, found, counted)
        elif before.dim() or before.dtype == torch.bool:
            merged[slot.name] = found[weights.index(max(weights))]
        else:
            most = [int(before) + offer.believed for offer in counted]
            merged[slot.name] = torch.tensor(max(map(min, most, map(int, found))), dtype=before.dtype)
    pack_buffers(fragment, into, merged)


def _mean(before: torch.Tensor, found: Sequence[torch.Tensor], offers: Sequence[BuffersOffer]) -> torch.Tensor:
    if not before.numel():
        return before
    moves = [float((one.double() - before.double()).abs().max()) for one in found]  # exact on any number of threads
    movers = [(move, offer.believed) for move, offer in zip(moves, offers, strict=True) if move > 0]
    usual, tokens = map(median_low, zip(*movers, strict=True)) if len(movers) > 2 else (inf, 1)
    weights, more = [offer.weight for offer in offers], [max(1.0, offer.believed / max(1, tokens)) for offer in offers]
    fit = [index for index, move in enumerate(moves) if move <= APART * usual * more[index]]
    total, heaviest = sum(weights[index] for index in fit), max(fit, key=lambda index: weights[index])
    base = found[heaviest].double()  # what all agree on stays as it is, to the bit
    steps = [(found[index].double() - base) * (weights[index] / total) for index in fit]
    return (base + torch.stack(steps).sum(dim=0)).to(before.dtype)


class WeightsFormat:
    """What learners download of one fragment: its parameters in a codec, and its buffers."""

    def __init__(self, codec: Codec, fragment: Fragment) -> None:
        self._codec, self._fragment = codec, fragment
        self.spec: Spec = {**buffers_spec(fragment), **codec.spec(fragment.num_parameters)}

    def to_bytes(self, version: dict[str, torch.Tensor]) -> bytes:
        """Of the tensors of a state."""
        values, blank = version["parameters"], Blank(self.spec)
        self._codec.encode_into(values.numel(), reader_of(values), blank.tensors)
        if BUFFERS in self.spec:
            blank.tensors[BUFFERS].copy_(version[BUFFERS])
        return blank.seal()

    def from_bytes(self, data: bytes) -> torch.Tensor:
        """The fragment's vector, for reading only. Raises PayloadError if it is not a payload of this format."""
        count = self._fragment.num_parameters
        if BUFFERS not in self.spec:
            return self._codec.from_bytes(data, count)
        tensors = views(data, self.spec)
        return vector_of(read_all(count, self._codec.reader(tensors)), tensors)
