"""The only module that reads a clock or sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime


def monotonic_s() -> float:
    """Seconds on this process's own monotonic clock; comparable only within one machine's uptime."""
    return time.monotonic()


def wall_s() -> float:
    """Seconds since the epoch: for display and ages, never for a decision between two machines."""
    return time.time()


def sleep_s(seconds: float) -> None:
    time.sleep(max(0.0, seconds))


def seconds_of(work: Callable[[], object]) -> float:
    """How long the call takes; more than nothing, so that a speed may be computed from it."""
    started_s = monotonic_s()
    work()
    return max(monotonic_s() - started_s, 1e-9)


def utc_now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
