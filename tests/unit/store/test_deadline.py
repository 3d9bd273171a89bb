"""Calls that end when their time is over, whatever the store below does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from diloco_cli.clock import monotonic_s
from diloco_cli.store.deadline import Deadline, TimeBoxedStore, call_within
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Exists, StoreBrokenError, StoreUnavailableError
from diloco_cli.store.retry import RetryingStore


class HangingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        self.released.wait(20)
        return super().get(key, max_bytes)


@pytest.fixture
def hanging() -> Iterator[HangingStore]:
    store = HangingStore()
    yield store
    store.released.set()


def test_within_its_time_it_is_the_store_itself() -> None:
    store = TimeBoxedStore(MemoryStore(), Deadline(10))
    assert store.create("k", b"12345") == Created() and store.create("k", b"x") == Exists(b"12345")
    assert (store.get("k"), store.get_range("k", 1, 3), store.list("")) == (b"12345", b"23", ["k"])
    store.put("h", b"1")
    store.delete("k")
    assert store.stat("k") is None and store.stat("h") is not None


def test_errors_come_through_as_they_are() -> None:
    def refuse() -> None:
        raise StoreBrokenError("no such bucket")

    with pytest.raises(StoreBrokenError, match="no such bucket"):
        call_within(Deadline(10), refuse, "here")


def test_a_call_that_hangs_is_left_behind_and_the_next_is_not_begun(hanging: HangingStore) -> None:
    box = Deadline(0.2)
    store, started_s = TimeBoxedStore(hanging, box), monotonic_s()
    with pytest.raises(StoreUnavailableError, match="no answer within 200 ms") as raised:
        store.get("a/key")
    assert 0.2 <= monotonic_s() - started_s < 5
    assert raised.value.where == "memory://anonymous/a/key" and "diloco doctor" in (raised.value.hint or "")
    with pytest.raises(StoreUnavailableError):
        store.create("k", b"x")
    assert hanging.list("") == []
    hanging.released.set()
    for thread in calls_left_behind():
        thread.join(20)
    box.restart(10)
    assert store.get("a/key") is None


def test_a_store_that_hangs_is_looked_at_by_one_thread_however_often_somebody_looks(hanging: HangingStore) -> None:
    before = len(calls_left_behind())
    box = Deadline(0.2)
    store = RetryingStore(TimeBoxedStore(hanging, box), 30.0, left_s=box.left_s)
    words, took_s = set(), []
    for _ in range(5):
        started_s = monotonic_s()
        box.restart(0.2 if not words else 60.0)
        box.seconds = 0.2
        with pytest.raises(StoreUnavailableError) as raised:
            store.get("a/key")
        words.add(str(raised.value))
        took_s.append(monotonic_s() - started_s)
    assert len(words) == 1 and max(took_s[1:]) < 5
    assert len(calls_left_behind()) == before + 1


def test_the_last_few_things_are_tried_beside_a_call_that_hangs(hanging: HangingStore) -> None:
    box = Deadline(0.2)
    store = TimeBoxedStore(hanging, box, keeps_trying=True)
    with pytest.raises(StoreUnavailableError):
        store.get("a/key")
    box.restart(10)
    assert store.create("k", b"x") == Created()


def calls_left_behind() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "store-call"]
