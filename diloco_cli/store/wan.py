"""An emulated link: the same store, as far away and as slow as told. For trying a wide-area run on one
machine."""

from __future__ import annotations

import threading
from collections.abc import Callable

from diloco_cli import clock
from diloco_cli.store.port import Created, Exists, ObjectStat, Store

_SLICE_S = 0.05
"""Transfers share a direction in turns of this length, so that a small record does not wait for a whole
payload."""


class _Direction:
    """One direction of a link; all threads queue for it."""

    def __init__(self, bits_per_s: float | None, sleep: Callable[[float], object], now: Callable[[], float]) -> None:
        self._bytes_per_s = bits_per_s / 8 if bits_per_s else None
        self._sleep = sleep
        self._now = now
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def carry(self, num_bytes: int) -> None:
        """Returns when that many bytes have passed."""
        if self._bytes_per_s is None:
            return
        left_s = num_bytes / self._bytes_per_s
        while left_s > 0:
            turn_s = min(left_s, _SLICE_S)
            left_s -= turn_s
            with self._lock:
                now_s = self._now()
                self._free_at_s = max(now_s, self._free_at_s) + turn_s
                wait_s = self._free_at_s - now_s
            self._sleep(wait_s)


class EmulatedLink:
    """Every call takes one round trip and the time of its payload at the given bits per second, up and down
    apart; None is unlimited. An upload takes effect after its bytes have passed. One object is one link:
    share it among the threads of a machine."""

    def __init__(
        self,
        store: Store,
        up_bps: float | None,
        down_bps: float | None,
        rtt_s: float,
        sleep: Callable[[float], object] = clock.sleep_s,
        monotonic: Callable[[], float] = clock.monotonic_s,
    ) -> None:
        self.url = store.url
        self._store = store
        self._rtt_s = rtt_s
        self._sleep = sleep
        self._up = _Direction(up_bps, sleep, monotonic)
        self._down = _Direction(down_bps, sleep, monotonic)

    def create(self, key: str, data: bytes) -> Created | Exists:
        self._send(len(data))
        outcome = self._store.create(key, data)
        if isinstance(outcome, Exists):
            self._down.carry(len(outcome.data))
        return outcome

    def get(self, key: str, most_bytes: int | None = None) -> bytes | None:
        self._send()
        return self._receive(self._store.get(key, most_bytes))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        self._send()
        return self._receive(self._store.get_range(key, start, end))

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        self._send()
        keys = self._store.list(prefix, after, limit)
        self._down.carry(sum(map(len, keys)))
        return keys

    def put(self, key: str, data: bytes) -> None:
        self._send(len(data))
        self._store.put(key, data)

    def delete(self, key: str) -> None:
        self._send()
        self._store.delete(key)

    def stat(self, key: str) -> ObjectStat | None:
        self._send()
        return self._store.stat(key)

    def _send(self, num_bytes: int = 0) -> None:
        self._up.carry(num_bytes)
        if self._rtt_s > 0:
            self._sleep(self._rtt_s)

    def _receive(self, data: bytes | None) -> bytes | None:
        self._down.carry(len(data or b""))
        return data
