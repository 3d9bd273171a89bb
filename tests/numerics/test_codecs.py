"""What travels: error of a round trip and bits per parameter, measured on the bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from diloco_cli.errors import UsageError
from diloco_cli.methods import CODECS
from diloco_cli.plan.link import CODEC_BITS
from diloco_cli.tensors.codecs import CHUNK, INT4_BLOCK, INT8_BLOCK, PAGE, Tensors, codec
from diloco_cli.tensors.payload import PayloadError, header_bytes, views

SIZES = [1, 2, 63, 64, 65, 255, 256, 257, 1000, PAGE - 1, PAGE, PAGE + 1, PAGE + 3, CHUNK, CHUNK + 1, CHUNK + PAGE + 5]


def normal(size: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)) * scale


def encoded(name: str, values: torch.Tensor) -> Tensors:
    return views(codec(name).to_bytes(values), codec(name).spec(values.numel()))


def round_trip(name: str, values: torch.Tensor) -> torch.Tensor:
    return codec(name).from_bytes(codec(name).to_bytes(values), values.numel())


@pytest.mark.parametrize("size", SIZES)
def test_fp32_is_exact(size: int) -> None:
    assert torch.equal(round_trip("fp32", normal(size)), normal(size))


@pytest.mark.parametrize("size", SIZES)
def test_bf16_rounds_to_eight_bits_of_mantissa(size: int) -> None:
    values = normal(size)
    assert bool(((round_trip("bf16", values) - values).abs() <= values.abs() * 2**-8).all())
    assert torch.equal(round_trip("bf16", values), values.bfloat16().float())


def within_its_steps(name: str, values: torch.Tensor) -> bool:
    """Every value within what the table of codecs.py states, in float64: half a step, and of int4's scale 2^-8 more,
    which a bfloat16 rounds away. Blocks of steps below the normal range are zeros."""
    block, most, slack = {"int8": (INT8_BLOCK, 127, 127e-6), "int4": (INT4_BLOCK, 7, 7 * 2**-8)}[name]
    found, exact = round_trip(name, values).double().numpy(), values.double().numpy()
    for start in range(0, len(exact), block):
        part, decoded = exact[start : start + block], found[start : start + block]
        step = np.abs(part).max() / most
        if step < 1.17e-38:
            if not (np.abs(decoded - part) <= np.abs(part).max() * (1 + 2**-8)).all():
                return False
        elif not (np.abs(decoded - part) <= step * (0.5 + slack)).all():
            return False
    return True


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("size", SIZES)
def test_integers_are_within_half_a_step_of_their_block(name: str, size: int) -> None:
    assert within_its_steps(name, normal(size) * torch.logspace(-6, 6, size))


floats = st.floats(-(2.0**120), 2.0**120, width=32, allow_subnormal=True)
vectors = arrays(np.float32, st.integers(1, 3 * INT8_BLOCK + 2), elements=floats, fill=floats)
quick = settings(max_examples=60)


@quick
@given(vectors, st.sampled_from(["int8", "int4"]))
def test_any_finite_vector_comes_back_within_its_steps(drawn: np.ndarray, name: str) -> None:  # type: ignore[type-arg]
    assert within_its_steps(name, torch.from_numpy(drawn.copy()))


@quick
@given(vectors, st.sampled_from(list(CODECS)))
def test_encoding_is_odd(drawn: np.ndarray, name: str) -> None:  # type: ignore[type-arg]
    """No codec leans to one sign, whatever the values."""
    values = torch.from_numpy(drawn.copy())
    assert torch.equal(round_trip(name, -values), -round_trip(name, values))


@pytest.mark.parametrize(("name", "slope"), [("fp32", 0.0), ("bf16", 1e-5), ("int8", 2e-5), ("int4", 2e-3)])
def test_errors_cancel_over_many_values(name: str, slope: float) -> None:
    """Unbiased on average: neither the mean nor the length along the true direction moves. Half a million normal
    values; the mean of the errors must lie within 4 of its standard errors."""
    values = normal(1 << 19)
    error = (round_trip(name, values) - values).double()
    assert abs(float(error.mean())) <= 4 * float(error.std()) / (1 << 19) ** 0.5
    assert abs(float(error @ values.double()) / float(values.double() @ values.double())) <= slope


@pytest.mark.parametrize(("name", "bits", "least", "most"), [("int8", 8.125, 0.003, 0.01), ("int4", 4.25, 0.09, 0.12)])
def test_an_integer_codec_costs_few_bits_and_errs_as_its_steps_say(
    name: str, bits: float, least: float, most: float
) -> None:
    """The absmax of 256 normal values is about 2.8 sigma, of 64 about 2.5: 2.8 / 127 / sqrt(12), and 2.5 / 7 / sqrt(12)
    = 0.103."""
    values = normal(1 << 16)
    assert CODEC_BITS[name] == bits
    assert least < float((round_trip(name, values) - values).norm() / values.norm()) < most


def test_int4_by_hand() -> None:
    """Steps of 1: the first page's halves are nibbles of the same bytes, and so are those of the rest."""
    values = torch.tensor([7.0, -7.0, 2.5, 3.5, -0.5, -1.5, 0.4])
    tensors = encoded("int4", values)
    assert tensors["scales"].tolist() == [1.0]
    counts = [7, -7, 2, 4, 0, -2, 0, 0]  # ties to even, and nothing in the eighth place
    expected = [(low & 15) | ((high & 15) << 4) for low, high in zip(counts[:4], counts[4:], strict=True)]
    assert tensors["packed"].view(torch.uint8).tolist() == expected
    assert round_trip("int4", values).tolist() == counts[:7]


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("size", [1, 300, CHUNK, 2 * CHUNK + PAGE + 77])
def test_reading_chunk_by_chunk_gives_what_decoding_gives(name: str, size: int) -> None:
    values = normal(size)
    tensors, whole = encoded(name, values), round_trip(name, values)
    assert torch.equal(values, normal(size)), "a codec leaves its input alone"
    read, room = codec(name).reader(tensors), torch.empty(CHUNK)
    for start in reversed(range(0, size, CHUNK)):
        k = min(CHUNK, size - start)
        assert torch.equal(read(start, room[:k]), whole[start : start + k])


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_never_arrives_finite(name: str, poison: float) -> None:
    """A receiver must be able to see it, and only the block it is in may be lost."""
    values = normal(600)
    values[3] = poison
    found = round_trip(name, values)
    assert not bool(torch.isfinite(found[3])) and bool(torch.isfinite(found[INT8_BLOCK:]).all())


