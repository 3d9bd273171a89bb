"""What a syncer's merges take, as it measures itself: a call to the store, the bytes beyond it, its processor.

Calls with little to carry show how long a call takes. What a call with a large object takes beyond that is the bytes'.
Between two calls the process computes. `status` makes of it what a slot takes (protocol/rules/capacity.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco_cli.protocol.log.operations import Create, Operation, Put, There, Together

LARGE_BYTES = 1 << 16
CALLS_SHARE = 0.05  # that a new call has in the mean
MERGES_SHARE = 0.2  # that a new merge has
DIGITS = 6


class Spending:
    """Of one syncer process; seconds."""

    def __init__(self) -> None:
        self._call_s: float | None = None
        self._merge_s: tuple[float, float] | None = None  # bytes, processor
        self._bytes_s = self._processor_s = 0.0

    def computed(self, seconds: float) -> None:
        """The process worked for so long between two calls."""
        self._processor_s += seconds

    def called(self, operation: Operation, answer: Any, seconds: float) -> None:
        """A call, or those that went together, took so long."""
        if _num_bytes(operation, answer) >= LARGE_BYTES:
            self._bytes_s += max(0.0, seconds - (self._call_s or 0.0))
        else:
            self._call_s = _mean(self._call_s, seconds, CALLS_SHARE)

    def merged(self) -> None:
        """A merge is in the log: what came since the one before was for it."""
        before_bytes_s, before_processor_s = self._merge_s or (None, None)
        self._merge_s = (
            _mean(before_bytes_s, self._bytes_s, MERGES_SHARE),
            _mean(before_processor_s, self._processor_s, MERGES_SHARE),
        )
        self._bytes_s = self._processor_s = 0.0

    def facts(self) -> dict[str, float]:
        """For the heartbeat; nothing before the first merge."""
        if self._merge_s is None:
            return {}
        names, seconds = ("call_s", "bytes_s", "processor_s"), (self._call_s or 0.0, *self._merge_s)
        return {name: round(value, DIGITS) for name, value in zip(names, seconds, strict=True)}


def _mean(before: float | None, value: float, share: float) -> float:
    return value if before is None else before + share * (value - before)


def _num_bytes(operation: Operation, answer: Any) -> int:
    """Carried, either way."""
    if isinstance(operation, Together):
        answers: Sequence[Any] = answer
        return sum(map(_num_bytes, operation.operations, answers))
    inner = operation.operation if isinstance(operation, There) else operation
    sent = len(inner.data) if isinstance(inner, Create | Put) else 0
    return sent + (len(answer) if isinstance(answer, bytes) else 0)
