"""What a syncer's merges take, as it measures itself: a call to the store, the bytes beyond it, its processor.

Calls with little to carry show how long a call takes. What a call with a large object takes beyond that is the bytes'.
Between two calls the process computes. `status` makes of it what a slot takes (protocol/rules/capacity.py).

A call that was repeated, or had to wait for its turn, says nothing of the store's pace, and is left out: a store that
fails or throttles is told of by itself. Nor may one odd value carry a mean away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diloco_cli.protocol.log.operations import Create, Operation, Put, There, Together
from diloco_cli.protocol.log.together import MAX_AT_ONCE
from diloco_cli.protocol.rules.capacity import turns

LARGE_BYTES = 1 << 16
CALLS_SHARE = 0.05  # that a new call has in the mean
MERGES_SHARE = 0.2  # that a new merge has
MOST_OF_MEAN = 4.0  # times the mean: a larger value counts as that
DIGITS = 6


class Spending:
    """Of one syncer process; seconds. `pauses`: how many there have been before calls to the store; `connections`: how
    many calls go at a time."""

    def __init__(self, pauses: Callable[[], int] = lambda: 0, connections: int = MAX_AT_ONCE) -> None:
        self._pauses, self._paused_before, self._connections = pauses, 0, connections
        self._call_s: float | None = None
        self._merge_bytes_s: float | None = None
        self._merge_processor_s: float | None = None
        self._bytes_s: float | None = 0.0  # of the present merge; None: a call that carried some was paused
        self._processor_s = 0.0

    def computed(self, seconds: float) -> None:
        """The process worked for so long between two calls."""
        self._processor_s += seconds
        self._paused_before = self._pauses()

    def called(self, operation: Operation, answer: Any, seconds: float) -> None:
        """A call, or those that went together, took so long, pauses included."""
        is_large, paused = _num_bytes(operation, answer) >= LARGE_BYTES, self._pauses() != self._paused_before
        in_turn = turns(len(operation.operations), self._connections) if isinstance(operation, Together) else 1
        if paused:
            self._bytes_s = None if is_large else self._bytes_s
        elif not is_large:
            self._call_s = _mean(self._call_s, seconds / in_turn, CALLS_SHARE)
        elif self._bytes_s is not None:
            self._bytes_s += max(0.0, seconds - in_turn * (self._call_s or 0.0))

    def merged(self) -> None:
        """A merge is in the log: what came since the one before was for it."""
        self._merge_processor_s = _mean(self._merge_processor_s, self._processor_s, MERGES_SHARE)
        if self._bytes_s is not None:
            self._merge_bytes_s = _mean(self._merge_bytes_s, self._bytes_s, MERGES_SHARE)
        self._bytes_s, self._processor_s = 0.0, 0.0

    def facts(self) -> dict[str, float]:
        """For the heartbeat; nothing before the first merge whose parts are all known."""
        if self._call_s is None or self._merge_bytes_s is None or self._merge_processor_s is None:
            return {}
        found = {"call_s": self._call_s, "bytes_s": self._merge_bytes_s, "processor_s": self._merge_processor_s}
        return {name: round(value, DIGITS) for name, value in found.items()}


def _mean(before: float | None, value: float, share: float) -> float:
    """With a share of the new value, as far as that is like those before it."""
    if not before:
        return value
    return before + share * (min(value, MOST_OF_MEAN * before) - before)


def _num_bytes(operation: Operation, answer: Any) -> int:
    """Carried, either way."""
    if isinstance(operation, Together):
        answers: Sequence[Any] = answer
        return sum(map(_num_bytes, operation.operations, answers))
    inner = operation.operation if isinstance(operation, There) else operation
    sent = len(inner.data) if isinstance(inner, Create | Put) else 0
    return sent + (len(answer) if isinstance(answer, bytes) else 0)
