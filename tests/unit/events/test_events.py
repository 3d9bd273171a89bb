"""Events: batches of JSON lines, what a reader believes of them, and what the log itself says."""

from __future__ import annotations

import json

import pytest

from diloco_cli.errors import StoreError
from diloco_cli.events import write
from diloco_cli.events.event import (
    KINDS,
    LOG_KINDS,
    MAX_BATCH,
    MAX_BATCH_BYTES,
    Event,
    FreshEvent,
    decode_batch,
    encode_batch,
)
from diloco_cli.events.of_log import KIND_OF_COMMIT, events_of
from diloco_cli.events.read import BATCHES, EVALUATOR, PAGE, EventReader, merged, newest_batches, unhealed_errors
from diloco_cli.events.write import write_batch
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import event_key, read_event_key
from diloco_cli.protocol.log.metrics import MergeNote, Metrics, Note
from diloco_cli.store.memory import MemoryStore
from diloco_cli.units import time_text

AT_S = 1_800_000_000.0


def batch(*texts: str, kind: str = "ended") -> bytes:
    return encode_batch([FreshEvent(0.0, kind, text) for text in texts], 0.0)


def test_times_are_the_stores_and_no_machines() -> None:
    data = encode_batch([FreshEvent(100.0, "started", "process 7", {"pid": 7})], 103.5)
    (event,) = decode_batch(data, "iowa", AT_S)
    assert (event.time, event.kind, event.unit, event.text) == (time_text(AT_S - 3.5), "started", "iowa", "process 7")
    assert event.data == {"pid": 7}


@pytest.mark.parametrize(("days", "believed"), [(21, True), (3000, False)])
def test_new_events_follow_those_of_a_clock_that_was_ahead(
    monkeypatch: pytest.MonkeyPatch, days: int, believed: bool
) -> None:
    """Readers and collection go by keys: 70 batches of a clock 21 days ahead would hide all others for as long."""
    store = MemoryStore()
    monkeypatch.setattr(write, "wall_s", lambda: AT_S + days * 86_400)
    for n in range(70):
        write_batch(store, "iowa", [FreshEvent(0.0, "error", f"old {n}")])
    monkeypatch.setattr(write, "wall_s", lambda: AT_S)
    writer = write.EventWriter(store, every_s=0.0, lingers_s=0.0)
    for n in range(3):
        writer.note("started", "iowa", f"new {n}")
    writer.close(10.0)
    shown = [event.text for event in EventReader().read(store)]
    assert ("new 2" in shown) is believed


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


@pytest.mark.parametrize("kind", sorted(LOG_KINDS))
def test_what_the_log_says_is_taken_from_the_log_alone(kind: str) -> None:
    """A merge that some unit invents would heal errors, and one without its data end every look at the run."""
    assert not decode_batch(batch("invented", kind=kind), "iowa", AT_S)


def test_a_units_newest_batches_are_listed_first() -> None:
    old, new = event_key("iowa", 1000, "aa"), event_key("iowa", 2000, "aa")
    assert new < old and read_event_key(old) == ("iowa", 1000)
    assert read_event_key("event/iowa/1-aa.jsonl") is None and read_event_key("event/../x") is None


def test_one_units_flood_hides_no_other_unit() -> None:
    store = MemoryStore()
    for ms in range(2 * PAGE):
        store.create(event_key("flood", ms, "aa"), batch("noise"))
    for unit in ("alpha", "flood-2", "flood0", "zulu"):
        store.create(event_key(unit, 1, "aa"), batch("heard"))
    keys = newest_batches(store)
    units = [key.split("/")[1] for key in keys]
    assert units.count("flood") == BATCHES and {"alpha", "flood-2", "flood0", "zulu"} <= set(units)
    assert read_event_key(next(key for key in keys if "/flood/" in key)) == ("flood", 2 * PAGE - 1)


