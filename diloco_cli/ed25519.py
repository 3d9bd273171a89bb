"""Ed25519 (RFC 8032) by `cryptography`, on hexadecimal text: keys of 64 digits, signatures of 128.

`cryptography` is imported where it is needed, because commands on unsigned runs start faster without it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

KEYS = 256  # remembered: a run has few signers, and each signs many records


def public_key(private: str) -> str:
    """The public half of a private key."""
    return _private(private)[1]


def signature(private: str, text: bytes) -> str:
    signed: bytes = _private(private)[0].sign(text)
    return signed.hex()


def is_signature(public: str, code: str, text: bytes) -> bool:
    """Whether `code` is a signature on `text` by the holder of this key."""
    from cryptography.exceptions import InvalidSignature

    try:
        _public(public).verify(bytes.fromhex(code), text)
    except (InvalidSignature, ValueError):  # the latter: a public key that is no point of the curve
        return False
    return True


@lru_cache(maxsize=KEYS)
def _private(private: str) -> tuple[Any, str]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private))
    return key, key.public_key().public_bytes_raw().hex()


@lru_cache(maxsize=KEYS)
def _public(public: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
