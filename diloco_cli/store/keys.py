"""What a key may look like, checked by every implementation before it touches anything."""

from __future__ import annotations

import re

from diloco_cli.errors import StoreError

MAX_KEY_CHARACTERS = 900
MAX_PART_CHARACTERS = 200
"""GCS and S3 allow 1024 bytes for a name, of which the store's prefix takes a part; file systems 255 for a
part."""

_A_PART = rf"(?!\.{{1,2}}(?:/|\Z))[A-Za-z0-9._-]{{1,{MAX_PART_CHARACTERS}}}"
_PART, _KEY = re.compile(_A_PART), re.compile(f"{_A_PART}(?:/{_A_PART})*")


class BadKeyError(StoreError):
    """The key could never name an object; calling again does not help."""

    retryable = False


def is_key_part(part: str) -> bool:
    """Whether `part` may stand between two slashes."""
    return _PART.fullmatch(part) is not None  # fullmatch: `$` would let a trailing newline through


def check_key(key: str) -> str:
    """The key itself; BadKeyError if it is not `[A-Za-z0-9._-]` parts joined by single slashes."""
    if len(key) > MAX_KEY_CHARACTERS or _KEY.fullmatch(key) is None:
        raise BadKeyError(
            f"not a key: {key[:MAX_PART_CHARACTERS]!a}",
            hint="keys are [A-Za-z0-9._-] parts joined by '/', without '.' and '..'",
        )
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself; BadKeyError if no key could start with it. It may be empty or end anywhere in a
    key."""
    whole, _, last = prefix.rpartition("/")
    if whole:
        check_key(whole)
    if (prefix.startswith("/")) or (last.strip(".") and not is_key_part(last)) or len(last) > MAX_PART_CHARACTERS:
        raise BadKeyError(f"not a prefix of keys: {prefix[:MAX_PART_CHARACTERS]!a}")
    return prefix


def is_between(key: str, prefix: str, after: str) -> bool:
    """Whether a listing of (prefix, after) shows the key."""
    return key > after and key.startswith(prefix)
