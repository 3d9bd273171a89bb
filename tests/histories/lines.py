"""An independent reader of records as JSON, also of compressed ones (ARCHITECTURE.md, The log)."""

from __future__ import annotations

import json
import zlib
from typing import Any

Plain = dict[str, Any]


def head_of(data: bytes) -> bytes:
    """A record's bytes before compression."""
    return data if data.startswith(b"{") else zlib.decompress(data)


def in_one(data: bytes) -> Plain:
    """Raises ValueError for bytes that are no record."""
    try:
        record: Plain = json.loads(head_of(data))
    except zlib.error as error:
        raise ValueError(str(error)) from error
    return record
