"""Bytes from a bucket are strangers' bytes: whatever they are, only RecordError comes out."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import MAX_DEPTH
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.records import (
    MAX_RECORD_BYTES,
    Offer,
    RecordError,
    RunFormat,
    Timings,
    decode,
    decode_plain,
    encode,
)
from diloco_cli.signing import MAX_TAIL_BYTES, Secret, learner_signer
from tests.unit.protocol.log.test_golden import RECORDS

SIGNER = learner_signer("l" * 63)
OFFER = RECORDS["offer"]
SAMPLES: list[Any] = [RECORDS[name] for name in ("offer", "commit-merge", "format", "snapshot", "request")]


def test_equal_records_give_equal_bytes_whatever_the_order_of_their_keys() -> None:
    assert encode({"b": 1, "a": 2}) == encode({"a": 2, "b": 1}) == b'{"a":2,"b":1}'


@pytest.mark.parametrize(
    "data",
    [
        b"", b" ", b"null", b"[]", b"1", b'"x"', b"{", b'{"a":1}}', b'{"a":NaN}', b'{"a":-Infinity}', b"\xff\xfe\x00",
        b'{"a":1,"a":1}', b'{"b":{"a":1,"a":2}}', b'{"b":1,"a":1}', b'{"a": 1}', b' {"a":1}', b'{"a":1}\n',
        b'{"a":1E2}', b"[" * 200_000, b'{"a":' * 200_000, b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":340282366920938463463374607431768211456}', b'{"a":[-170141183460469231731687303715884105729]}',
        b'{"a":' + b"9" * 39 + b"}", b'{"a":' + b"9" * 400 + b"}",
        b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", b"\xef\xbb\xbf{}x",
    ],
)  # fmt: skip
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError, match="here"):
        decode_plain(data, "here")


@pytest.mark.parametrize("number", [0, -1, 2**53, 2**64, -(2**64), 10**38, 2**128 - 1, -(2**127)])
def test_whole_numbers_of_128_bits_come_back(number: int) -> None:
    assert decode_plain(encode({"a": number, "b": "9" * 30}), "here") == {"a": number, "b": "9" * 30}


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=()), max_size=20))
def test_whatever_text_is_written_can_be_read(text: str) -> None:
    """Also half a surrogate pair, as in the name of a host or a file that is not UTF-8."""
    back = decode_plain(encode({"reason": text, "b": [{text: 1}]}), "here")["reason"]
    kept = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert back == kept and (back == text or any("\ud800" <= character <= "\udfff" for character in text))


def test_a_record_over_the_size_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(RecordError, match="more than"):
        decode_plain(b"{" * (MAX_RECORD_BYTES + 1), "here")


def test_not_a_number_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode(replace(OFFER, loss=float("nan")))


def test_what_could_not_be_read_is_not_written() -> None:
    with pytest.raises(RecordError):
        encode({"reason": "x" * MAX_RECORD_BYTES})


def test_the_longest_record_is_read_also_when_it_is_signed() -> None:
    def record(length: int) -> dict[str, str]:
        return {"reason": "x" * length}

    longest = MAX_RECORD_BYTES - MAX_TAIL_BYTES - len(encode(record(0)))
    own = Secret(Secret("x" * 32, "TEST").certified("id", {SIGNER: "a1" * 32}), "TEST")
    signed = own.keyring("id").sign(SIGNER, "key", encode(record(longest)))
    assert decode_plain(signed, "here")["reason"] == "x" * longest
    with pytest.raises(RecordError, match="more than"):
        encode(record(longest + 1))


@pytest.mark.parametrize("value", ["1", None, True, 1.5, [], {}, float(2**53)])
def test_a_whole_number_must_be_one(value: Any) -> None:
    with pytest.raises(RecordError):
        decode(Offer, encode({**json.loads(encode(OFFER)), "seq": value}), "here")


def test_keys_of_newer_writers_are_passed_over() -> None:
    assert decode(Offer, encode({**json.loads(encode(OFFER)), "new": [1]}), "here") == OFFER


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"1" + b"0" * 400])
def test_a_number_beyond_every_float_is_refused(number: bytes) -> None:
    with pytest.raises(RecordError):
        decode(Timings, b'{"slot_s":' + number + b"}", "here")


def mutations(data: bytes, count: int, seed: int) -> list[bytes]:
    """Flips, cuts, repeats and swaps of small pieces."""
    draw, pieces = random.Random(seed), (b'"', b"{", b"[", b",", b"-", b"9", b"null", b"1e9", b"\x00", b"true", b":")
    found = []
    for _ in range(count):
        mutated = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            at, length = draw.randrange(len(mutated) + 1), draw.randint(0, 8)
            mutated[at : at + length] = draw.choice(
                (*pieces, bytes([draw.randrange(256)]), bytes(mutated[at : at + 9]))
            )
        found.append(bytes(mutated))
    return found


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
def test_mutated_records_give_a_record_or_a_record_error(record: Any) -> None:
    refused = 0
    for mutated in mutations(encode(record), 800, seed=1):
        try:
            assert isinstance(decode(type(record), mutated, "here"), type(record))
        except RecordError:
            refused += 1
    assert refused > 400


plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.sampled_from(SAMPLES), st.data())
def test_any_json_in_any_field_gives_a_record_or_a_record_error(record: Any, data: st.DataObject) -> None:
    fields = json.loads(encode(record))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(plain)
    try:
        decode(type(record), encode(fields), "here")
    except RecordError as error:
        assert "here" in str(error)


@settings(max_examples=60)
@given(st.binary(max_size=64))
def test_any_bytes_give_a_record_error(data: bytes) -> None:
    for kind in (Offer, Commit, RunFormat):
        with pytest.raises(RecordError):
            decode(kind, data, "here")