def test_a_reader_fetches_each_batch_once() -> None:
    class CountingGets(MemoryStore):
        gets = 0

        def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
            self.gets += 1
            return super().get(key, max_bytes)

    store, reader = CountingGets(), EventReader()
    store.create(event_key("iowa", 1, "aa"), batch("one", "two"))
    first = reader.read(store)
    reader._looked_s = None  # the next look is due
    assert [event.text for event in first] == ["one", "two"] and reader.read(store) == first
    assert store.gets == 1


def test_a_look_that_the_store_ends_early_keeps_the_newest_and_the_next_one_goes_on() -> None:
    class Failing(MemoryStore):
        fails = True

        def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
            if self.fails and (read_event_key(key) or ("", 0))[1] < 2:
                raise StoreError("no answer", where="gs://b")
            return super().get(key, max_bytes)

    store, reader = Failing(), EventReader()
    for ms, unit in enumerate(("iowa", "rhine", "iowa", "rhine")):
        store.create(event_key(unit, ms, "aa"), batch(f"{unit} {ms}"))
    assert {event.text for event in reader.read(store)} == {"iowa 2", "rhine 3"}
    store.fails, reader._looked_s = False, None
    assert len(reader.read(store)) == 4


def test_a_quick_look_reads_the_newest_of_each_unit_and_the_next_one_goes_on() -> None:
    store, reader = MemoryStore(), EventReader()
    for ms in range(4):
        store.create(event_key("iowa", 10 + ms, "aa"), batch(f"iowa {ms}"))
    store.create(event_key("rhine", 1, "aa"), batch("rhine"))
    assert {event.text for event in reader.read(store, most=2)} == {"iowa 3", "rhine"}
    reader._looked_s = None
    assert len(reader.read(store, most=2)) == 4


def test_written_events_and_those_of_the_log_are_one_stream_by_the_stores_time() -> None:
    begun = Note(time_text(AT_S + 3600 - 5), "epoch_start", "syncer", "epoch 2 starts: takes over")
    written = decode_batch(batch("killed"), "iowa", AT_S)  # 3600 s: how far the syncer's clock is ahead of the store's
    found = merged(events_of(Metrics(notes=(begun,)), 3600.0), written)
    assert [(event.kind, event.text) for event in found] == [
        ("serving", "epoch 2 starts: takes over"),
        ("ended", "killed"),
    ]


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
    assert kinds | {"refused"} == set(KIND_OF_COMMIT)
    assert set(KIND_OF_COMMIT.values()) < set(KINDS)


def test_an_error_of_the_evaluator_is_told_for_the_newest_merges() -> None:
    merges = [Event(time_text(AT_S + n), "merged", "syncer", "", {"learners": "x"}) for n in range(1, 11)]
    error = Event(time_text(AT_S), "error", EVALUATOR, "your code: ...")
    assert unhealed_errors([error, *merges[:9]]) == [error] and unhealed_errors([error, *merges]) == []
    assert unhealed_errors([error, *merges], evaluated=False) == [error]


def test_an_error_is_told_until_its_unit_takes_part_again() -> None:
    def at(second: float, kind: str, unit: str, learners: str = "") -> Event:
        return Event(time_text(AT_S + second), kind, unit, f"at {second}", {"learners": learners})

    broken = [at(0, "error", "iowa"), at(1, "error", "rhine"), at(2, "error", "iowa"), at(3, "error", "syncer")]
    assert [event.text for event in unhealed_errors(broken)] == ["at 1", "at 2", "at 3"]
    assert [event.unit for event in unhealed_errors([*broken, at(4, "merged", "syncer", "x, rhine")])] == ["iowa"]
    for well in (Event(time_text(AT_S + 9), "joined", "iowa", "in europe"),
                 Event(time_text(AT_S + 9), "ended", "iowa", "it is done", {"status": 0})):  # fmt: skip
        assert "iowa" not in [event.unit for event in unhealed_errors([*broken, well])]
    ill = Event(time_text(AT_S + 9), "ended", "iowa", "the store failed", {"status": 6})
    assert "iowa" in [event.unit for event in unhealed_errors([*broken, ill])]
