"""An emulated link: a store with a given latency and bandwidth. For trying a wide-area run on one
machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from diloco_cli import clock
from diloco_cli.store.port import Store
from diloco_cli.store.wrapper import StoreWrapper, received_bytes

T = TypeVar("T")

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
        """Returns when `num_bytes` have passed."""
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


class EmulatedLink(StoreWrapper):
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
        super().__init__(store)
        self._rtt_s = rtt_s
        self._sleep = sleep
        self._up = _Direction(up_bps, sleep, monotonic)
        self._down = _Direction(down_bps, sleep, monotonic)

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        self._up.carry(num_bytes)
        if self._rtt_s > 0:
            self._sleep(self._rtt_s)
        answer = call()
        self._down.carry(sum(map(len, answer)) if isinstance(answer, list) else received_bytes(answer))
        return answer
