"""A thread that waits for a store's call shows that it lives."""

from __future__ import annotations

import threading

import pytest

from diloco_cli.errors import StoreError
from diloco_cli.learner.daemon import AttendedStore
from diloco_cli.store.memory import MemoryStore


class SlowStore(MemoryStore):
    """Its calls end when a test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        assert self.may_end.wait(10)
        if key == "broken":
            raise StoreError("broken")
        return super().get(key, max_bytes)


def test_a_long_call_is_attended_by_the_calling_thread() -> None:
    below, seen = SlowStore(), list[int]()

    def attend() -> None:
        seen.append(threading.get_ident())
        if len(seen) == 3:
            below.may_end.set()

    store = AttendedStore(below, attend, every_s=0.01)
    below.create("a", b"1")
    assert store.get("a") == b"1" and set(seen) == {threading.get_ident()} and len(seen) >= 3
    with pytest.raises(StoreError, match="broken"):
        store.get("broken")


def test_a_call_that_hangs_is_not_attended_for_ever() -> None:
    below, seen = SlowStore(), list[int]()
    timer = threading.Timer(0.3, below.may_end.set)
    timer.start()
    assert AttendedStore(below, lambda: seen.append(1), every_s=0.01, most_s=0.0).get("a") is None
    assert not seen
