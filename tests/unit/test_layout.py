"""Fragments: a disjoint cover, balanced, and the same on every machine."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.errors import UsageError
from diloco_cli.layout import Layout, ParameterFact, balanced_layout

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
models = st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=12).map(
    lambda drawn: [ParameterFact(f"p{i}", shape, embedding) for i, (shape, embedding) in enumerate(drawn)]
)
quick = settings(max_examples=80, deadline=None)


def names(layout: Layout) -> list[list[str]]:
    return [[slot.name for slot in fragment.tensors] for fragment in layout.fragments]


@quick
@given(models, st.integers(1, 8))
def test_every_tensor_lies_in_one_fragment_without_gap_or_overlap(model: list[ParameterFact], count: int) -> None:
    layout = balanced_layout(model, count)
    assert sorted(name for fragment in names(layout) for name in fragment) == sorted(fact.name for fact in model)
    for fragment in layout.fragments:
        ends = [slot.start + slot.num_elements for slot in fragment.tensors]
        assert [slot.start for slot in fragment.tensors] == [0, *ends[:-1]] and ends[-1] == fragment.num_parameters
    assert 1 <= len(layout.fragments) <= count and all(fragment.tensors for fragment in layout.fragments)
    assert layout.num_parameters == sum(prod(fact.shape) for fact in model)


@quick
@given(models, st.integers(2, 8))
def test_embeddings_stand_alone_in_the_first_fragment(model: list[ParameterFact], count: int) -> None:
    layout = balanced_layout(model, count)
    embeddings = sorted(fact.name for fact in model if fact.embedding)
    assert [fragment.embedding for fragment in layout.fragments] == [
        bool(embeddings) and index == 0 for index in range(len(layout.fragments))
    ]
    assert not embeddings or names(layout)[0] == embeddings


@quick
@given(models, st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(model: list[ParameterFact], count: int, draw: random.Random) -> None:
    shuffled = list(model)
    draw.shuffle(shuffled)
    assert balanced_layout(shuffled, count) == balanced_layout(model, count)


def best_largest_bin(sizes: list[int], bins: int) -> int:
    """By brute force over all assignments; the first tensor may stay in the first bin."""
    best = sum(sizes)
    for rest in product(range(bins), repeat=len(sizes) - 1):
        loads = [0] * bins
        for size, where in zip(sizes, (0, *rest), strict=True):
            loads[where] += size
        best = min(best, max(loads))
    return best


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=7), st.integers(2, 3))
def test_the_largest_bin_is_at_most_four_thirds_of_the_best_possible(sizes: list[int], bins: int) -> None:
    facts = [ParameterFact(f"p{i}", (size,), False) for i, size in enumerate(sizes)]
    layout = balanced_layout([*facts, ParameterFact("embedding", (1000,), True)], bins + 1)
    largest = max(fragment.num_parameters for fragment in layout.fragments if not fragment.embedding)
    assert 3 * largest <= 4 * best_largest_bin(sizes, min(bins, len(sizes)))


def test_greedy_is_not_always_best_but_within_the_bound() -> None:
    sizes = [3, 3, 2, 2, 2]
    layout = balanced_layout([ParameterFact(f"p{i}", (size,), False) for i, size in enumerate(sizes)], 2)
    assert (max(f.num_parameters for f in layout.fragments), best_largest_bin(sizes, 2)) == (7, 6)
    assert layout.imbalance == pytest.approx(7 / 6)


def test_fewer_tensors_than_fragments_give_fewer_fragments() -> None:
    model = [ParameterFact("a", (4,), False), ParameterFact("b", (2,), False), ParameterFact("e", (9,), True)]
    assert names(balanced_layout(model, 24)) == [["e"], ["a"], ["b"]]


def test_one_fragment_holds_everything_and_is_no_embedding() -> None:
    layout = balanced_layout([ParameterFact("a", (4,), False), ParameterFact("e", (9,), True)], 1)
    assert names(layout) == [["a", "e"]] and not layout.fragments[0].embedding


def test_a_model_of_embeddings_alone_is_one_embedding_fragment() -> None:
    layout = balanced_layout([ParameterFact("e", (9,), True), ParameterFact("f", (3,), True)], 4)
    assert names(layout) == [["e", "f"]] and layout.fragments[0].embedding


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_fragment_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        balanced_layout([ParameterFact("a", (1,), False)], count)


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(UsageError, match="0 tensors"):
        balanced_layout([], 3)


def test_the_digest_tells_models_apart() -> None:
    model = [ParameterFact("a", (4, 2), False), ParameterFact("b", (3,), False)]
    changed = [
        [ParameterFact("a", (2, 4), False), model[1]],
        [ParameterFact("c", (4, 2), False), model[1]],
        [ParameterFact("a", (4, 2), True), model[1]],
        model[:1],
    ]
    digests = {balanced_layout(facts, 2).digest for facts in [model, *changed]}
    assert len(digests) == 5 and balanced_layout(model, 1).digest not in digests
