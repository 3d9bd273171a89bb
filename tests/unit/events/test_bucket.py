"""Events in a bucket: the writer, bounded and never in the way; the carrier from a region's bucket; the reader."""

from __future__ import annotations

import threading

import pytest

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import StoreError
from diloco_cli.events import bucket
from diloco_cli.events.bucket import (
    BATCHES,
    EVALUATOR,
    PAGE,
    EventCarrier,
    EventReader,
    EventWriter,
    merged,
    newest_batches,
    unhealed_errors,
    write_batch,
)
from diloco_cli.events.event import MAX_BATCH, Event, FreshEvent, decode_batch, encode_batch, events_of
from diloco_cli.protocol.log.keys import event_key, read_event_key
from diloco_cli.protocol.log.metrics import Metrics, Note
from diloco_cli.quantities import parse_time, time_text
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Exists, ObjectStat
from tests.waiting import wait_until

AT_S = 1_800_000_000.0


def batch(*texts: str, kind: str = "ended") -> bytes:
    return encode_batch([FreshEvent(0.0, kind, text) for text in texts], 0.0)


class CreatesStore(MemoryStore):
    creates = 0

    def create(self, key: str, data: bytes) -> Created | Exists:
        self.creates += 1
        return super().create(key, data)


def texts(store: MemoryStore) -> list[str]:
    return [event.text for event in EventReader().read(store)]


def test_events_of_a_unit_are_written_together_and_the_next_ones_later(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now_s = CreatesStore(), 0.0
    monkeypatch.setattr(bucket, "monotonic_s", lambda: now_s)
    writer = EventWriter(store, every_s=60.0, lingers_s=0.05)
    for text in ("ended", "restarted"):
        writer.note("ended", "iowa", text)
    writer.note("ended", "rhine", "other")
    now_s = 0.05
    wait_until(lambda: store.creates == 2)
    writer.note("ended", "iowa", "soon again")
    assert sorted(texts(store)) == ["ended", "other", "restarted"]
    writer.close()
    assert store.creates == 3 and "soon again" in texts(store)


def test_a_store_that_hangs_or_fails_holds_nobody_up_and_what_is_lost_is_counted() -> None:
    class ForbiddenStore(MemoryStore):
        def create(self, key: str, data: bytes) -> Created | Exists:
            raise StoreError("forbidden")

    hangs = threading.Event()

    class StuckStore(MemoryStore):
        def create(self, key: str, data: bytes) -> Created | Exists:
            hangs.wait(60)
            return super().create(key, data)

    failing = EventWriter(ForbiddenStore(), lingers_s=0.0)
    failing.note("ended", "iowa", "lost")
    wait_until(lambda: failing.dropped == 1)
    assert failing.trouble == "forbidden"
    hanging, started_s = EventWriter(StuckStore(), lingers_s=0.0), monotonic_s()
    for _ in range(3 * MAX_BATCH):
        hanging.note("ended", "iowa", "waits")
    hanging.close(within_s=0.1)
    assert monotonic_s() - started_s < 5.0 and hanging.dropped >= MAX_BATCH
    hangs.set()


@pytest.mark.parametrize(("days", "believed"), [(21, True), (3000, False)])
def test_new_events_follow_those_of_a_clock_that_was_ahead(
    monkeypatch: pytest.MonkeyPatch, days: int, believed: bool
) -> None:
    """Readers and collection go by keys: 70 batches of a clock 21 days ahead would hide all others for as long."""
    store = MemoryStore()
    monkeypatch.setattr(bucket, "wall_s", lambda: AT_S + days * 86_400)
    for n in range(70):
        write_batch(store, "iowa", [FreshEvent(0.0, "error", f"old {n}")])
    monkeypatch.setattr(bucket, "wall_s", lambda: AT_S)
    writer = EventWriter(store, every_s=0.0, lingers_s=0.0)
    for n in range(3):
        writer.note("started", "iowa", f"new {n}")
    writer.close(10.0)
    shown = [event.text for event in EventReader().read(store)]
    assert ("new 2" in shown) is believed


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


def test_written_events_and_those_of_the_log_are_one_stream_by_the_stores_time() -> None:
    begun = Note(time_text(AT_S + 3600 - 5), "epoch_start", "syncer", "epoch 2 starts: takes over")
    written = decode_batch(batch("killed"), "iowa", AT_S)  # 3600 s: how far the syncer's clock is ahead of the store's
    found = merged(events_of(Metrics(notes=(begun,)), 3600.0), written)
    assert [(event.kind, event.text) for event in found] == [
        ("serving", "epoch 2 starts: takes over"),
        ("ended", "killed"),
    ]


class OldStore(MemoryStore):
    """Whose objects were written `age_s` ago."""

    age_s = 0.0

    def stat(self, key: str) -> ObjectStat | None:
        found = super().stat(key)
        return found and ObjectStat(key, found.size_bytes, found.modified_s - self.age_s)


def told(store: MemoryStore, unit: str, ms: int, text: str) -> None:
    store.create(event_key(unit, ms, "aa"), encode_batch([FreshEvent(0.0, "error", text, {"place": "m.py:4"})], 2.0))


def test_what_a_region_tells_is_seen_at_home_with_the_time_at_which_it_happened() -> None:
    there, home = OldStore(), MemoryStore()
    told(there, "belgium", 1, "disk full")
    there.age_s = 300.0
    EventCarrier().carry(there, home, {"belgium"})
    (event,), (original,) = EventReader().read(home), EventReader().read(there)
    assert (event.kind, event.unit, event.text, event.data) == ("error", "belgium", "disk full", {"place": "m.py:4"})
    assert abs((parse_time(event.time) or 0) - (parse_time(original.time) or 0)) < 2.0


def test_a_call_writes_one_batch_a_unit_the_newest_first() -> None:
    there, home, carrier = MemoryStore(), MemoryStore(), EventCarrier()
    for ms in (1, 2, 3):
        told(there, "belgium", ms, f"belgium {ms}")
    told(there, "paris", 1, "paris 1")
    carrier.carry(there, home, {"belgium", "paris"})
    assert sorted(texts(home)) == ["belgium 3", "paris 1"]
    for _ in range(3):
        carrier.carry(there, home, {"belgium", "paris"})
    assert sorted(texts(home)) == ["belgium 1", "belgium 2", "belgium 3", "paris 1"]


def test_the_next_syncer_carries_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    there, home = MemoryStore(), MemoryStore()
    told(there, "belgium", 1, "once")
    for later_s in (0.0, 60.0):  # with another age its bytes differ
        monkeypatch.setattr(bucket, "wall_s", lambda later_s=later_s: 2e9 + later_s)
        EventCarrier().carry(there, home, {"belgium"})
    assert texts(home) == ["once"] and len(newest_batches(home)) == 1


def test_a_region_speaks_for_its_own_learners_alone() -> None:
    there, home = MemoryStore(), MemoryStore()
    for unit in ("syncer", "iowa", "belgium"):
        told(there, unit, 1, unit)
    there.create(event_key("belgium", 2, "aa"), b"no events")
    carrier = EventCarrier()
    for _ in range(3):
        carrier.carry(there, home, {"belgium"})
    assert texts(home) == ["belgium"]
