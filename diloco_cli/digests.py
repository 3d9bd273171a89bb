"""Named digests, `algorithm-hex`. One algorithm per run: blake3, which is both fast and cryptographic."""

from __future__ import annotations

from blake3 import blake3

ALGORITHM = "blake3"


def digest(data: bytes) -> str:
    """`blake3-<64 hex digits>` of the bytes."""
    return f"{ALGORITHM}-{blake3(data).hexdigest()}"
