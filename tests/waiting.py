"""Waits for what other threads and processes do, however busy the machine is."""

from __future__ import annotations

from collections.abc import Callable

from diloco_cli.clock import monotonic_s, sleep_s

BOUND_S = 60.0


def wait_until(holds: Callable[[], object], within_s: float = BOUND_S) -> None:
    deadline_s = monotonic_s() + within_s
    while not holds():
        assert monotonic_s() < deadline_s, f"did not happen in {within_s:.0f} s"
        sleep_s(0.01)
