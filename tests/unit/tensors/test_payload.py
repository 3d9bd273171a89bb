"""Payloads: valid safetensors outside, and nothing but exactly the expected inside."""

from __future__ import annotations

import random

import pytest
import safetensors.torch
import torch

from diloco_cli.methods import CODECS
from diloco_cli.tensors.codecs import codec
from diloco_cli.tensors.payload import PayloadError, Spec, from_bytes, to_bytes

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, -2, 3], dtype=torch.int8),
    "c": torch.tensor(2.5, dtype=torch.bfloat16), "d": torch.tensor([7]), "e": torch.zeros(0),
}  # fmt: skip
SPEC: Spec = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def test_the_safetensors_library_reads_what_is_written() -> None:
    loaded = safetensors.torch.load(to_bytes({name: t for name, t in TENSORS.items() if name != "d"}))
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in loaded) and len(loaded) == 4


@pytest.mark.parametrize("name", list(CODECS))
def test_the_safetensors_library_reads_every_codec(name: str) -> None:
    loaded = safetensors.torch.load(codec(name).to_bytes(torch.randn(300)))
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in loaded.items()} == codec(name).spec(300)


def test_tensors_come_back_bit_for_bit_and_writable() -> None:
    found = from_bytes(to_bytes(TENSORS), SPEC)
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in TENSORS.items())
    found["a"].add_(1)


def test_a_strided_tensor_is_written_in_its_logical_order() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    found = from_bytes(to_bytes({"a": matrix.T}), {"a": (torch.float32, (3, 2))})
    assert torch.equal(found["a"], matrix.T)


def test_every_truncation_is_refused() -> None:
    data = to_bytes(TENSORS)
    for length in range(len(data)):
        with pytest.raises(PayloadError):
            from_bytes(data[:length], SPEC)
    with pytest.raises(PayloadError):
        from_bytes(data + b"\0", SPEC)


def test_every_flipped_header_byte_is_refused() -> None:
    data = to_bytes(TENSORS)
    header = 8 + int.from_bytes(data[:8], "little")
    for at in range(header):
        with pytest.raises(PayloadError):
            from_bytes(data[:at] + bytes([data[at] ^ (1 + at % 255)]) + data[at + 1 :], SPEC)


def test_mutated_and_random_bytes_give_tensors_or_a_payload_error() -> None:
    draw, data, refused = random.Random(5), to_bytes(TENSORS), 0
    for _ in range(3000):
        mutated = bytearray(data if draw.random() < 0.8 else draw.randbytes(draw.randrange(2 * len(data))))
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(mutated) + 1)
            mutated[at : at + draw.randint(0, 9)] = draw.randbytes(draw.randint(0, 9))
        try:
            found = from_bytes(bytes(mutated), SPEC)
            assert {name: (t.dtype, tuple(t.shape)) for name, t in found.items()} == SPEC
        except PayloadError:
            refused += 1
    assert refused > 2500
