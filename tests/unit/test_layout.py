"""Fragments: a disjoint cover, even, and the same on every machine."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.settings import ModelSettings, RunSettings, SyncSettings
from diloco_cli.errors import UsageError
from diloco_cli.layout import (
    Fragment,
    Layout,
    ParameterFact,
    TensorSlot,
    balanced_layout,
    contradiction_in_layout,
    digest_of,
    layout_warning,
    make_layout,
    with_buffers,
)
from diloco_cli.tasks.build import build_model_on_meta
from diloco_cli.tensors.flat import parameter_facts

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
models = st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=12).map(
    lambda drawn: [ParameterFact(f"p{i}", shape, embedding) for i, (shape, embedding) in enumerate(drawn)]
)
quick = settings(max_examples=80)


def pieces(layout: Layout) -> list[list[tuple[str, tuple[int, int] | None]]]:
    return [[(slot.name, slot.rows) for slot in fragment.tensors] for fragment in layout.fragments]


@quick
@given(models, st.integers(1, 8))
def test_every_row_lies_in_one_fragment_without_gap_or_overlap(model: list[ParameterFact], count: int) -> None:
    layout = balanced_layout(model, count)
    rows: dict[str, list[int]] = {fact.name: [] for fact in model}
    for fragment in layout.fragments:
        for slot in fragment.tensors:
            rows[slot.name] += range(*slot.rows) if slot.rows else range(slot.shape[0] if slot.shape else 1)
        ends = [slot.start + slot.num_elements for slot in fragment.tensors]
        assert [slot.start for slot in fragment.tensors] == [0, *ends[:-1]] and ends[-1] == fragment.num_parameters
    assert {name: sorted(found) for name, found in rows.items()} == {
        fact.name: list(range(fact.shape[0] if fact.shape else 1)) for fact in model
    }
    assert 1 <= len(layout.fragments) <= count
    assert layout.num_parameters == sum(prod(fact.shape) for fact in model)


@quick
@given(models, st.integers(2, 8))
def test_embeddings_stand_alone_in_the_first_fragments(model: list[ParameterFact], count: int) -> None:
    layout = balanced_layout(model, count)
    embeddings = {fact.name for fact in model if fact.embedding}
    flags = [fragment.embedding for fragment in layout.fragments]
    assert flags == sorted(flags, reverse=True) and any(flags) == bool(embeddings)
    for fragment in layout.fragments:
        assert {slot.name in embeddings for slot in fragment.tensors} == {fragment.embedding}


@quick
@given(models, st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(model: list[ParameterFact], count: int, draw: random.Random) -> None:
    shuffled = list(model)
    draw.shuffle(shuffled)
    assert balanced_layout(shuffled, count) == balanced_layout(model, count)


@pytest.mark.parametrize("count", [12, 24, 48])
@pytest.mark.parametrize("preset", ["gpt-small", "moe-micro", "vit-nano"])
def test_the_largest_fragment_is_at_most_a_tenth_larger_than_the_mean(preset: str, count: int) -> None:
    model = build_model_on_meta(RunSettings("run", model=ModelSettings(preset=preset)))
    layout = balanced_layout(parameter_facts(model), count)
    assert len(layout.fragments) == count
    assert max(f.num_parameters for f in layout.fragments) * count <= 1.1 * layout.num_parameters


def test_a_large_tensor_is_cut_by_rows_and_a_vector_only_beyond_the_even_fragment() -> None:
    facts = [ParameterFact("big", (10, 8), False), ParameterFact("v", (30,), False), ParameterFact("w", (20,), False)]
    assert pieces(balanced_layout(facts, 2)) == [[("big", (0, 8))], [("big", (8, 10)), ("v", None), ("w", None)]]
    assert pieces(balanced_layout([*facts[1:]], 4)) == [
        [("v", (0, 12))], [("v", (12, 25))], [("v", (25, 30)), ("w", (0, 7))], [("w", (7, 20))]
    ]  # fmt: skip


def test_rows_that_are_larger_than_an_even_fragment_leave_the_others_even() -> None:
    facts = [ParameterFact("row", (1, 50), False), ParameterFact("rows", (20, 2), False)]
    assert [f.num_parameters for f in balanced_layout(facts, 5).fragments] == [50, 10, 10, 10, 10]


def test_a_large_embedding_fills_fragments_of_its_own() -> None:
    model = [ParameterFact("embedding", (60, 10), True), *(ParameterFact(f"w{i}", (100,), False) for i in range(6))]
    layout = balanced_layout(model, 4)
    assert [(fragment.embedding, fragment.num_parameters) for fragment in layout.fragments] == [
        (True, 300), (True, 300), (False, 300), (False, 300),
    ]  # fmt: skip


def test_one_fragment_holds_everything_and_is_no_embedding() -> None:
    layout = balanced_layout([ParameterFact("a", (4,), False), ParameterFact("e", (9,), True)], 1)
    assert pieces(layout) == [[("a", None), ("e", None)]] and not layout.fragments[0].embedding


def test_a_model_of_embeddings_alone_has_embedding_fragments_alone() -> None:
    layout = balanced_layout([ParameterFact("e", (9,), True), ParameterFact("f", (3,), True)], 4)
    assert len(layout.fragments) == 4 and all(fragment.embedding for fragment in layout.fragments)


def test_fewer_rows_than_fragments_give_fewer_fragments_and_it_is_said() -> None:
    model = [ParameterFact(f"w{i}", (1, 4), False) for i in range(12)]
    sync, enough = SyncSettings(fragments=24), SyncSettings(fragments=3)
    assert len(make_layout(model, sync).fragments) == 12
    assert "12 fragments instead of the 24" in (layout_warning(make_layout(model, sync), sync) or "")
    assert layout_warning(make_layout(model, enough), enough) is None


@pytest.mark.parametrize(("facts", "count"), [([ParameterFact("a", (1,), False)], 0), ([], 3)])
def test_an_empty_model_or_layout_is_refused(facts: list[ParameterFact], count: int) -> None:
    with pytest.raises(UsageError, match="fragments"):
        balanced_layout(facts, count)


def test_the_digest_tells_models_apart() -> None:
    model = [ParameterFact("a", (4, 2), False), ParameterFact("b", (2, 2), True)]
    changed = [
        [ParameterFact("a", (2, 4), False), model[1]],
        [ParameterFact("c", (4, 2), False), model[1]],
        [model[0], ParameterFact("b", (2, 2), False)],
        [ParameterFact("a", (4, 2), False, "bfloat16"), model[1]],
    ]
    digests = {balanced_layout(facts, 2).digest for facts in [model, *changed]}
    assert len(digests) == 5 and balanced_layout(model, 1).digest not in digests


def test_the_digest_covers_which_rows_lie_where() -> None:
    """No two versions of this code may cut a tensor differently and take each other for the same layout."""
    cuts = [Fragment((TensorSlot("w", (4, 6), 0, rows=rows),), False) for rows in ((0, 2), (2, 4), (0, 1), (1, 4))]
    assert digest_of(cuts[:2]) != digest_of(cuts[2:])
    whole = digest_of([Fragment((TensorSlot("w", (4, 6), 0),), False)])
    assert whole != digest_of([Fragment((TensorSlot("w", (4, 6), 0, rows=(0, 4)),), False)])


def test_buffers_lie_in_the_first_fragment_and_change_the_digest_alone() -> None:
    plain = balanced_layout([ParameterFact("e", (8, 2), True), ParameterFact("w", (4, 4), False)], 2)
    facts = [ParameterFact("n", (), False, "int64"), ParameterFact("m", (3,), False, "bfloat16")]
    layout = with_buffers(plain, facts)
    first, second = layout.fragments
    assert first.embedding and [(b.name, b.start) for b in first.buffers] == [("m", 0), ("n", 8)]
    assert (first.num_parameters, first.buffer_bytes, first.size) == (16, 16, 20) and not second.buffers
    assert layout.num_parameters == plain.num_parameters and layout.digest != plain.digest
    assert with_buffers(plain, facts[::-1]) == layout and with_buffers(plain, []) == plain
    assert contradiction_in_layout(layout) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "complex64"},
        {"dtype": "object"},
        {"rows": (0, 1)},
        {"start": 4},
        {"shape": (-1,)},
        {"shape": (2**60,)},
    ],
)
def test_a_buffer_that_no_model_has_is_a_contradiction(wrong: dict[str, Any]) -> None:
    slot = replace(TensorSlot("b", (3,), 0), **wrong)
    layout = Layout((Fragment((TensorSlot("w", (3,), 0),), False, (slot,)),), "d")
    assert contradiction_in_layout(layout) is not None
