"""What happened in a run, for people: the kinds of events, the batches in which processes write them, and the events
that the log itself tells. No decision depends on an event.

A batch has one JSON object a line: `kind`, `text`, `data`, and `age_s`, the seconds between the event and the writing
of its batch. The event's time is the store's time of the batch minus that age, so no machine's clock is needed. Events
are not signed, also in a signed run: each is as good as the right to write under `event/<unit>/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from diloco_cli.config.codec import parse_object
from diloco_cli.protocol.log.metrics import REFUSED, MergeNote, Metrics, Note
from diloco_cli.quantities import format_duration, parse_time, time_text

MAX_BATCH_BYTES = 1 << 16
MAX_BATCH = 64  # events
MAX_TEXT = 2048  # characters
MAX_DATA = 16  # entries
Scalar = str | int | float


@dataclass(frozen=True)
class EventKind:
    """A kind of event. `by`: who writes it; "log": it is read from the log, from the notes of kind `note` that commits
    leave (protocol/log/metrics.py). `quiet`: `status` does not show it; `routine`: nor does a report; `fault`: a report
    marks it in its curves. `said`: stands before the text of a supervisor's event."""

    name: str
    meaning: str
    by: Literal["supervisor", "unit", "chaos", "log"]
    note: str = ""
    quiet: bool = False
    routine: bool = False
    fault: bool = False
    said: str = ""


EVENT_KINDS = (
    EventKind("started", "a unit's process was started (data: pid, start)", "supervisor", said="started: "),
    EventKind(
        "adopted",
        "a unit's process, started by an earlier supervisor, is watched by a new one",
        "supervisor",
        said="goes on: ",
    ),
    EventKind(
        "restarted",
        "a unit's process was started again after an end (data: pid, start)",
        "supervisor",
        fault=True,
        said="started again: ",
    ),
    EventKind(
        "ended", "a unit's process ended: how, and by whom (data: pid, status, signal, lived_s, by)", "supervisor"
    ),
    EventKind("held", "a unit stays down until it is revived", "supervisor"),
    EventKind("released", "a unit may be started again", "supervisor"),
    EventKind("done", "a unit's process ended because its work is done", "supervisor"),
    EventKind(
        "gave_up",
        "a unit ended too often, and is not started again",
        "supervisor",
        fault=True,
        said="is not started again: ",
    ),
    EventKind("fenced", "a syncer was replaced by another one", "supervisor"),
    EventKind(
        "leaving", "a machine ends what runs on it, and the run goes on", "supervisor", said="its supervisor leaves: "
    ),
    EventKind(
        "stopping",
        "a supervisor ends its units, because the run ended, was stopped or cannot go on",
        "supervisor",
        said="its supervisor: ",
    ),
    EventKind("terminated", "a unit was asked to end (SIGTERM)", "supervisor", said="asked to end: "),
    EventKind("killed", "a unit was slow to end, and was killed (SIGKILL)", "supervisor", said="slow to end: "),
    EventKind("error", "what ended a unit; for a user's own code its file and line", "unit", fault=True),
    EventKind("region", "a region's bucket fails, or works again", "unit"),
    EventKind("mended", "a record was missing or damaged, and a process that had it put it back", "unit"),
    EventKind("chaos", "a fault was injected on purpose (data: number, fault)", "chaos", fault=True),
    EventKind("revived", "a fault was taken back by `diloco chaos revive`", "chaos"),
    EventKind(
        "serving", "a syncer begins to serve: the first one, or one that takes over", "log", "epoch_start", fault=True
    ),
    EventKind("merged", "offers became a version of a fragment", "log", quiet=True, routine=True),
    EventKind("skipped", "a slot passed without a merge", "log", "skip", routine=True),
    EventKind(
        "refused", "offers that no merge could use, summed up (data: count, reason)", "log", REFUSED, routine=True
    ),
    EventKind("declined", "an operator's request was not carried out", "log", "refuse"),
    EventKind("joined", "an island takes part in the run from now on", "log", "membership"),
    EventKind("evaluated", "an evaluation with something to say: the loss jumped, or is not finite", "log", "eval"),
    EventKind("quarantined", "a learner is kept out", "log", "quarantine", fault=True),
    EventKind("readmitted", "a quarantined learner may take part again", "log", "readmit"),
    EventKind("revoked", "a public key counts no more", "log", "revoke"),
    EventKind(
        "rolled_back", "every fragment is again what it was after an earlier commit", "log", "rollback", fault=True
    ),
    EventKind("collected", "objects that only older commits need may be deleted", "log", "gc_floor", quiet=True),
    EventKind("stopped", "the run pauses", "log", "stop", fault=True),
    EventKind("finished", "the run is over", "log", "finish"),
)
KINDS = {kind.name: kind for kind in EVENT_KINDS}
OF_NOTE = {kind.note: kind.name for kind in EVENT_KINDS if kind.note}
WORDS = {  # of the reasons that honest learners meet; others are shown as they are
    "late": "too late",
    "too_early": "too early",
    "base_consumed": "based on a version that it had answered already",
    "unknown_base": "too old",
    "old_incarnation": "of an earlier process",
    "missing_payload": "without payload",
    "digest_mismatch": "damaged",
    "wrong_size": "damaged",
    "bad_payload": "damaged",
    "non_finite": "not finite",
}


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
    """The events of a batch that the store took at `written_s`. What is no event that processes write is left
    out: anyone with the right to write under the unit's prefix may have written it, and the log alone tells its own."""
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
    if kind not in KINDS or KINDS[kind].by == "log" or not isinstance(age_s, int | float):
        return None
    known = {name: value for name, value in list(data.items())[:MAX_DATA] if _is_scalar(value)}
    at_s = written_s - min(max(0.0, float(age_s)), max(0.0, written_s))
    return Event(time_text(at_s), kind, unit, text[:MAX_TEXT], known)


