"""Radial-directional averaging and the weighted mean: their defining properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco_cli.algorithm.merge import Granularity, MergeRule, average, merge, rda, row_norms, spans
from diloco_cli.layout import Fragment, TensorSlot

SHAPES = [("bias", (5,)), ("matrix", (4, 6)), ("stack", (2, 3, 2))]
GRANULARITIES: list[Granularity] = ["fragment", "tensor", "row"]
RULES: list[MergeRule] = ["rda", "avg"]
quick = settings(max_examples=25, deadline=None)


def make_fragment() -> Fragment:
    slots, start = [], 0
    for name, shape in SHAPES:
        slots.append(TensorSlot(name, shape, start))
        start += slots[-1].num_elements
    return Fragment(tuple(slots), False)


FRAGMENT = make_fragment()
SIZE = FRAGMENT.num_parameters
floats = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
seeds = st.integers(0, 10**6)
weight_lists = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=5)


def drawn(seed: int, count: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) * scale for _ in range(count)]


def norms(flat: Tensor, granularity: Granularity) -> Tensor:
    return torch.cat([row_norms(span.of(flat)) for span in spans(FRAGMENT, granularity)])


def close(found: Tensor, expected: Tensor, relative: float = 1e-5) -> bool:
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    return bool(difference <= relative * torch.linalg.vector_norm(expected.double()) + 1e-30)


@pytest.mark.parametrize(("granularity", "count"), [("fragment", 1), ("tensor", 3), ("row", 1 + 4 + 2)])
def test_spans_cover_the_fragment_once(granularity: Granularity, count: int) -> None:
    found = spans(FRAGMENT, granularity)
    covered = [at for span in found for at in range(span.start, span.start + span.rows * span.width)]
    assert covered == list(range(SIZE)) and sum(span.rows for span in found) == count


@quick
@given(seeds, weight_lists, st.sampled_from(GRANULARITIES))
def test_every_norm_is_the_weighted_mean_of_norms(seed: int, weights: list[float], granularity: Granularity) -> None:
    deltas = drawn(seed, len(weights))
    merged = merge("rda", granularity, FRAGMENT, deltas, weights)
    mean = sum(norms(d, granularity) * w for d, w in zip(deltas, weights, strict=True)) / sum(weights)
    assert isinstance(mean, Tensor) and close(norms(merged, granularity), mean)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_one_learner_is_its_own_merge(rule: MergeRule, granularity: Granularity) -> None:
    (delta,) = drawn(1, 1)
    assert close(merge(rule, granularity, FRAGMENT, [delta], [37.0]), delta, 1e-6)


@quick
@given(seeds, weight_lists, st.floats(1e-3, 1e3), st.sampled_from(GRANULARITIES), st.sampled_from(RULES))
def test_scaling_all_weights_changes_nothing(
    seed: int, weights: list[float], factor: float, granularity: Granularity, rule: MergeRule
) -> None:
    deltas = drawn(seed, len(weights))
    scaled = merge(rule, granularity, FRAGMENT, deltas, [weight * factor for weight in weights])
    assert close(scaled, merge(rule, granularity, FRAGMENT, deltas, weights))


@quick
@given(seeds, weight_lists, st.floats(1e-6, 1e6), st.sampled_from(GRANULARITIES), st.sampled_from(RULES))
def test_scaling_all_deltas_scales_the_merge(
    seed: int, weights: list[float], factor: float, granularity: Granularity, rule: MergeRule
) -> None:
    deltas = drawn(seed, len(weights))
    scaled = merge(rule, granularity, FRAGMENT, [delta * factor for delta in deltas], weights)
    assert close(scaled, merge(rule, granularity, FRAGMENT, deltas, weights) * factor)


@quick
@given(seeds, weight_lists, st.sampled_from(RULES))
def test_rotating_the_space_rotates_the_merge_of_a_fragment(seed: int, weights: list[float], rule: MergeRule) -> None:
    deltas = drawn(seed, len(weights))
    rotation, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed + 1)))
    rotated = merge(rule, "fragment", FRAGMENT, [rotation @ delta for delta in deltas], weights)
    assert close(rotated, rotation @ merge(rule, "fragment", FRAGMENT, deltas, weights), 1e-4)


@quick
@given(seeds, weight_lists, st.sampled_from(GRANULARITIES))
def test_parallel_deltas_merge_as_their_mean(seed: int, weights: list[float], granularity: Granularity) -> None:
    (direction,) = drawn(seed, 1)
    deltas = [direction * (1 + index) for index in range(len(weights))]
    assert close(merge("rda", granularity, FRAGMENT, deltas, weights), average(deltas, weights))


def test_orthogonal_learners_keep_their_norm_where_a_mean_shrinks() -> None:
    deltas = [torch.zeros(SIZE) for _ in range(4)]
    for index, delta in enumerate(deltas):
        delta[index] = 2.0
    assert float(merge("rda", "fragment", FRAGMENT, deltas, [1.0] * 4).norm()) == pytest.approx(2.0)
    assert float(merge("avg", "fragment", FRAGMENT, deltas, [1.0] * 4).norm()) == pytest.approx(1.0)


def test_the_mean_is_weighted() -> None:
    deltas = [torch.full((SIZE,), 1.0), torch.full((SIZE,), 4.0)]
    assert torch.equal(average(deltas, [2.0, 1.0]), torch.full((SIZE,), 2.0))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_directions_that_cancel_fall_back_to_the_mean(granularity: Granularity) -> None:
    (delta,) = drawn(3, 1)
    deltas = [delta, delta * -3.0]
    assert close(merge("rda", granularity, FRAGMENT, deltas, [1.0, 1.0]), average(deltas, [1.0, 1.0]))


def test_only_the_rows_that_cancel_fall_back() -> None:
    a, b = drawn(4, 2)
    first_row = slice(5, 11)
    b[first_row] = -2 * a[first_row]
    merged = merge("rda", "row", FRAGMENT, [a, b], [1.0, 1.0])
    assert close(merged[first_row], (a + b)[first_row] / 2)
    assert close(norms(merged, "row")[2:], (norms(a, "row") + norms(b, "row"))[2:] / 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_movement_merges_to_no_movement(rule: MergeRule, granularity: Granularity) -> None:
    zero = torch.zeros(SIZE)
    assert torch.equal(merge(rule, granularity, FRAGMENT, [zero, zero], [1.0, 2.0]), zero)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_learner_that_stood_still_shortens_the_step_and_keeps_its_direction(granularity: Granularity) -> None:
    (delta,) = drawn(5, 1)
    assert close(merge("rda", granularity, FRAGMENT, [delta, torch.zeros(SIZE)], [1.0, 3.0]), delta / 4)


@pytest.mark.parametrize("rule", RULES)
def test_a_learner_without_weight_takes_no_part(rule: MergeRule) -> None:
    a, b = drawn(6, 2)
    poison = torch.full((SIZE,), float("nan"))
    assert torch.equal(
        merge(rule, "tensor", FRAGMENT, [a, poison, b], [1.0, 0.0, 2.0]),
        merge(rule, "tensor", FRAGMENT, [a, b], [1.0, 2.0]),
    )


def test_scalars_of_opposite_sign_and_equal_weight_are_averaged() -> None:
    """In one dimension there are two directions only, so that they cancel often."""
    scalar = Fragment((TensorSlot("scale", (), 0),), False)
    pair = [torch.tensor([3.0]), torch.tensor([-1.0])]
    assert float(merge("rda", "tensor", scalar, pair, [1.0, 1.0])) == 1.0
    assert float(merge("rda", "tensor", scalar, pair, [3.0, 1.0])) == pytest.approx(2.5)


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(ValueError, match="weights are 0"):
        merge("rda", "tensor", FRAGMENT, drawn(7, 2), [0.0, 0.0])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e18, 1e30])
def test_extreme_but_normal_magnitudes_stay_finite_and_keep_their_norm(granularity: Granularity, scale: float) -> None:
    deltas = drawn(8, 3, scale)
    merged = merge("rda", granularity, FRAGMENT, deltas, [1.0, 2.0, 3.0])
    assert bool(torch.isfinite(merged).all())
    assert close(
        merged.double() / scale, merge("rda", granularity, FRAGMENT, drawn(8, 3), [1.0, 2.0, 3.0]).double(), 1e-4
    )


@pytest.mark.parametrize("tiny", [1e-39, 1e-40, 1e-44])
def test_subnormal_deltas_never_merge_to_nan(tiny: float) -> None:
    a, b = torch.zeros(SIZE), torch.zeros(SIZE)
    a[0], b[1] = tiny, tiny
    assert bool(torch.isfinite(rda([a, b], [1.0, 1.0], spans(FRAGMENT, "tensor"))).all())


@quick
@given(
    st.lists(
        st.lists(floats, min_size=SIZE, max_size=SIZE),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(GRANULARITIES),
    st.sampled_from(RULES),
)
def test_finite_deltas_never_merge_to_anything_else(values: list[list[float]], granularity: Any, rule: Any) -> None:
    """Norms below 1e-38 are a known exception, with a test of its own."""
    deltas = [torch.tensor(v) for v in values]
    if any(bool(((n > 0) & (n < 1e-36)).any()) for delta in deltas for n in [norms(delta, granularity)]):
        return
    assert bool(torch.isfinite(merge(rule, granularity, FRAGMENT, deltas, [1.0] * len(deltas))).all())


def test_the_same_inputs_give_the_same_bits() -> None:
    once, again = (merge("rda", "row", FRAGMENT, drawn(9, 4), [1.0, 5.0, 2.0, 3.0]) for _ in range(2))
    assert torch.equal(once, again)
