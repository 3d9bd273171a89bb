"""The assignment of tensors to fragments: a pure function, so that all processes have the same.

Tensors are dealt by size, descending, each into the smallest fragment so far (greedy LPT; the largest fragment is at
most 4/3 of the best possible one). So all fragments take about as long to travel; quality does not depend on which
tensors share a fragment (arXiv 2604.21428, fragments).

Embeddings stand alone: in the first fragment, or with `split_rows` in the first few. Tied weights appear once, because
callers pass each parameter once. With `split_rows`, a tensor larger than the ideal fragment (parameters / P) is cut by
rows into pieces of at most that size, as far as it has rows; each piece counts as a tensor of its own, in the layout
and for norms. Fewer tensors than P give fewer fragments: see `layout_warning`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Protocol

from diloco_cli.digests import digest
from diloco_cli.errors import UsageError


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
    """A set of tensors that is exchanged together, as one flat float32 vector."""

    tensors: tuple[TensorSlot, ...]
    embedding: bool

    @cached_property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)


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
    """A parameter tensor as a model names it; `dtype` is the type that learners train it in. `head`: it is the weight
    of an output head that is not tied to an embedding."""

    name: str
    shape: tuple[int, ...]
    embedding: bool
    dtype: str = "float32"
    head: bool = False


class LayoutSettings(Protocol):
    """The `sync` settings of the run that determine the layout."""

    @property
    def fragments(self) -> int: ...
    @property
    def split_rows(self) -> bool: ...


@dataclass(frozen=True)
class _Piece:
    """A tensor, or some of its rows: a part of a fragment."""

    fact: ParameterFact
    rows: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        return TensorSlot(self.fact.name, self.fact.shape, 0, self.fact.dtype, self.rows).num_elements

    @property
    def order(self) -> tuple[str, int]:
        return (self.fact.name, 0 if self.rows is None else self.rows[0])


def make_layout(parameters: Iterable[ParameterFact], sync: LayoutSettings) -> Layout:
    """The fragments of a run's model: at most `sync.fragments`. Raises UsageError for an empty model."""
    facts, wanted = list(parameters), sync.fragments
    if not facts or wanted < 1:
        raise UsageError(f"cannot make {wanted} fragments of {len(facts)} tensors; both must be at least 1")
    total = sum(prod(fact.shape) for fact in facts)
    ideal = max(1, total // wanted)
    pieces = [piece for fact in facts for piece in (_split(fact, ideal) if sync.split_rows else [_Piece(fact)])]
    embeddings = [piece for piece in pieces if piece.fact.embedding]
    others = [piece for piece in pieces if not piece.fact.embedding]
    if embeddings and others and wanted == 1:
        return _layout([(pieces, False)])
    of_embeddings = _embedding_fragments(embeddings, bool(others), wanted, ideal, sync.split_rows)
    groups = [(group, True) for group in _balanced(embeddings, of_embeddings)]
    return _layout(groups + [(group, False) for group in _balanced(others, wanted - of_embeddings)])


def balanced_layout(parameters: Iterable[ParameterFact], num_fragments: int) -> Layout:
    """`make_layout` with every setting but the number of fragments at its default."""
    return make_layout(parameters, _Default(num_fragments))


@dataclass(frozen=True)
class _Default:
    fragments: int
    split_rows: bool = False


def layout_warning(layout: Layout, sync: LayoutSettings) -> str | None:
    """Why there are fewer fragments than `sync.fragments` asks for; None if there are as many."""
    found = len(layout.fragments)
    if found == sync.fragments:
        return None
    return f"{found} fragments instead of the {sync.fragments} of sync.fragments: too few tensors for more"


def _split(fact: ParameterFact, ideal: int) -> list[_Piece]:
    """Pieces of whole rows, of at most `ideal` elements if rows are that small, as equal as can be."""
    size = prod(fact.shape)
    rows = fact.shape[0] if fact.shape else 1
    if size <= ideal or rows < 2:
        return [_Piece(fact)]
    per_piece = max(1, ideal // (size // rows))
    count = -(-rows // per_piece)
    edges = [rows * index // count for index in range(count + 1)]
    return [_Piece(fact, (first, end)) for first, end in pairwise(edges)]


def _embedding_fragments(embeddings: Sequence[_Piece], others: bool, wanted: int, ideal: int, split: bool) -> int:
    """How many fragments the embeddings get: one, or with `split` their share of all."""
    if not embeddings:
        return 0
    share = round(sum(piece.size for piece in embeddings) / ideal) if split else 1
    return max(1, min(share, wanted - others, len(embeddings)))


def _balanced(pieces: Sequence[_Piece], count: int) -> list[list[_Piece]]:
    """Greedy LPT; the order of the input does not matter."""
    bins: list[list[_Piece]] = [[] for _ in range(min(count, len(pieces)))]
    sizes = [0] * len(bins)
    for piece in sorted(pieces, key=lambda p: (-p.size, p.order)):
        smallest = sizes.index(min(sizes))
        bins[smallest].append(piece)
        sizes[smallest] += piece.size
    return bins


def _layout(groups: list[tuple[list[_Piece], bool]]) -> Layout:
    fragments = []
    for pieces, embedding in groups:
        slots, start = [], 0
        for piece in sorted(pieces, key=lambda p: p.order):
            slots.append(TensorSlot(piece.fact.name, piece.fact.shape, start, piece.fact.dtype, piece.rows))
            start += piece.size
        fragments.append(Fragment(tuple(slots), embedding))
    return Layout(tuple(fragments), digest_of(fragments))


def digest_of(fragments: Sequence[Fragment]) -> str:
    """The digest of the whole layout: the place, shape, type and rows of every tensor."""
    plain = [{"embedding": f.embedding, "tensors": [_identity(t) for t in f.tensors]} for f in fragments]
    return digest(json.dumps(plain, sort_keys=True).encode())


def _identity(tensor: TensorSlot) -> list[object]:
    """A tensor's part of the digest; float32 and all rows, as the defaults, are left out."""
    identity: list[object] = [tensor.name, list(tensor.shape), tensor.start]
    if tensor.dtype != "float32":
        identity.append(tensor.dtype)
    return identity if tensor.rows is None else [*identity, {"rows": list(tensor.rows)}]
