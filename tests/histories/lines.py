"""An independent reader of records as JSON, also of those in lines (ARCHITECTURE.md, The log)."""

from __future__ import annotations

import json
from typing import Any

from diloco_cli.digests import digest

Plain = dict[str, Any]


def head_of(data: bytes) -> bytes:
    return data.split(b"\n")[0]


def in_one(data: bytes) -> Plain:
    """A record with all that its lines say. Raises ValueError if they are not those that the first one names."""
    head, *lines = data.split(b"\n")
    record: Plain = json.loads(head)
    named = [part["digest"] for part in record["parts"]["index"]] if "kind" in record and "parts" in record else []
    if named != [digest(line) for line in lines]:
        raise ValueError(f"{len(lines)} lines that are not the {len(named)} that a record names")
    parts = [json.loads(line) for line in lines]
    lists = {name: [one for part in parts for one in part[name]] for name in ("inputs", "outcomes")}
    return record | lists if parts else record
