"""Records as bytes: canonical JSON, size-capped, without NaN, without duplicate keys. Bytes from a bucket are
strangers' bytes: every way in which they can be wrong ends in a RecordError."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from diloco_cli.config.codec import from_plain, to_plain
from diloco_cli.config.strict_json import parse_object
from diloco_cli.errors import DataCheckError, DilocoError

MAX_RECORD_BYTES = 8 << 20
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
        return parse_object(data, most_bytes)
    except ValueError as error:
        raise RecordError(f"not valid JSON: {error}", where=where) from error
