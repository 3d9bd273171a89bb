"""Events: the kinds, batches of JSON lines, what a reader believes of them, and what the log itself says."""

from __future__ import annotations

import json

import pytest

from diloco_cli.events.event import (
    EVENT_KINDS,
    MAX_BATCH,
    MAX_BATCH_BYTES,
    OF_NOTE,
    FreshEvent,
    decode_batch,
    encode_batch,
    events_of,
)
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.metrics import MergeNote, Metrics, Note
from diloco_cli.quantities import time_text

AT_S = 1_800_000_000.0


def batch(*texts: str, kind: str = "ended") -> bytes:
    return encode_batch([FreshEvent(0.0, kind, text) for text in texts], 0.0)


def test_times_are_the_stores_and_no_machines() -> None:
    data = encode_batch([FreshEvent(100.0, "started", "process 7", {"pid": 7})], 103.5)
    (event,) = decode_batch(data, "iowa", AT_S)
    assert (event.time, event.kind, event.unit, event.text) == (time_text(AT_S - 3.5), "started", "iowa", "process 7")
    assert event.data == {"pid": 7}


def test_a_batch_is_bounded_and_keeps_the_newest() -> None:
    many = encode_batch([FreshEvent(0.0, "ended", str(n)) for n in range(200)], 0.0)
    assert [event.text for event in decode_batch(many, "iowa", AT_S)] == [str(n) for n in range(200 - MAX_BATCH, 200)]
    long = encode_batch([FreshEvent(0.0, "error", "€" * 5000) for _ in range(64)], 0.0)
    assert len(long) <= MAX_BATCH_BYTES and decode_batch(long, "iowa", AT_S)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff",
        b"[]",
        b'{"age_s":0,"kind":"unheard of","text":"","data":{}}',
        b'{"age_s":NaN,"kind":"ended","text":"","data":{}}',
        b'{"age_s":"1","kind":"ended","text":"","data":{}}',
        b'{"age_s":0,"kind":"ended","text":7,"data":{}}',
        b'{"age_s":0,"kind":"ended","text":"","data":[]}',
        b'{"age_s":0,"kind":["ended"],"text":"","data":{}}',
        b"{" * 10_000,
    ],
)
def test_what_is_no_event_is_left_out(line: bytes) -> None:
    assert [event.text for event in decode_batch(line + b"\n" + batch("good"), "iowa", AT_S)] == ["good"]


def test_a_line_cannot_claim_another_unit_or_the_future() -> None:
    line = json.dumps(
        {"age_s": -1e9, "kind": "ended", "text": "x", "unit": "rhine", "time": "2099", "data": {"a": [1]}}
    )
    (event,) = decode_batch(line.encode(), "iowa", AT_S)
    assert (event.unit, event.time, event.data) == ("iowa", time_text(AT_S), {})


@pytest.mark.parametrize("kind", [kind.name for kind in EVENT_KINDS if kind.by == "log"])
def test_what_the_log_says_is_taken_from_the_log_alone(kind: str) -> None:
    """A merge that some unit invents would heal errors, and one without its data end every look at the run."""
    assert not decode_batch(batch("invented", kind=kind), "iowa", AT_S)


def test_refusals_of_the_log_are_told_in_words() -> None:
    note = Note(time_text(AT_S + 120), "refused", "home", "late", 7, time_text(AT_S))
    (event,) = events_of(Metrics(notes=(note,)))
    assert (event.unit, event.text) == ("home", "7 offers too late in 2 min")
    assert event.data == {"count": 7, "reason": "late"}


def test_the_logs_times_may_be_no_times() -> None:
    merge = MergeNote(1, 0, "yesterday", ("iowa",), 2, 1, 0.0, 0.0, 10)
    (event,) = events_of(Metrics(recent_merges=(merge,)))
    assert (event.time, event.kind, event.text) == ("", "merged", "merged 1 of 2: iowa")
    far = MergeNote(1, 0, "9999-12-31T23:59:59Z", ("iowa",), 2, 1, 0.0, 0.0, 10)
    assert events_of(Metrics(recent_merges=(far,)), ahead_s=-1e9)[0].time == "", "some zone has no such time"


def test_every_kind_of_commit_that_is_noted_has_a_documented_kind() -> None:
    kinds = {kind.__struct_config__.tag for kind in Commit.__subclasses__()} - {"merge"}
    assert kinds | {"refused"} == set(OF_NOTE)
