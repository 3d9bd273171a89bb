"""Carries the events in a region's own bucket home, where `status` and `diloco events` read them."""

from __future__ import annotations

from collections.abc import Collection

from diloco_cli.clock import wall_s
from diloco_cli.events.event import MAX_BATCH_BYTES, FreshEvent, decode_batch, encode_batch
from diloco_cli.events.read import newest_batches
from diloco_cli.protocol.log.keys import read_event_key
from diloco_cli.store.port import Store
from diloco_cli.units import parse_time


class EventCarrier:
    """Of one region, in one process. A batch has the same key in both buckets, so that none is carried twice, also by
    the next syncer."""

    def __init__(self) -> None:
        self._passed: set[str] | None = None

    def carry(self, there: Store, home: Store, units: Collection[str]) -> None:
        """The newest batch of each of these units that is not at home yet: one write a unit and call. What lies there
        under another unit's name stays there: who may write in a region speaks for its learners alone."""
        if self._passed is None:
            self._passed = set(newest_batches(home))
        keys = newest_batches(there)
        self._passed &= set(keys)
        carried: set[str] = set()
        for key in keys:  # the newest of each unit first
            read = read_event_key(key)
            if read is None or read[0] in carried or read[0] not in units or key in self._passed:
                continue
            if data := _as_of_now(there, key, read[0]):
                home.create(key, data)
            self._passed.add(key)
            carried.add(read[0])


def _as_of_now(there: Store, key: str, unit: str) -> bytes:
    """The batch with the ages that its events have now; empty if none of it is an event. The region's store knows when
    it was written; how long ago that was, this machine's clock tells."""
    data, stat = there.get(key, MAX_BATCH_BYTES), there.stat(key)
    if data is None or stat is None:
        return b""
    now_s = max(wall_s(), stat.modified_s)
    events = ((event, parse_time(event.time) or now_s) for event in decode_batch(data, unit, stat.modified_s))
    return encode_batch((FreshEvent(at_s, event.kind, event.text, event.data) for event, at_s in events), now_s)