def _is_scalar(value: Any) -> bool:
    return len(value) <= MAX_TEXT if isinstance(value, str) else isinstance(value, int | float)


def events_of(metrics: Metrics, ahead_s: float = 0.0) -> list[Event]:
    """The newest merges and notes, oldest first. `ahead_s`: how far the log's clock is ahead of the store's."""
    found = [_of_merge(note, ahead_s) for note in metrics.recent_merges]
    found += [_of_note(note, ahead_s) for note in metrics.notes if note.kind in OF_NOTE]
    return sorted(found, key=lambda event: event.time)


def _of_merge(note: MergeNote, ahead_s: float) -> Event:
    learners = ", ".join(note.participants)
    text = f"merged {len(note.participants)} of {note.alive}: {learners}"
    data: dict[str, Scalar] = {"commit": note.n, "slot": note.slot, "learners": learners, "tokens": note.tokens}
    return Event(_at(note.time, ahead_s), "merged", "syncer", text, data)


def _of_note(note: Note, ahead_s: float) -> Event:
    at, kind, within = _at(note.time, ahead_s), OF_NOTE[note.kind], ""
    if note.count > 1:
        within = f" in {format_duration(max(1.0, _seconds(note.since, note.time)))}"
    if note.kind == REFUSED:
        offers = "an offer" if note.count == 1 else f"{note.count} offers"
        text = f"{offers} {WORDS.get(note.text, f'refused ({note.text})')}{within}"
        return Event(at, kind, note.unit, text, {"count": note.count, "reason": note.text})
    if note.count > 1:
        return Event(
            at, kind, note.unit, f"{note.count} slots passed{within}; the last: {note.text}", {"count": note.count}
        )
    return Event(at, kind, note.unit, f"finished: {note.text}" if kind == "finished" else note.text)


def _at(stated: str, ahead_s: float) -> str:
    """By the store's clock; "" if the text is no time."""
    at_s = parse_time(stated)
    return "" if at_s is None else time_text(at_s - ahead_s)


def _seconds(first: str, last: str) -> float:
    first_s, last_s = parse_time(first), parse_time(last)
    return 0.0 if first_s is None or last_s is None else last_s - first_s