@pytest.mark.parametrize("name", list(CODECS))
def test_the_stated_bits_are_those_of_the_payload_scales_included(name: str) -> None:
    size = 1 << 18
    payload = codec(name).to_bytes(normal(size))
    header = len(header_bytes(codec(name).spec(size)))
    assert (len(payload) - header) * 8 / size == CODEC_BITS[name]
    assert header * 8 / size < 0.01


@pytest.mark.parametrize("name", list(CODECS))
def test_a_payload_of_another_length_or_codec_is_refused(name: str) -> None:
    payload = codec(name).to_bytes(normal(300))
    with pytest.raises(PayloadError):
        codec(name).from_bytes(payload, 301)
    for other in CODECS:
        if other != name:
            with pytest.raises(PayloadError):
                codec(other).from_bytes(payload, 300)


def test_an_unknown_codec_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="fp32, bf16, int8, int4"):
        codec("int3")


@pytest.mark.parametrize(("name", "absmax"), [("int8", 1.4e-36), ("int4", 8e-38)])
def test_blocks_with_steps_below_the_normal_range_are_zeros_and_their_neighbours_are_not(
    name: str, absmax: float
) -> None:
    values = torch.full((2 * INT8_BLOCK,), absmax)
    values[INT8_BLOCK:] *= 4
    found = round_trip(name, values)
    assert not found[:INT8_BLOCK].any() and bool((found[INT8_BLOCK:] > 0).all())
