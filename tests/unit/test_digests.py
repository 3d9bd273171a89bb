"""The digest of an object does not depend on how many threads compute it."""

from __future__ import annotations

import pytest
from blake3 import blake3

from diloco_cli.digests import LARGE_BYTES, digest, is_digest


@pytest.mark.parametrize("size", [0, 1, 1025, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 4097])
def test_is_blake3_of_the_bytes_whatever_their_number(size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    found = digest(data[:size])
    assert found == f"blake3-{blake3(data[:size]).hexdigest()}"
    assert is_digest(found)


def test_other_bytes_have_another_digest() -> None:
    large = bytearray(LARGE_BYTES + 1)
    first = digest(bytes(large))
    large[-1] = 1
    assert digest(bytes(large)) != first
