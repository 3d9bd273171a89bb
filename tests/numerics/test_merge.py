"""Radial-directional averaging and the weighted mean: their defining properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco_cli.layout import Fragment, TensorSlot
from diloco_cli.tensors.codecs import CHUNK, Read, codec, read_all
from diloco_cli.tensors.merge import Cut, DeltaSource, Granularity, MergeRule, Merging, Span, measured_norms, spans
from diloco_cli.tensors.payload import views

SHAPES = [("bias", (5,)), ("matrix", (4, 6)), ("stack", (2, 3, 2))]
GRANULARITIES: list[Granularity] = ["tensor", "row"]
RULES: list[MergeRule] = ["rda", "avg"]
quick = settings(max_examples=25)


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


def block(span: Span, flat: Tensor) -> Tensor:
    return flat[span.start : span.start + span.rows * span.width].view(span.rows, span.width)


def norms(flat: Tensor, granularity: Granularity) -> Tensor:
    return torch.cat([block(span, flat).double().norm(dim=1) for span in spans(FRAGMENT, granularity)])


def merge(
    rule: MergeRule, granularity: Granularity, fragment: Fragment, deltas: list[Tensor], weights: list[float]
) -> Tensor:
    """One fragment's merged delta, [n] float32, from [n] float32 deltas."""
    cut = Cut(spans(fragment, granularity if rule == "rda" else "tensor"))
    sources = [DeltaSource(read, measured_norms(cut, read)) for read in map(reader_of, deltas)]
    return all_blocks(Merging(rule, cut, sources, weights))


def reader_of(delta: Tensor) -> Read:
    return lambda start, room: delta[start : start + room.numel()]


def all_blocks(merging: Merging) -> Tensor:
    merged = torch.empty(merging.cut.size)
    merging.each(torch.empty_like(merged), lambda start, block: merged[start : start + block.numel()].copy_(block))
    return merged


def average(deltas: list[Tensor], weights: list[float]) -> Tensor:
    """The formula, in float64."""
    return sum(d.double() * w for d, w in zip(deltas, weights, strict=True)) / sum(weights)  # type: ignore[return-value]


def close(found: Tensor, expected: Tensor, relative: float = 1e-5) -> bool:
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    return bool(difference <= relative * torch.linalg.vector_norm(expected.double()) + 1e-30)


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
@given(seeds, weight_lists, st.sampled_from(GRANULARITIES), st.sampled_from(RULES))
def test_rotating_what_a_norm_covers_rotates_the_merge(
    seed: int, weights: list[float], granularity: Granularity, rule: MergeRule
) -> None:
    """The space of the whole fragment, of each tensor, or of each row."""
    deltas, generator = drawn(seed, len(weights)), torch.Generator().manual_seed(seed + 1)
    rotation = torch.zeros(SIZE, SIZE)
    for span in spans(FRAGMENT, granularity):
        for row in range(span.rows):
            at = slice(span.start + row * span.width, span.start + (row + 1) * span.width)
            rotation[at, at], _ = torch.linalg.qr(torch.randn(span.width, span.width, generator=generator))
    rotated = merge(rule, granularity, FRAGMENT, [rotation @ delta for delta in deltas], weights)
    assert close(rotated, rotation @ merge(rule, granularity, FRAGMENT, deltas, weights), 1e-4)


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
def test_a_learner_without_weight_takes_no_part(rule: MergeRule) -> None:
    a, b = drawn(6, 2)
    poison = torch.full((SIZE,), float("nan"))
    assert torch.equal(
        merge(rule, "tensor", FRAGMENT, [a, poison, b], [1.0, 0.0, 2.0]),
        merge(rule, "tensor", FRAGMENT, [a, b], [1.0, 2.0]),
    )


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
    assert bool(torch.isfinite(merge("rda", "tensor", FRAGMENT, [a, b], [1.0, 1.0])).all())


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


# -- chunk by chunk ---------------------------------------------------------------------------------------------


def reference(rule: MergeRule, covered: list[Span], deltas: list[Tensor], weights: list[float]) -> Tensor:
    """The two formulas at the head of merge.py, in float64, whole tensors at once."""
    if rule == "avg":
        return average(deltas, weights)
    merged, total = torch.empty(deltas[0].numel(), dtype=torch.float64), sum(weights)
    for span in covered:
        blocks = [block(span, delta).double() for delta in deltas]
        radius = sum(w * b.norm(dim=1) for w, b in zip(weights, blocks, strict=True)) / total
        mean = sum(w * torch.nn.functional.normalize(b, dim=1, eps=0) for w, b in zip(weights, blocks, strict=True))
        block(span, merged).copy_(radius[:, None] * torch.nn.functional.normalize(mean, dim=1, eps=0))  # type: ignore[index,arg-type]
    return merged


def fragment_of(*shapes: tuple[int, ...]) -> Fragment:
    slots, start = [], 0
    for index, shape in enumerate(shapes):
        slots.append(TensorSlot(f"t{index}", shape, start))
        start += slots[-1].num_elements
    return Fragment(tuple(slots), False)


