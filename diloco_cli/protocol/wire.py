"""Records as bytes: canonical JSON, size-capped, without NaN, without duplicate keys. Bytes from a bucket are
strangers' bytes: every way in which they can be wrong ends in a RecordError."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from diloco_cli.config.codec import from_plain, to_plain
from diloco_cli.config.strict_json import parse_object
from diloco_cli.errors import DataCheckError, DilocoError
from diloco_cli.signing import MAX_TAIL_BYTES
from diloco_cli.store.port import HOLDER_BYTES

MAX_RECORD_BYTES = HOLDER_BYTES  # so a create that lost to a record tells all of it
_canonical = json.JSONEncoder(  # nothing in a record holds itself: looking for that would take a tenth of the time
    sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False
).encode
Record = TypeVar("Record")


class RecordError(DataCheckError):
    """A record in the bucket is not well formed."""

    code = "record"


def encode(record: object) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8; equal records give equal bytes."""
    data = _canonical(record if isinstance(record, dict) else to_plain(record)).encode()
    most_bytes = MAX_RECORD_BYTES - MAX_TAIL_BYTES  # with room for a signature
    if len(data) > most_bytes:
        raise RecordError(f"{len(data)} bytes, more than the {most_bytes} allowed in a record")
    return data


def decode(kind: type[Record], data: bytes, where: str, schema: int | None = None) -> Record:
    """Bytes to a typed record; unknown keys from newer writers are ignored, wrong types refused, and so is all that
    says of itself that it was written with a newer schema than `schema`."""
    plain = decode_plain(data, where)
    if schema is not None:
        _refuse_newer(plain.get("schema"), schema, where)
    try:
        return from_plain(kind, plain, strict=False)
    except (DilocoError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise RecordError(f"not a {kind.__name__.lower()}: {error}", where=where) from error


def _refuse_newer(written: object, known: int, where: str) -> None:
    if isinstance(written, int) and written > known:
        raise RecordError(
            f"written with schema {written}; this version reads up to {known}",
            where=where,
            hint="pip install --upgrade diloco",
        )


def decode_plain(data: bytes, where: str, most_bytes: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    if len(data) > most_bytes:
        raise RecordError(f"{len(data)} bytes, more than the {most_bytes} allowed in a record", where=where)
    try:
        return parse_object(data, most_bytes)
    except ValueError as error:
        raise RecordError(f"not valid JSON: {error}", where=where) from error
