"""The journal of faults planned and injected into a run: one JSON object a line, appended, never rewritten.

A fault has several lines under one `id`: its plan, before it is injected, then its results.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diloco_cli.clock import utc_now_text
from diloco_cli.config.codec import from_plain, parse_object
from diloco_cli.errors import UsageError
from diloco_cli.paths import run_directory
from diloco_cli.randomness import nonce
from diloco_cli.runtime.files import checked_name, make_directory

MAX_READ_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class JournalEntry:
    """`injected`, `verified`, `healed`: None while not known. `seed`: always None, because a person chose the fault."""

    id: str
    time: str
    seed: int | None
    fault: str
    target: str
    pid: int | None = None
    for_s: float | None = None
    injected: bool | None = None
    verified: bool | None = None
    healed: bool | None = None
    skipped: str | None = None


def record_plan(run: str, fault: str, target: str, *, pid: int | None, for_s: float | None = None) -> JournalEntry:
    """Written and synced before the fault happens."""
    return _append(run, JournalEntry(nonce(), utc_now_text(), None, fault, target, pid, for_s))


def record(run: str, entry: JournalEntry, **changes: Any) -> JournalEntry:
    return _append(run, replace(entry, **changes))


def read_entries(run: str) -> list[JournalEntry]:
    """The latest state of every fault, in the order of their plans. Torn lines are left out."""
    try:
        with _path(run).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_READ_BYTES))
            lines = file.read(MAX_READ_BYTES).splitlines()
    except FileNotFoundError:
        return []
    entries: dict[str, JournalEntry] = {}
    for entry in filter(None, map(_parse, lines)):
        entries[entry.id] = _merged(entries.get(entry.id), entry)
    return list(entries.values())


def _merged(before: JournalEntry | None, after: JournalEntry) -> JournalEntry:
    """The later line's values, but None never replaces a value: another writer (the healer) may not know it."""
    if before is None:
        return after
    known = {name: value for name, value in asdict(after).items() if value is not None}
    return replace(before, **known)


def _append(run: str, entry: JournalEntry) -> JournalEntry:
    path = _path(run)
    make_directory(path.parent)
    # The blank line keeps this line apart from a torn last line of a crashed writer.
    line = b"\n" + json.dumps(asdict(entry), allow_nan=False).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return entry


def _parse(line: bytes) -> JournalEntry | None:
    try:
        return from_plain(JournalEntry, parse_object(line, MAX_READ_BYTES), strict=False)
    except (UsageError, ValueError, OverflowError):
        return None


def _path(run: str) -> Path:
    return run_directory(checked_name(run, "name of a run")) / "chaos.jsonl"
