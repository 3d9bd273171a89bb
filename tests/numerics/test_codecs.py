"""What travels: error of a round trip and bits per parameter, measured on the bytes."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.algorithm.codecs import CODECS, INT8_BLOCK, codec
from diloco_cli.algorithm.payload import PayloadError, header_bytes
from diloco_cli.errors import UsageError

SIZES = [1, 2, 255, 256, 257, 1000, 65_536, 65_537, 66_000]


def normal(size: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)) * scale


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


@pytest.mark.parametrize("size", SIZES)
def test_int8_is_within_half_a_step_of_its_block(size: int) -> None:
    values = normal(size) * torch.logspace(-6, 6, size)
    error = (round_trip("int8", values) - values).abs()
    for start in range(0, size, INT8_BLOCK):
        block = slice(start, start + INT8_BLOCK)
        step = float(values[block].abs().max()) / 127
        assert float(error[block].max()) <= step * (0.5 + 1e-4)


def test_int8_keeps_the_largest_value_of_a_block_and_all_zeros() -> None:
    values = torch.zeros(600)
    values[300] = -7.5
    found = round_trip("int8", values)
    assert float(found[300]) == pytest.approx(-7.5, rel=1e-6) and int((found != 0).sum()) == 1


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("size", [1, 300])
def test_zeros_stay_zeros(name: str, size: int) -> None:
    assert torch.equal(round_trip(name, torch.zeros(size)), torch.zeros(size))


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
    assert (len(payload) - header) * 8 / size == codec(name).bits
    assert header * 8 / size < 0.01


def test_int8_costs_a_quarter_of_fp32_and_its_error_is_small() -> None:
    values = normal(1 << 16)
    assert codec("int8").bits / codec("fp32").bits < 0.26
    relative = float((round_trip("int8", values) - values).norm() / values.norm())
    assert 0.003 < relative < 0.01  # absmax of 256 normal values is about 2.8 sigma: 2.8 / 127 / sqrt(12)


@pytest.mark.parametrize("name", list(CODECS))
def test_encoding_is_deterministic_and_leaves_its_input_alone(name: str) -> None:
    values, kept = normal(1000), normal(1000)
    assert codec(name).to_bytes(values) == codec(name).to_bytes(values)
    assert torch.equal(values, kept)


@pytest.mark.parametrize("name", list(CODECS))
def test_a_payload_of_another_length_or_codec_is_refused(name: str) -> None:
    payload = codec(name).to_bytes(normal(300))
    with pytest.raises(PayloadError):
        codec(name).from_bytes(payload, 301)
    for other in CODECS.values():
        if other.name != name:
            with pytest.raises(PayloadError):
                other.from_bytes(payload, 300)


def test_an_unknown_codec_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="fp32, bf16, int8"):
        codec("int3")


@pytest.mark.parametrize("scale", [1e-44, 1e-40, 1e-36, 1e-30, 1e30])
def test_int8_of_extreme_magnitudes_is_finite_and_no_larger_than_the_input(scale: float) -> None:
    values = normal(512, scale)
    found = round_trip("int8", values)
    assert bool(torch.isfinite(found).all())
    assert float(found.abs().max()) <= float(values.abs().max()) * 1.01 + 1e-42