LARGE = [  # of two blocks and more
    fragment_of((3 * CHUNK + 17,)),
    fragment_of((7,), (500, 300), (3, CHUNK + 1), (2, 2), (4096, 16)),
    fragment_of((CHUNK,), (1, CHUNK), (2, CHUNK // 2), (1,)),
    fragment_of((CHUNK - 1, 1), (5, 3), ()),
]


@pytest.mark.parametrize("fragment", LARGE, ids=range(len(LARGE)))
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rule", RULES)
def test_a_merge_over_chunk_borders_is_that_of_the_formula(
    fragment: Fragment, granularity: Granularity, rule: MergeRule
) -> None:
    generator = torch.Generator().manual_seed(fragment.num_parameters)
    deltas = [torch.randn(fragment.num_parameters, generator=generator) for _ in range(3)]
    found = merge(rule, granularity, fragment, deltas, [1.0, 2.0, 0.5])
    expected = reference(rule, spans(fragment, granularity), deltas, [1.0, 2.0, 0.5])
    worst = (found.double() - expected).abs().max() / expected.abs().max()
    assert float(worst) < 2e-6


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_merge_reads_payloads_as_if_they_had_been_decoded(name: str, granularity: Granularity) -> None:
    fragment = LARGE[1]
    deltas = [torch.randn(fragment.num_parameters, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    spec = codec(name).spec(fragment.num_parameters)
    payloads = [views(codec(name).to_bytes(delta), spec) for delta in deltas]
    decoded = [read_all(fragment.num_parameters, codec(name).reader(payload)) for payload in payloads]
    cut = Cut(spans(fragment, granularity))
    reads = [codec(name).reader(payload) for payload in payloads]
    sources = [DeltaSource(read, measured_norms(cut, read), claimed=True) for read in reads]
    merging = Merging("rda", cut, sources, [1.0, 2.0, 0.5])
    found = all_blocks(merging)
    assert not merging.unsound
    assert torch.equal(found, merge("rda", granularity, fragment, decoded, [1.0, 2.0, 0.5]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at", [0, 3])
def test_a_wrong_norm_anywhere_is_found_and_nothing_is_used_of_rda(rule: MergeRule, at: int) -> None:
    cut = Cut(spans(LARGE[1], "tensor"))
    read = reader_of(torch.randn(cut.size, generator=torch.Generator().manual_seed(1)))
    norms = measured_norms(cut, read)
    norms[at] *= 1.001
    merging = Merging(rule, cut, [DeltaSource(read, norms, claimed=True), DeltaSource(read, norms)], [1.0, 1.0])
    used: list[int] = []
    merging.each(torch.empty(cut.size), lambda start, _: used.append(start))
    assert merging.unsound == {0: "bad_norms"} and (rule == "avg" or not used)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_scaled_source_counts_as_its_scaled_delta(rule: MergeRule, granularity: Granularity) -> None:
    a, b = drawn(12, 2)
    cut = Cut(spans(FRAGMENT, granularity))

    def source(delta: Tensor, scale: float) -> DeltaSource:
        read = reader_of(delta)
        return DeltaSource(read, measured_norms(cut, read), scale=scale)

    found = all_blocks(Merging(rule, cut, [source(a, 1.0), source(b, 0.25)], [1.0, 3.0]))
    assert close(found, merge(rule, granularity, FRAGMENT, [a, b / 4], [1.0, 3.0]), 1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_each_source_has_its_cosine_to_the_weighted_sum_of_the_others(rule: MergeRule) -> None:
    size = 20 * CHUNK + 5  # more than are sampled
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(size, generator=generator)
    deltas = [common + torch.randn(size, generator=generator) for _ in range(3)] + [-common, torch.zeros(size)]
    cut = Cut([Span(0, 1, size)])
    weights, scales = [1.0, 4.0, 0.5, 1.0, 1.0], [1.0, 0.5, 1.0, 1.0, 1.0]
    reads = list(map(reader_of, deltas))
    sources = [DeltaSource(r, measured_norms(cut, r), scale=by) for r, by in zip(reads, scales, strict=True)]
    merging = Merging(rule, cut, sources, weights)
    all_blocks(merging)
    parts = [delta.double() * by * weight for delta, by, weight in zip(deltas, scales, weights, strict=True)]
    rests = [torch.stack(parts).sum(0) - part for part in parts]
    expected = [float(torch.cosine_similarity(one, rest, dim=0)) for one, rest in zip(parts, rests, strict=True)]
    assert merging.cosines() == pytest.approx(expected, abs=0.01)
    assert merging.cosines()[3] < -0.5 and merging.cosines()[4] == 0.0


@pytest.mark.parametrize("others", [0, 2])
def test_a_source_that_has_no_others_or_empty_ones_has_no_cosine(others: int) -> None:
    """Not even one of what rounding leaves."""
    cut = Cut([Span(0, 1, 1000)])
    reads = [reader_of(torch.randn(1000)), *[reader_of(torch.zeros(1000))] * others]
    merging = Merging("avg", cut, [DeltaSource(read, measured_norms(cut, read)) for read in reads], [0.3] * len(reads))
    all_blocks(merging)
    assert merging.cosines() == (0.0,) * len(reads)


def test_a_source_from_an_older_base_has_the_cosine_of_what_its_learner_made() -> None:
    """Anchored anew it holds what the others did since, which would be the same in the deltas of two such learners."""
    first, second = (torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    since, cut = 100 * torch.ones(1000), Cut([Span(0, 1, 1000)])
    anew = [reader_of(made + since) for made in (first, second)]
    pairs = zip(anew, map(reader_of, (first, second)), strict=True)
    sources = [DeltaSource(read, measured_norms(cut, read), own=own) for read, own in pairs]
    merging = Merging("avg", cut, sources, [1.0, 1.0])
    all_blocks(merging)
    assert max(map(abs, merging.cosines())) < 0.15


def test_a_piece_of_a_tensor_has_norms_of_its_own() -> None:
    half = Fragment((TensorSlot("w", (4, 6), 0, rows=(0, 2)), TensorSlot("w", (4, 6), 12, rows=(2, 4))), False)
    assert spans(half, "tensor") == [Span(0, 1, 12), Span(12, 1, 12)]
    assert spans(half, "row") == [Span(0, 2, 6), Span(12, 2, 6)]
