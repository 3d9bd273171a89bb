"""Events that were told in a region's own bucket are seen from the home bucket."""

from __future__ import annotations

import pytest

from diloco_cli.events import carry
from diloco_cli.events.carry import EventCarrier
from diloco_cli.events.event import FreshEvent, encode_batch
from diloco_cli.events.read import EventReader, newest_batches
from diloco_cli.protocol.log.keys import event_key
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import ObjectStat
from diloco_cli.units import parse_time


class OldStore(MemoryStore):
    """Whose objects were written `age_s` ago."""

    age_s = 0.0

    def stat(self, key: str) -> ObjectStat | None:
        found = super().stat(key)
        return found and ObjectStat(key, found.size_bytes, found.modified_s - self.age_s)


def told(store: MemoryStore, unit: str, ms: int, text: str) -> None:
    store.create(event_key(unit, ms, "aa"), encode_batch([FreshEvent(0.0, "error", text, {"place": "m.py:4"})], 2.0))


def texts(store: MemoryStore) -> list[str]:
    return [event.text for event in EventReader().read(store)]


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
        monkeypatch.setattr(carry, "wall_s", lambda later_s=later_s: 2e9 + later_s)
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
