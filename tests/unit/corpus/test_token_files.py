"""Files of tokens of other tools."""

from __future__ import annotations

import numpy as np
import pytest

from diloco_cli.corpus.token_files import TokenFile, one_for_half, refuse_no_token, token_file
from diloco_cli.errors import DataCheckError, UsageError
from diloco_cli.store.memory import MemoryStore

SIZES = [1, 100, 5000]


def tokens_of(count: int, dtype: str, most: int = 50_000) -> bytes:
    return np.random.default_rng(count).integers(0, most, count).astype(dtype).tobytes()


def headed(magic: int, count: int, data: bytes) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, count
    return header.tobytes() + data


def read(data: bytes, dtype: str = "uint16", name: str = "a.bin") -> TokenFile:
    store = MemoryStore()
    store.put(name, data)
    return token_file(store, name, dtype)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(
    ("magic", "written"), [(20240520, "uint16"), (20240801, "uint32"), (20251013, "uint16"), (20990101, "uint32")]
)
def test_a_header_of_llm_c_says_how_many_tokens_follow_and_their_number_of_bytes_the_type(
    magic: int, written: str, count: int
) -> None:
    data = headed(magic, count, tokens_of(count, written))
    assert read(data) == TokenFile("a.bin", 1024, count, written)
    with pytest.raises(DataCheckError, match=rf"its header \({magic}\) says {count} tokens"):
        read(data + b"1234" * 3 * count)


@pytest.mark.parametrize("count", [64, 5000])
@pytest.mark.parametrize("most", [300, 50_000, 250_000])
@pytest.mark.parametrize(("written", "said"), [("<u4", "uint32"), ("<i4", "uint32"), ("<i8", "int64")])
def test_tokens_of_a_wider_type_are_not_read_as_of_a_narrower(written: str, said: str, most: int, count: int) -> None:
    data = tokens_of(count, written, most)
    with pytest.raises(UsageError, match=f"were written as {said}") as raised:
        read(data)
    assert ("--dtype uint32" if said == "uint32" else "numpy.save") in (raised.value.hint or "")
    if said == "uint32":
        assert read(data, "uint32").tokens == count
    else:
        with pytest.raises(UsageError, match="were written as int64"):
            read(data, "uint32")


@pytest.mark.parametrize("most", [2, 4, 256, 50_257, 65_536])
def test_bare_tokens_of_any_vocabulary_are_read(most: int) -> None:
    for count in (10, 64, 5000):
        assert read(tokens_of(count, "<u2", most)) == TokenFile("a.bin", 0, count, "uint16")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"PK\3\4" + bytes(100), "a zip archive"),
        (b"\x1f\x8b\x08\0" + bytes(100), "compressed by gzip"),
        (b"\x93NUMPY" + bytes(100), "name it .npy"),
        (b"MMIDIDX\0\0" + bytes(101), "the index of a Megatron data set"),
        ("Zw\u00f6lf words\n".encode() * 20, "text: diloco data tokenize"),
    ],
)
def test_files_of_other_kinds_are_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(data)


def test_an_array_that_is_none_may_be_bare_tokens() -> None:
    with pytest.raises(UsageError, match="no array of numpy") as raised:
        read(tokens_of(100, "<u2"), name="a.npy")
    assert "named .bin" in (raised.value.hint or "")


def test_no_token_is_beyond_the_vocabulary_and_none_is_as_large_as_two() -> None:
    refuse_no_token(255, 256, "x")
    with pytest.raises(UsageError, match="a token 256, which is beyond the vocabulary of 256"):
        refuse_no_token(256, 256, "x")
    with pytest.raises(UsageError, match="which is of no vocabulary") as raised:
        refuse_no_token(300 << 16, 1 << 32, "x")
    assert "--dtype uint16" in (raised.value.hint or "")


def test_one_value_that_is_half_of_all_is_told() -> None:
    values = np.arange(1000)
    assert one_for_half(values) is None
    values[::2] = 3
    assert one_for_half(values) == "token 3 is 50% of it: padding, or not what it seems"
