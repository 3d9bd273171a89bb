"""An event, the kinds that there are, and the batches of JSON lines in which processes write them.

A line is one JSON object: `kind`, `text`, `data`, and `age_s`, the seconds between the event and the writing of its
batch. The store's time of the batch minus that age is the event's time: no machine's clock is needed. Events are not
signed, also in a signed run: each is only as good as the right to write under `event/<unit>/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from diloco_cli.config.codec import parse_object
from diloco_cli.units import time_text

MAX_BATCH_BYTES = 1 << 16
MAX_BATCH = 64  # events
MAX_TEXT = 2048  # characters
MAX_DATA = 16  # entries
LATEST_S = 253_402_300_799.0  # the last second of the year 9999
Scalar = str | int | float

WRITTEN_KINDS: dict[str, str] = {
    # by supervisors
    "started": "a unit's process was started (data: pid, start)",
    "adopted": "a unit's process, started by an earlier supervisor, is watched by a new one",
    "restarted": "a unit's process was started again after an end (data: pid, start)",
    "ended": "a unit's process ended: how, and by whom (data: pid, status, signal, lived_s, by)",
    "held": "a unit stays down until it is revived",
    "released": "a unit may be started again",
    "done": "a unit's process ended because its work is done",
    "gave_up": "a unit ended too often, and is not started again",
    "fenced": "a syncer was replaced by another one",
    "leaving": "a machine ends what runs on it, and the run goes on",
    "stopping": "a supervisor ends its units, because the run ended, was stopped or cannot go on",
    "terminated": "a unit was asked to end (SIGTERM)",
    "killed": "a unit was slow to end, and was killed (SIGKILL)",
    # by units, or by their supervisor for them
    "error": "what ended a unit; for a user's own code its file and line",
    "region": "a region's bucket fails, or works again",
    # by chaos
    "chaos": "a fault was injected on purpose (data: number, fault)",
    "revived": "a fault was taken back by `diloco chaos revive`",
}
LOG_KINDS: dict[str, str] = {
    "serving": "a syncer begins to serve: the first one, or one that takes over",
    "merged": "offers became a version of a fragment",
    "skipped": "a slot passed without a merge",
    "refused": "offers that no merge could use, summed up (data: count, reason)",
    "declined": "an operator's request was not carried out",
    "joined": "an island takes part in the run from now on",
    "evaluated": "an evaluation with something to say: the loss jumped, or is not finite",
    "quarantined": "a learner is kept out",
    "readmitted": "a quarantined learner may take part again",
    "revoked": "a public key counts no more",
    "rolled_back": "every fragment is again what it was after an earlier commit",
    "collected": "objects that only older commits need may be deleted",
    "stopped": "the run pauses",
    "finished": "the run is over",
}
KINDS = WRITTEN_KINDS | LOG_KINDS


@dataclass(frozen=True)
class Event:
    """`time`: by the store's clock, ISO 8601. `kind`: one of KINDS. `unit`: whom it concerns. `text`: for people."""

    time: str
    kind: str
    unit: str
    text: str
    data: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class FreshEvent:
    """An event that is not in the bucket yet; `at_s`: on the monotonic clock of its process."""

    at_s: float
    kind: str
    text: str
    data: dict[str, Scalar] = field(default_factory=dict)


def encode_batch(events: Iterable[FreshEvent], now_s: float) -> bytes:
    """The newest events that fit into a batch, one a line."""
    lines: list[bytes] = []
    left = MAX_BATCH_BYTES
    for event in reversed(list(events)[-MAX_BATCH:]):
        line = _line(event, now_s)
        left -= len(line)
        if left < 0:
            break
        lines.insert(0, line)
    return b"".join(lines)


def _line(event: FreshEvent, now_s: float) -> bytes:
    age_s = round(max(0.0, now_s - event.at_s), 3)
    body = {"age_s": age_s, "kind": event.kind, "text": event.text[:MAX_TEXT], "data": event.data}
    return json.dumps(body, allow_nan=False).encode() + b"\n"


def decode_batch(data: bytes, unit: str, written_s: float) -> list[Event]:
    """The events of a batch that the store took at `written_s`. What is no event of WRITTEN_KINDS is left out: anyone
    with the right to write under the unit's prefix may have written it, and only the log says what the log says."""
    if len(data) > MAX_BATCH_BYTES:
        return []
    found = [_event(line, unit, written_s) for line in data.split(b"\n")[:MAX_BATCH] if line]
    return [event for event in found if event is not None]


def _event(line: bytes, unit: str, written_s: float) -> Event | None:
    try:
        body = parse_object(line, MAX_BATCH_BYTES)
    except ValueError:
        return None
    age_s, kind, text, data = (body.get(name) for name in ("age_s", "kind", "text", "data"))
    if not isinstance(kind, str) or not isinstance(text, str) or not isinstance(data, dict):
        return None
    if kind not in WRITTEN_KINDS or not isinstance(age_s, int | float):
        return None
    known = {name: value for name, value in list(data.items())[:MAX_DATA] if _is_scalar(value)}
    at_s = written_s - min(max(0.0, float(age_s)), max(0.0, written_s))
    return Event(time_text(at_s), kind, unit, text[:MAX_TEXT], known)


def _is_scalar(value: Any) -> bool:
    return len(value) <= MAX_TEXT if isinstance(value, str) else isinstance(value, int | float)
