"""Requests by the classes that stores charge for."""

from __future__ import annotations

from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.wrapper import MeteredStore


def test_writes_and_listings_are_counted_apart_from_reads() -> None:
    meter = MeteredStore(MemoryStore())
    meter.create("a", b"1")
    meter.put("b", b"2")
    meter.list("")
    for _ in range(3):
        meter.get("a")
    meter.stat("a")
    meter.delete("b")
    assert (meter.counts.num_requests, meter.counts.num_writes) == (8, 3)
