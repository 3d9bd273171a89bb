"""Records as bytes: canonical JSON, size-capped, without NaN, without duplicate keys. Bytes from a bucket are
strangers' bytes: every way in which they can be wrong ends in a RecordError."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from diloco_cli.config.codec import from_plain, to_plain
from diloco_cli.errors import DataCheckError, DilocoError

MAX_RECORD_BYTES = 8 << 20
MAX_DEPTH = 32
Record = TypeVar("Record")


class RecordError(DataCheckError):
    """A record in the bucket is not well formed."""

    code = "record"


def encode(record: object) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8; equal records give equal bytes."""
    plain = record if isinstance(record, dict) else to_plain(record)
    data = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"{len(data)} bytes, more than the {MAX_RECORD_BYTES} allowed in a record")
    return data


def decode(kind: type[Record], data: bytes, where: str) -> Record:
    """Bytes to a typed record; unknown keys from newer writers are ignored, wrong types refused."""
    plain = decode_plain(data, where)
    try:
        return from_plain(kind, plain, strict=False)
    except (DilocoError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise RecordError(f"not a {kind.__name__.lower()}: {error}", where=where) from error


def decode_plain(data: bytes, where: str, most_bytes: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    if len(data) > most_bytes:
        raise RecordError(f"{len(data)} bytes, more than the {most_bytes} allowed in a record", where=where)
    try:
        plain = json.loads(data, object_pairs_hook=_unique_pairs, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not valid JSON: {error}", where=where) from error
    if not isinstance(plain, dict) or _depth(plain) > MAX_DEPTH:
        raise RecordError(f"not an object of at most {MAX_DEPTH} levels", where=where)
    return plain


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key appears twice")
    return unique


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _depth(value: Any) -> int:
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        deepest = max(deepest, level)
        if level <= MAX_DEPTH and isinstance(item, dict | list):
            stack.extend((child, level + 1) for child in (item.values() if isinstance(item, dict) else item))
    return deepest
