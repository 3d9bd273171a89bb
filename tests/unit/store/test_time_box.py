"""Calls that end when their time is over, whatever the store below does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from diloco_cli.clock import monotonic_s
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Exists, StoreBrokenError, StoreUnavailableError
from diloco_cli.store.time_box import TimeBox, TimeBoxedStore, call_within


class Hangs(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def get(self, key: str) -> bytes | None:
        self.released.wait(20)
        return super().get(key)


@pytest.fixture
def hanging() -> Iterator[Hangs]:
    store = Hangs()
    yield store
    store.released.set()


def test_within_its_time_it_is_the_store_itself() -> None:
    store = TimeBoxedStore(MemoryStore(), TimeBox(10))
    assert store.create("k", b"12345") == Created() and store.create("k", b"x") == Exists(b"12345")
    assert (store.get("k"), store.get_range("k", 1, 3), store.list("")) == (b"12345", b"23", ["k"])
    store.put("h", b"1")
    store.delete("k")
    assert store.stat("k") is None and store.stat("h") is not None


def test_errors_come_through_as_they_are() -> None:
    def refuse() -> None:
        raise StoreBrokenError("no such bucket")

    with pytest.raises(StoreBrokenError, match="no such bucket"):
        call_within(TimeBox(10), refuse, "here")


def test_a_call_that_hangs_is_left_behind_and_the_next_is_not_begun(hanging: Hangs) -> None:
    box = TimeBox(0.2)
    store, started_s = TimeBoxedStore(hanging, box), monotonic_s()
    with pytest.raises(StoreUnavailableError, match="no answer within 200 ms") as raised:
        store.get("a/key")
    assert 0.2 <= monotonic_s() - started_s < 5
    assert raised.value.where == "memory://anonymous/a/key" and "diloco doctor" in (raised.value.hint or "")
    with pytest.raises(StoreUnavailableError):
        store.create("k", b"x")
    assert hanging.list("") == []
    hanging.released.set()
    box.restart(10)
    assert store.get("a/key") is None
