"""The writer of events: batched, bounded, and never in the way."""

from __future__ import annotations

import threading

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import StoreError
from diloco_cli.events.event import MAX_BATCH
from diloco_cli.events.read import EventReader
from diloco_cli.events.write import EventWriter
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Exists
from tests.waiting import wait_until


class CreatesStore(MemoryStore):
    creates = 0

    def create(self, key: str, data: bytes) -> Created | Exists:
        self.creates += 1
        return super().create(key, data)


def texts(store: MemoryStore) -> list[str]:
    return [event.text for event in EventReader().read(store)]


def test_events_of_a_unit_are_written_together_and_the_next_ones_later() -> None:
    store = CreatesStore()
    writer = EventWriter(store, every_s=60.0, lingers_s=0.05)
    for text in ("ended", "restarted"):
        writer.note("ended", "iowa", text)
    writer.note("ended", "rhine", "other")
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
