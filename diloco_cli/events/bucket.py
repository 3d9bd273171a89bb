"""Events in a run's bucket: written beside the work and never in its way, carried home from a region's bucket, and read
together with those of the log."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from heapq import nlargest
from itertools import zip_longest
from operator import attrgetter

from diloco_cli.clock import monotonic_s, wall_s
from diloco_cli.errors import DilocoError, StoreError
from diloco_cli.events.event import MAX_BATCH, MAX_BATCH_BYTES, Event, FreshEvent, Scalar, decode_batch, encode_batch
from diloco_cli.protocol.log.keys import EVENTS, SYNCER, event_key, read_event_key
from diloco_cli.protocol.log.metrics import RECENT_MERGES
from diloco_cli.quantities import parse_time
from diloco_cli.randomness import nonce
from diloco_cli.store.open import answers, open_store
from diloco_cli.store.port import Store

EVALUATOR = "evaluator"
WRITE_EVERY_S = 10.0  # for each unit
LINGERS_S = 1.0  # what follows at once goes into the same batch
CLOSES_WITHIN_S = 2.0
MOST_AHEAD_S = 366 * 86_400.0  # a key from further ahead is no clock's
BATCHES = 16  # of each unit, the newest
MAX_PAGES = 64
PAGE = 256  # keys of one listing
LOOK_EVERY_S = 5.0


class EventWriter:
    """A thread that writes batches for the units of this process: each at most every WRITE_EVERY_S, and a last one at
    its end. A failing call of `store` is not repeated: its events are dropped and counted."""

    def __init__(self, store: Store, every_s: float = WRITE_EVERY_S, lingers_s: float = LINGERS_S) -> None:
        self.dropped, self.trouble = 0, ""
        self._store, self._every_s, self._lingers_s = store, every_s, lingers_s
        self._lock, self._news, self._closing = threading.Lock(), threading.Event(), False
        self._pending: dict[str, deque[FreshEvent]] = {}
        self._due_s: dict[str, float] = {}
        self._newest_ms: dict[str, int] = {}
        self._thread = threading.Thread(target=self._work, name="events", daemon=True)
        self._thread.start()

    def note(self, kind: str, unit: str, text: str, data: dict[str, Scalar] | None = None) -> None:
        now_s = monotonic_s()
        with self._lock:
            pending = self._pending.setdefault(unit, deque())
            pending.append(FreshEvent(now_s, kind, text, data or {}))
            if len(pending) > MAX_BATCH:
                pending.popleft()
                self.dropped += 1
            self._due_s[unit] = max(self._due_s.get(unit, 0.0), now_s + self._lingers_s)
        self._news.set()

    def close(self, within_s: float = CLOSES_WITHIN_S) -> None:
        """Write what is left, if that works at once."""
        self._closing = True
        self._news.set()
        self._thread.join(within_s)

    def _work(self) -> None:
        while True:
            now_s, is_last = monotonic_s(), self._closing
            for unit in self._due(now_s, is_last):
                self._write(unit)
            if is_last:
                return
            with self._lock:
                waits = [self._due_s[unit] - now_s for unit, pending in self._pending.items() if pending]
            self._news.wait(max(0.0, min(waits, default=self._every_s)))
            self._news.clear()

    def _due(self, now_s: float, is_last: bool) -> list[str]:
        with self._lock:
            waiting = [unit for unit, pending in self._pending.items() if pending]
            return [unit for unit in waiting if is_last or self._due_s[unit] <= now_s]

    def _write(self, unit: str) -> None:
        with self._lock:
            events = list(self._pending[unit])
            self._pending[unit].clear()
            self._due_s[unit] = monotonic_s() + self._every_s
        try:
            if unit not in self._newest_ms:
                self._newest_ms[unit] = _newest_ms(self._store, unit)
            self._newest_ms[unit] = write_batch(self._store, unit, events, self._newest_ms[unit])
        except (DilocoError, OSError) as error:
            self.dropped += len(events)
            self.trouble = str(error)


def tell_event(
    url: str, kind: str, unit: str, text: str, data: dict[str, Scalar] | None = None, every_s: float = 0.0
) -> None:
    """One event now, by a process that writes few, unless the unit's newest is younger than `every_s`. A bucket that
    does not take it within CLOSES_WITHIN_S is left alone."""

    def write() -> None:
        with suppress(DilocoError, OSError):
            store = open_store(url)
            newest_ms = _newest_ms(store, unit)
            if not 0 <= wall_s() - newest_ms / 1000 < every_s:
                write_batch(store, unit, [FreshEvent(monotonic_s(), kind, text, data or {})], newest_ms)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(CLOSES_WITHIN_S)


def _newest_ms(store: Store, unit: str) -> int:
    """When the unit's newest batch was written, by its key; 0 if there is none."""
    found = read_event_key(next(iter(store.list(f"{EVENTS}{unit}/", limit=1)), ""))
    return 0 if found is None else found[1]


def write_batch(store: Store, unit: str, events: list[FreshEvent], newest_ms: int = 0) -> int:
    """The key's time: the present one, or just after the unit's newest batch, by a clock that was ahead: readers, and
    the collection of old batches, go by the keys' order. (An event's own time comes from the store.)"""
    now_ms = int(wall_s() * 1000)
    is_believed = newest_ms - now_ms < MOST_AHEAD_S * 1000
    written_ms = max(now_ms, newest_ms + 1) if is_believed else now_ms
    store.create(event_key(unit, written_ms, nonce()), encode_batch(events, monotonic_s()))
    return written_ms


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
        return sorted((event for batch in self._batches.values() for event in batch), key=attrgetter("time"))


def merged(*streams: Iterable[Event]) -> list[Event]:
    """All of them, in the order of their times."""
    return sorted((event for stream in streams for event in stream), key=attrgetter("time"))


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
    return nlargest(count, events, key=attrgetter("time"))


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
    return sorted(last.values(), key=attrgetter("time"))


def _batch(store: Store, key: str) -> list[Event]:
    data, stat, read = store.get(key, MAX_BATCH_BYTES), store.stat(key), read_event_key(key)
    if data is None or stat is None or read is None:
        return []
    return decode_batch(data, read[0], stat.modified_s)


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
