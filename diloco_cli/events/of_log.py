"""The events that the log itself holds, from its figures for people (protocol/log/metrics.py)."""

from __future__ import annotations

from diloco_cli.events.event import Event, Scalar
from diloco_cli.protocol.log.metrics import REFUSED, MergeNote, Metrics, Note
from diloco_cli.units import format_duration, parse_time, time_text

KIND_OF_COMMIT = {
    "epoch_start": "serving", "skip": "skipped", "refuse": "declined", "membership": "joined", "eval": "evaluated",
    "quarantine": "quarantined", "readmit": "readmitted", "revoke": "revoked", "rollback": "rolled_back",
    "gc_floor": "collected", "stop": "stopped", "finish": "finished", REFUSED: "refused",
}  # fmt: skip
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
    "norm_cap": "too large",
}


def events_of(metrics: Metrics, ahead_s: float = 0.0) -> list[Event]:
    """The newest merges and notes, oldest first. `ahead_s`: how far the log's clock is ahead of the store's."""
    found = [_of_merge(note, ahead_s) for note in metrics.recent_merges]
    found += [_of_note(note, ahead_s) for note in metrics.notes if note.kind in KIND_OF_COMMIT]
    return sorted(found, key=lambda event: event.time)


def _of_merge(note: MergeNote, ahead_s: float) -> Event:
    learners = ", ".join(note.participants)
    text = f"merged {len(note.participants)} of {note.alive}: {learners}"
    data: dict[str, Scalar] = {"commit": note.n, "slot": note.slot, "learners": learners, "tokens": note.tokens}
    return Event(_at(note.time, ahead_s), "merged", "syncer", text, data)


def _of_note(note: Note, ahead_s: float) -> Event:
    at, kind, within = _at(note.time, ahead_s), KIND_OF_COMMIT[note.kind], ""
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
