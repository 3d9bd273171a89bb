"""Long records are compressed; what is no compressed record stays as it is, and is refused by who checks it."""

from __future__ import annotations

import zlib

import pytest

from diloco_cli.protocol.log.records import RecordError, decode, encode, record_digest
from diloco_cli.signing import LOG, MAX_PLAIN_BYTES, PLAIN_BYTES, Authenticator, Checksummed, Secret, body_of, unpacked

KEY = "commit/000000000001.json"
SECRET = Secret("an operator's secret of this test, long enough", "here")
KEYRINGS = [Authenticator(), Checksummed("run"), SECRET.keyring("run")]
LONG = {"text": "0123456789" * (PLAIN_BYTES // 10)}


@pytest.mark.parametrize("keyring", KEYRINGS)
def test_a_long_record_is_compressed_and_reads_as_it_was(keyring: Authenticator) -> None:
    data = keyring.sign(LOG, KEY, encode(LONG))
    assert len(data) < PLAIN_BYTES and data[:1] != b"{"
    assert keyring.authenticates(LOG, KEY, data)
    assert body_of(data) == encode(LONG) and decode(dict, data, KEY) == LONG
    again = zlib.compress(unpacked(data), 1)
    assert again != data and record_digest(again) == record_digest(data), "the chain names what it says"


@pytest.mark.parametrize("keyring", KEYRINGS)
def test_a_short_record_stays_readable(keyring: Authenticator) -> None:
    assert keyring.sign(LOG, KEY, encode({"a": 1})).startswith(b'{"a":1')


@pytest.mark.parametrize(
    "damaged",
    [
        zlib.compress(b"{" + b" " * MAX_PLAIN_BYTES + b"}"),
        zlib.compress(encode(LONG)) + b"more",
        zlib.compress(encode(LONG))[:-1],
        zlib.compress(encode(LONG))[:-9] + b"123456789",
        b"neither",
        b"",
    ],
    ids=["a bomb", "with more behind", "cut", "flipped", "neither", "empty"],
)
def test_what_is_no_compressed_record_is_refused_at_bounded_cost(damaged: bytes) -> None:
    assert unpacked(damaged) is damaged
    assert not any(keyring.authenticates(LOG, KEY, damaged) for keyring in KEYRINGS[1:])
    with pytest.raises(RecordError):
        decode(dict, damaged, KEY)
