"""The pace of calls to a store that refuses some because they are too many (429, SlowDown).

More calls than a store takes are refused, repeated and refused again, and who repeats most gets least. So each process
finds its pace as TCP does: a refusal cuts it to a share of what went through, calls that go well raise it slowly. By
such steps the paces of processes that share a store become alike, or as their `weight` says: a syncer makes as many
calls as all learners, and is cut as if each of as many connections had a pace of its own (MulTCP, Crowcroft and
Oechslin 1998). Until a store refuses there is no limit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from math import exp
from typing import TypeVar

from diloco_cli import clock
from diloco_cli.store.port import Store, StoreThrottledError
from diloco_cli.store.wrapper import StoreWrapper

T = TypeVar("T")
CUT = 0.8  # of the pace, by one refusal
SETTLE_S = 1.0  # after a cut: calls that were on their way before it say nothing new
RISE_A_S = 0.25  # calls a second, each second in which the pace is used
SLOWEST = 2.0  # calls a second: a process that makes fewer cannot be heard
FORGET_S = 300.0  # without a refusal: the store has become another one
LATELY_S, FELT_SHARE = 20.0, 0.05  # how fast waits are forgotten, and how much of this time is worth a word
MEASURED = 4096  # calls: the newest, for the rate at which they went out


class CallPace:
    """The rule; times are seconds of one monotonic clock. Safe between threads. `limit`: calls a second, if any;
    `waits`: of calls that had to wait, so far."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.limit: float | None = None
        self.waits = 0
        self._lock = threading.Lock()
        self._sent: deque[float] = deque(maxlen=MEASURED)
        self._next_s = self._cut_s = self._waited_to_s = float("-inf")
        self._waited_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Take the next call; returns how long it has to wait."""
        with self._lock:
            if self.limit is not None and now_s - self._cut_s > FORGET_S:
                self.limit = None
            start_s = max(now_s, self._next_s)
            if self.limit is not None:
                self._next_s = start_s + 1.0 / self.limit
            self._sent.append(start_s)
            if start_s > now_s:
                self.waits += 1
                self._waited_s = self._lately_s(start_s) + start_s - max(now_s, self._waited_to_s)
                self._waited_to_s = start_s
            return start_s - now_s

    def is_felt(self, now_s: float) -> bool:
        """Whether calls have lately waited for a good part of the time: a limit that is seldom reached is none."""
        with self._lock:
            return self.limit is not None and self._lately_s(now_s) >= FELT_SHARE * LATELY_S

    def _lately_s(self, now_s: float) -> float:
        """How long calls have waited, one or more at a time, of which ever less counts as it lies back."""
        return self._waited_s * exp(min(0.0, self._waited_to_s - now_s) / LATELY_S)

    def refused(self, now_s: float, retry_after_s: float = 0.0) -> None:
        """The store has refused a call because there are too many, and may have said when to call again."""
        with self._lock:
            if retry_after_s > 0.0:
                self._next_s = max(self._next_s, now_s + retry_after_s)
            if now_s - self._cut_s < SETTLE_S / self.weight:
                return
            self._cut_s = now_s
            lately = sum(now_s - 1.0 <= sent_s <= now_s for sent_s in self._sent)
            cut = 1.0 - (1.0 - CUT) / self.weight
            self.limit = max(SLOWEST, cut * (lately if self.limit is None else self.limit))

    def went_well(self) -> None:
        """A call had its answer."""
        with self._lock:
            if self.limit is not None:
                self.limit += self.weight * RISE_A_S / self.limit


class ThrottledStore(StoreWrapper):
    """Each call waits for its turn. Below the retries: a repeated call waits as any other."""

    def __init__(
        self, store: Store, sleep: Callable[[float], object], monotonic: Callable[[], float] = clock.monotonic_s
    ) -> None:
        super().__init__(store)
        self.pace = CallPace()
        self._sleep, self._monotonic = sleep, monotonic

    @property
    def calls_a_s(self) -> float:
        """The present pace; 0 while there is no limit, or calls hardly wait for it."""
        limit = self.pace.limit
        return round(limit, 1) if limit is not None and self.pace.is_felt(self._monotonic()) else 0.0

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        wait_s = self.pace.wait_s(self._monotonic())
        if wait_s > 0.0:
            self._sleep(wait_s)
        try:
            answer = call()
        except StoreThrottledError as error:
            if verb != "put":  # of one name that is overwritten too often: that says nothing about other calls
                self.pace.refused(self._monotonic(), error.retry_after_s)
            raise
        self.pace.went_well()
        return answer
