"""Reads the events of a run from its bucket: those that processes wrote, merged with those of the log."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from heapq import nlargest
from itertools import zip_longest

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import StoreError
from diloco_cli.events.event import MAX_BATCH_BYTES, Event, decode_batch
from diloco_cli.protocol.log.keys import EVENTS, SYNCER, read_event_key
from diloco_cli.protocol.log.metrics import RECENT_MERGES
from diloco_cli.store.parallel import answers
from diloco_cli.store.port import Store

EVALUATOR = "evaluator"
BATCHES = 16  # of each unit, the newest
MAX_PAGES = 64
PAGE = 256  # keys of one listing
LOOK_EVERY_S = 5.0


class EventReader:
    """Reads a run's batches of events again and again, each batch once, the newest of each unit first: where a look
    ends before all are read, the next one goes on. A listing a look, for units that wrote no more than PAGE together;
    looks within LOOK_EVERY_S ask nothing."""

    def __init__(self) -> None:
        self._batches: dict[str, list[Event]] = {}
        self._looked_s: float | None = None

    def read(self, store: Store, most: int | None = None) -> list[Event]:
        """The events that processes wrote, newest batches only, oldest first; `most` batches more than were read."""
        now_s = monotonic_s()
        if self._looked_s is None or now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            with suppress(StoreError):  # events are for display: without them the rest is shown
                keys = newest_batches(store)
                self._batches = {key: self._batches[key] for key in keys if key in self._batches}
                unread = [key for key in keys if key not in self._batches][:most]
                for key, batch in zip(unread, answers(partial(_batch, store), unread), strict=True):
                    self._batches[key] = batch
        return sorted((event for batch in self._batches.values() for event in batch), key=_time)


def merged(*streams: Iterable[Event]) -> list[Event]:
    """All of them, in the order of their times."""
    return sorted((event for stream in streams for event in stream), key=_time)


def newest_batches(store: Store) -> list[str]:
    """The keys of the newest BATCHES of each unit, first the newest of all units. One unit's flood costs a page at
    most: the listing goes on behind its keys."""
    found: dict[str, deque[str]] = defaultdict(deque)
    after = ""
    for _ in range(MAX_PAGES):
        keys = store.list(EVENTS, after=after, limit=PAGE)
        for key in keys:
            read = read_event_key(key)
            if read is not None and len(found[read[0]]) < BATCHES:
                found[read[0]].append(key)
        if len(keys) < PAGE:
            break
        unit = keys[-1].removeprefix(EVENTS).partition("/")[0]
        after = f"{EVENTS}{unit}0" if len(found[unit]) >= BATCHES else keys[-1]  # "0" follows "/"
    return [key for keys in zip_longest(*(found[unit] for unit in sorted(found))) for key in keys if key is not None]


def newest(events: Iterable[Event], count: int) -> list[Event]:
    """The newest first."""
    return nlargest(count, events, key=_time)


def unhealed_errors(events: Iterable[Event], evaluated: bool = True) -> list[Event]:
    """The last error of each unit, oldest first, unless something since then shows that the unit is well: it joined, or
    ended as it should, or there was a merge: one with an offer of this learner, any merge if it is the syncer. The
    evaluator's is told for RECENT_MERGES merges, and for good if the run was never `evaluated`. `events`: oldest
    first."""
    last: dict[str, Event] = {}
    merges = 0
    for event in events:
        if event.kind == "error":
            last[event.unit] = event
            merges = 0 if event.unit == EVALUATOR else merges
        elif event.kind == "joined" or (event.kind == "ended" and event.data.get("status") == 0):
            last.pop(event.unit, None)
        elif event.kind == "merged":
            merges += 1
            well = (
                SYNCER,
                *str(event.data["learners"]).split(", "),
                *([EVALUATOR] if evaluated and merges >= RECENT_MERGES else []),
            )
            for unit in well:
                last.pop(unit, None)
    return sorted(last.values(), key=_time)


def _batch(store: Store, key: str) -> list[Event]:
    data, stat, read = store.get(key, MAX_BATCH_BYTES), store.stat(key), read_event_key(key)
    if data is None or stat is None or read is None:
        return []
    return decode_batch(data, read[0], stat.modified_s)


def _time(event: Event) -> str:
    return event.time
