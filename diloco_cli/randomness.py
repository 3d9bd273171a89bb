"""The only module that draws true randomness (nonces, tokens). Seeds come from settings, never from here."""

from __future__ import annotations

import secrets


def nonce() -> str:
    """128 random bits as hexadecimal: recognises one's own write."""
    return secrets.token_hex(16)


def jitter() -> float:
    """A uniform number in [0, 1): spreads retries."""
    return secrets.randbelow(1 << 30) / (1 << 30)
