"""The only module that draws true randomness (nonces, tokens). A run's seeds come from its settings."""

from __future__ import annotations

import os


def nonce() -> str:
    """128 random bits as hexadecimal, by which a process recognises its own write."""
    return os.urandom(16).hex()


def new_private_key() -> str:
    """256 random bits as hexadecimal: an Ed25519 private key, or an operator's secret."""
    return os.urandom(32).hex()


def seed() -> int:
    """31 random bits: of a text that need not be the same again."""
    return int.from_bytes(os.urandom(4), "big") >> 1


def jitter() -> float:
    """A uniform number in [0, 1): spreads retries."""
    return int.from_bytes(os.urandom(4), "big") / (1 << 32)
