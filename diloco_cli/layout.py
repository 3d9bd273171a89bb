"""Which tensor lives in which fragment: pure bookkeeping that every process must agree on.

Fragments are balanced by tensors (arXiv 2604.21428): tensors sorted by size, descending, each into the currently
smallest bin (greedy LPT; the largest bin is at most 4/3 of the best possible one). Embeddings stand alone in the first
fragment. Tied weights appear once, because callers pass each parameter once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from diloco_cli.digests import digest
from diloco_cli.errors import UsageError


@dataclass(frozen=True)
class TensorSlot:
    """One parameter tensor inside a fragment's flat vector; `start` is in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    dtype: str = "float32"

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Fragment:
    """A set of tensors that is exchanged together, as one flat float32 vector."""

    tensors: tuple[TensorSlot, ...]
    embedding: bool

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)


@dataclass(frozen=True)
class Layout:
    """All fragments of a model. Learners whose `digest` differs build another model and must not take part."""

    fragments: tuple[Fragment, ...]
    digest: str

    @property
    def num_parameters(self) -> int:
        return sum(fragment.num_parameters for fragment in self.fragments)

    @property
    def imbalance(self) -> float:
        """Largest fragment over the mean."""
        largest = max(fragment.num_parameters for fragment in self.fragments)
        return largest * len(self.fragments) / self.num_parameters


@dataclass(frozen=True)
class ParameterFact:
    """A parameter tensor as a model names it; `dtype` is the type that learners train it in."""

    name: str
    shape: tuple[int, ...]
    embedding: bool
    dtype: str = "float32"


def balanced_layout(parameters: Iterable[ParameterFact], num_fragments: int) -> Layout:
    """At most `num_fragments` fragments, fewer if there are fewer tensors. Raises UsageError for an empty model."""
    facts = sorted(parameters, key=lambda p: (-prod(p.shape), p.name))
    if not facts or num_fragments < 1:
        raise UsageError(f"cannot make {num_fragments} fragments of {len(facts)} tensors; both must be at least 1")
    embeddings = [fact for fact in facts if fact.embedding]
    others = [fact for fact in facts if not fact.embedding]
    if embeddings and others and num_fragments == 1:
        return _layout([(facts, False)])
    num_bins = min(len(others), num_fragments - bool(embeddings))
    bins: list[list[ParameterFact]] = [[] for _ in range(num_bins)]
    sizes = [0] * num_bins
    for fact in others:
        smallest = sizes.index(min(sizes))
        bins[smallest].append(fact)
        sizes[smallest] += prod(fact.shape)
    groups = [(embeddings, True)] if embeddings else []
    return _layout(groups + [(facts_of_bin, False) for facts_of_bin in bins])


def _layout(groups: list[tuple[list[ParameterFact], bool]]) -> Layout:
    fragments = []
    for facts, embedding in groups:
        slots, start = [], 0
        for fact in sorted(facts, key=lambda p: p.name):
            slots.append(TensorSlot(fact.name, fact.shape, start, fact.dtype))
            start += prod(fact.shape)
        fragments.append(Fragment(tuple(slots), embedding))
    return Layout(tuple(fragments), _digest(fragments))


def _digest(fragments: list[Fragment]) -> str:
    plain = [{"embedding": f.embedding, "tensors": [_identity(t) for t in f.tensors]} for f in fragments]
    return digest(json.dumps(plain, sort_keys=True).encode())


def _identity(tensor: TensorSlot) -> list[object]:
    """What tells tensors apart; float32 goes without saying."""
    identity: list[object] = [tensor.name, list(tensor.shape), tensor.start]
    return identity if tensor.dtype == "float32" else [*identity, tensor.dtype]
