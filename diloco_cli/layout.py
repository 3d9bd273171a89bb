"""The assignment of tensors to fragments: a pure function, so that all processes have the same.

Fragments are filled one after the other, tensors by size, descending, each up to the row that is nearest to an even
share of what is left. So all are as large as rows allow and take about as long to travel; otherwise one large tensor,
mostly the embedding, would decide how long an exchange takes. Which rows share a fragment does not matter to the
quality (arXiv 2604.21428, fragments), nor to a merge, where each row of a matrix has a norm of its own. A vector has
one norm, and is cut only where it is larger than an even fragment.

Embeddings stand alone, in the first fragments. Tied weights appear once, because callers pass each parameter once.
Fewer rows than P give fewer fragments: see `layout_warning`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil, prod
from typing import Protocol

from diloco_cli.digests import digest
from diloco_cli.errors import UsageError

MAX_DIMENSIONS = 64  # of a tensor of torch
MAX_ELEMENTS = 1 << 53  # more are not exact everywhere
FLOAT_BYTES = 4
BUFFER_BYTES = {  # of one element
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSlot:
    """One parameter tensor, or some of its rows, inside a fragment's flat vector; `start` is in elements.

    `shape` is the whole tensor's; `rows` are the [first, end) rows of this piece, None for all.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    dtype: str = "float32"
    rows: tuple[int, int] | None = None

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of the piece in the fragment."""
        return self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])

    @property
    def num_elements(self) -> int:
        return prod(self.piece_shape)


@dataclass(frozen=True)
class Fragment:
    """A set of tensors that is exchanged together, as one flat float32 vector.

    `buffers`: of the model, which training changes beside its parameters. They lie behind the parameters, byte for byte
    in their own types, each from a whole float32 on; their `start` counts from there, in bytes."""

    tensors: tuple[TensorSlot, ...]
    embedding: bool
    buffers: tuple[TensorSlot, ...] = ()

    @cached_property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @cached_property
    def buffer_bytes(self) -> int:
        return sum(map(room_of, self.buffers))

    @property
    def size(self) -> int:
        """Of the vector, in float32."""
        return self.num_parameters + self.buffer_bytes // FLOAT_BYTES


@dataclass(frozen=True)
class Layout:
    """All fragments of a model. Learners whose `digest` differs build another model and must not take part."""

    fragments: tuple[Fragment, ...]
    digest: str

    @cached_property
    def num_parameters(self) -> int:
        return sum(fragment.num_parameters for fragment in self.fragments)


@dataclass(frozen=True)
class ParameterFact:
    """A parameter tensor, or a buffer, as a model names it; `dtype` is the type that learners train it in.
    `hidden`: it is a matrix inside a block (tensors/flat.py, parameter_facts), and an optimizer may treat it as one."""

    name: str
    shape: tuple[int, ...]
    embedding: bool
    dtype: str = "float32"
    hidden: bool = False


class LayoutSettings(Protocol):
    """The `sync` settings of the run that determine the layout."""

    @property
    def fragments(self) -> int: ...


@dataclass(frozen=True)
class _Piece:
    """A tensor, or some of its rows: a part of a fragment."""

    fact: ParameterFact
    rows: tuple[int, int] | None
    size: int

    @property
    def order(self) -> tuple[str, int]:
        return (self.fact.name, 0 if self.rows is None else self.rows[0])


def make_layout(parameters: Iterable[ParameterFact], sync: LayoutSettings) -> Layout:
    """The fragments of a run's model: at most `sync.fragments`. Raises UsageError for an empty model."""
    return balanced_layout(parameters, sync.fragments)


def balanced_layout(parameters: Iterable[ParameterFact], num_fragments: int) -> Layout:
    """The same, for a number of fragments."""
    return _layout(_groups(list(parameters), num_fragments))


def fragment_sizes(parameters: Iterable[ParameterFact], num_fragments: int) -> tuple[int, ...]:
    """The elements of each fragment of that layout, for plans of models that are not built."""
    return tuple(sum(piece.size for piece in group) for group, _ in _groups(list(parameters), num_fragments))


def _groups(facts: list[ParameterFact], wanted: int) -> list[tuple[list[_Piece], bool]]:
    if not facts or wanted < 1:
        raise UsageError(f"cannot make {wanted} fragments of {len(facts)} tensors; both must be at least 1")
    embeddings = [fact for fact in facts if fact.embedding]
    others = [fact for fact in facts if not fact.embedding]
    if not embeddings or not others or wanted == 1:
        return [(group, not others) for group in _filled(facts, wanted)]
    count = _embedding_fragments(_size(embeddings), _size(others), wanted)
    groups = [(group, True) for group in _filled(embeddings, count)]
    return groups + [(group, False) for group in _filled(others, wanted - len(groups))]


def layout_warning(layout: Layout, sync: LayoutSettings) -> str | None:
    """Why there are fewer fragments than `sync.fragments` asks for; None if there are as many."""
    found = len(layout.fragments)
    if found == sync.fragments:
        return None
    return f"{found} fragments instead of the {sync.fragments} of sync.fragments: too few tensors and rows for more"


def _size(facts: Iterable[ParameterFact]) -> int:
    return sum(prod(fact.shape) for fact in facts)


