"""Fragments: a disjoint cover, balanced, and the same on every machine."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.settings import SyncSettings
from diloco_cli.errors import UsageError
from diloco_cli.layout import (
    Fragment,
    Layout,
    ParameterFact,
    TensorSlot,
    balanced_layout,
    digest_of,
    layout_warning,
    make_layout,
)

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
models = st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=12).map(
    lambda drawn: [ParameterFact(f"p{i}", shape, embedding) for i, (shape, embedding) in enumerate(drawn)]
)
quick = settings(max_examples=80, deadline=None)
switches = st.booleans()


def made(model: list[ParameterFact], count: int, split_rows: bool = False) -> Layout:
    return make_layout(model, SyncSettings(fragments=count, split_rows=split_rows))


def names(layout: Layout) -> list[list[str]]:
    return [[slot.name for slot in fragment.tensors] for fragment in layout.fragments]


@quick
@given(models, st.integers(1, 8), switches)
def test_every_row_lies_in_one_fragment_without_gap_or_overlap(
    model: list[ParameterFact], count: int, split: bool
) -> None:
    layout = made(model, count, split_rows=split)
    rows: dict[str, list[int]] = {fact.name: [] for fact in model}
    for fragment in layout.fragments:
        for slot in fragment.tensors:
            rows[slot.name] += range(*slot.rows) if slot.rows else range(slot.shape[0] if slot.shape else 1)
        ends = [slot.start + slot.num_elements for slot in fragment.tensors]
        assert [slot.start for slot in fragment.tensors] == [0, *ends[:-1]] and ends[-1] == fragment.num_parameters
    assert {name: sorted(found) for name, found in rows.items()} == {
        fact.name: list(range(fact.shape[0] if fact.shape else 1)) for fact in model
    }
    assert 1 <= len(layout.fragments) <= count and all(fragment.tensors for fragment in layout.fragments)
    assert layout.num_parameters == sum(prod(fact.shape) for fact in model)


@quick
@given(models, st.integers(2, 8), switches)
def test_embeddings_stand_alone_in_the_first_fragments(model: list[ParameterFact], count: int, split: bool) -> None:
    layout = made(model, count, split_rows=split)
    embeddings = {fact.name for fact in model if fact.embedding}
    flags = [fragment.embedding for fragment in layout.fragments]
    assert flags == sorted(flags, reverse=True) and any(flags) == bool(embeddings)
    for fragment in layout.fragments:
        assert {slot.name in embeddings for slot in fragment.tensors} == {fragment.embedding}
    assert split or sum(flags) <= 1


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


def imbalance(layout: Layout) -> float:
    """Largest fragment over the mean."""
    sizes = [fragment.num_parameters for fragment in layout.fragments]
    return max(sizes) * len(sizes) / sum(sizes)


def test_greedy_is_not_always_best_but_within_the_bound() -> None:
    sizes = [3, 3, 2, 2, 2]
    layout = balanced_layout([ParameterFact(f"p{i}", (size,), False) for i, size in enumerate(sizes)], 2)
    assert (max(f.num_parameters for f in layout.fragments), best_largest_bin(sizes, 2)) == (7, 6)
    assert imbalance(layout) == pytest.approx(7 / 6)


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


def test_the_digest_tells_layouts_of_one_model_apart() -> None:
    model = [ParameterFact(f"blocks.{i}.w", (8, 1 + i), False) for i in range(6)]
    model += [ParameterFact("embedding", (40, 4), True), ParameterFact("head", (40, 4), False, head=True)]
    assert made(model, 4).digest != made(model, 4, split_rows=True).digest
    assert made(model, 4).digest == balanced_layout(model, 4).digest


def test_the_digest_covers_which_rows_lie_where() -> None:
    """No two versions of this code may cut a tensor differently and take each other for the same layout."""
    pieces = [Fragment((TensorSlot("w", (4, 6), 0, rows=rows),), False) for rows in ((0, 2), (2, 4), (0, 1), (1, 4))]
    assert digest_of(pieces[:2]) != digest_of(pieces[2:]) and digest_of(pieces[:2]) != digest_of(pieces[1::-1])


# -- oversized tensors, too few tensors ------------------------------------------------------------------


@quick
@given(models, st.integers(1, 8))
def test_pieces_are_no_larger_than_the_ideal_fragment_or_one_row(model: list[ParameterFact], count: int) -> None:
    layout = made(model, count, split_rows=True)
    ideal = max(1, layout.num_parameters // count)
    for slot in (slot for fragment in layout.fragments for slot in fragment.tensors):
        assert slot.num_elements <= ideal or slot.rows is None or slot.rows[1] - slot.rows[0] == 1
        whole = prod(slot.shape) <= ideal or len(slot.shape) == 0 or slot.shape[0] == 1
        assert (slot.rows is None) == (whole or slot.piece_shape == slot.shape)


def test_splitting_evens_out_what_whole_tensors_cannot() -> None:
    model = [ParameterFact("big", (100, 8), False), *(ParameterFact(f"small{i}", (20,), False) for i in range(10))]
    assert imbalance(made(model, 5)) == 4.0
    layout = made(model, 5, split_rows=True)
    assert imbalance(layout) == 1.0
    pieces = [slot for fragment in layout.fragments for slot in fragment.tensors if slot.name == "big"]
    assert sorted(slot.rows or () for slot in pieces) == [(0, 25), (25, 50), (50, 75), (75, 100)]


def test_a_split_embedding_fills_fragments_of_its_own() -> None:
    model = [ParameterFact("embedding", (60, 10), True), *(ParameterFact(f"w{i}", (100,), False) for i in range(6))]
    layout = made(model, 4, split_rows=True)
    assert [(fragment.embedding, fragment.num_parameters) for fragment in layout.fragments] == [
        (True, 300), (True, 300), (False, 300), (False, 300),
    ]  # fmt: skip


def test_too_few_tensors_are_said_aloud() -> None:
    model = [ParameterFact(f"w{i}", (4, 4), False) for i in range(12)]
    sync, enough = SyncSettings(fragments=24), SyncSettings(fragments=3)
    assert "tensors" in (layout_warning(make_layout(model, sync), sync) or "")
    assert layout_warning(make_layout(model, enough), enough) is None
