"""Writes events into the bucket, never in the way of the work: what cannot be written is dropped and counted."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

from diloco_cli.clock import monotonic_s, wall_s
from diloco_cli.errors import DilocoError
from diloco_cli.events.event import MAX_BATCH, FreshEvent, Scalar, encode_batch
from diloco_cli.protocol.log.keys import EVENTS, event_key, read_event_key
from diloco_cli.randomness import nonce
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store

WRITE_EVERY_S = 10.0  # for each unit
LINGERS_S = 1.0  # what follows at once goes into the same batch
CLOSES_WITHIN_S = 2.0
MOST_AHEAD_S = 366 * 86_400.0  # a key from further ahead is no clock's


class EventWriter:
    """A thread that writes batches for the units of this process: each at most every WRITE_EVERY_S, and a last one at
    its end. `store`: a call of it may fail or hang, as it is not repeated and nothing waits for it."""

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
) -> None:  # fmt: skip
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