def _embedding_fragments(embeddings: int, others: int, wanted: int) -> int:
    """How many fragments the embeddings get, so that the largest of all is as small as can be."""

    def largest(count: int) -> Fraction:
        return max(Fraction(embeddings, count), Fraction(others, wanted - count))

    return min(range(1, wanted), key=largest)


def _filled(facts: list[ParameterFact], count: int) -> list[list[_Piece]]:
    """At most `count` fragments; the order of the input does not matter."""
    fragments: list[list[_Piece]] = [[]]
    unfilled, filled = _size(facts), 0  # elements that this fragment and the later ones share; already in this one
    even = unfilled // count
    for fact in sorted(facts, key=lambda fact: (-prod(fact.shape), fact.name)):
        size = prod(fact.shape)
        if size == 0:
            fragments[-1].append(_Piece(fact, None, 0))
            continue
        rows = fact.shape[0] if len(fact.shape) > 1 or size > max(1, even) else 1
        first, width = 0, size // rows
        while first < rows:
            to_fill = Fraction(unfilled, count - len(fragments) + 1) - filled
            nearest = ceil(to_fill / width - Fraction(1, 2))
            taken = min(rows - first, nearest if filled else max(1, nearest))
            if taken > 0:
                piece = None if taken == rows else (first, first + taken)
                fragments[-1].append(_Piece(fact, piece, taken * width))
                first, filled = first + taken, filled + taken * width
            else:
                unfilled, filled = unfilled - filled, 0
                fragments.append([])
    return fragments


def _layout(groups: list[tuple[list[_Piece], bool]]) -> Layout:
    fragments = []
    for pieces, embedding in groups:
        slots, start = [], 0
        for piece in sorted(pieces, key=lambda p: p.order):
            slots.append(TensorSlot(piece.fact.name, piece.fact.shape, start, piece.fact.dtype, piece.rows))
            start += piece.size
        fragments.append(Fragment(tuple(slots), embedding))
    return Layout(tuple(fragments), digest_of(fragments))


def with_buffers(layout: Layout, facts: Iterable[ParameterFact]) -> Layout:
    """The same with these buffers in its first fragment, which is the embedding's, if there is one: it has a version
    whenever that has."""
    slots, start = [], 0
    for fact in sorted(facts, key=lambda fact: fact.name):
        slots.append(TensorSlot(fact.name, fact.shape, start, fact.dtype))
        start += room_of(slots[-1])
    first, *others = layout.fragments
    fragments = (replace(first, buffers=tuple(slots)), *others)
    return Layout(fragments, digest_of(fragments)) if slots else layout


def buffer_names(layout: Layout) -> frozenset[str]:
    return frozenset(slot.name for fragment in layout.fragments for slot in fragment.buffers)


def shapes_of(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Of every tensor that a run exchanges."""
    return {slot.name: slot.shape for part in layout.fragments for slot in (*part.tensors, *part.buffers)}


def room_of(buffer: TensorSlot) -> int:
    """Its bytes, as whole float32."""
    return -(-buffer.num_elements * BUFFER_BYTES[buffer.dtype] // FLOAT_BYTES) * FLOAT_BYTES


def contradiction_in_layout(layout: Layout) -> str | None:
    """What no model has; None if all tensors may be. A layout comes from a bucket, and so from somebody."""
    for slots, are_buffers in [
        one for part in layout.fragments for one in ((part.tensors, False), (part.buffers, True))
    ]:
        end = 0
        for tensor in slots:
            shape, (first, last) = tensor.shape, tensor.rows or (0, 0)
            if len(shape) > MAX_DIMENSIONS:
                return f"{tensor.name!a} has {len(shape):,} dimensions, at most {MAX_DIMENSIONS}"
            is_possible = not any(size < 0 for size in shape) and prod(shape) <= MAX_ELEMENTS
            if not is_possible or not 0 <= first <= last <= (*shape, 0)[0]:
                return f"{tensor.name!a} has the shape {shape} and the rows {tensor.rows}"
            if tensor.start != end:
                return f"{tensor.name!a} begins at {tensor.start:,}, where the tensor before it ends at {end:,}"
            if are_buffers and (tensor.dtype not in BUFFER_BYTES or tensor.rows):
                return f"the buffer {tensor.name!a} is {tensor.dtype!a}, with the rows {tensor.rows}"
            end += room_of(tensor) if are_buffers else tensor.num_elements
    return None


def digest_of(fragments: Sequence[Fragment]) -> str:
    """The digest of the whole layout: the place, shape, type and rows of every tensor."""
    plain = [
        {"embedding": f.embedding, "tensors": [_identity(t) for t in f.tensors]}
        | ({"buffers": [_identity(b) for b in f.buffers]} if f.buffers else {})
        for f in fragments
    ]
    return digest(json.dumps(plain, sort_keys=True).encode())


def _identity(tensor: TensorSlot) -> list[object]:
    """A tensor's part of the digest; float32 and all rows, as the defaults, are left out."""
    identity: list[object] = [tensor.name, list(tensor.shape), tensor.start]
    if tensor.dtype != "float32":
        identity.append(tensor.dtype)
    return identity if tensor.rows is None else [*identity, {"rows": list(tensor.rows)}]
