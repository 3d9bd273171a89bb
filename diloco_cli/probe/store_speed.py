"""How fast whole objects are written to and read from a store, and how long the smallest request takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco_cli.clock import monotonic_s, seconds_of
from diloco_cli.probe.spread import Spread, spread_of
from diloco_cli.randomness import nonce
from diloco_cli.store.port import Store

PAYLOAD_BYTES = 8_000_000
SMALL_BYTES = 64
NUM_SMALL = 10
MAX_PAYLOADS = 50
FEWEST_PAYLOADS = 3


@dataclass(frozen=True)
class StoreSpeed:
    """Bits per second of one object after the other, seconds of one small read."""

    up_bps: Spread
    down_bps: Spread
    rtt_s: Spread


def measure_store(store: Store, seconds: float, payload_bytes: int = PAYLOAD_BYTES) -> StoreSpeed:
    """At least `FEWEST_PAYLOADS` objects each way, no new one after `seconds`; written objects are deleted again.

    Bytes that compress or repeat could make a link look faster, so every payload is another slice of random ones.
    """
    prefix, written = f"probe-{nonce()}", []
    noise = _noise(payload_bytes + MAX_PAYLOADS)
    try:

        def write(number: int) -> None:
            written.append(f"{prefix}-{number}")
            store.create(written[-1], noise[number : number + payload_bytes])

        ups = _timed(write, seconds)
        downs = _timed(lambda number: store.get(written[number % len(ups)], payload_bytes), seconds)
        written.append(f"{prefix}-small")
        store.create(written[-1], noise[:SMALL_BYTES])
        small = [seconds_of(lambda: store.get(f"{prefix}-small", SMALL_BYTES)) for _ in range(NUM_SMALL)]
    finally:
        for key in written:
            store.delete(key)
    bits = 8.0 * payload_bytes
    return StoreSpeed(spread_of([bits / s for s in ups]), spread_of([bits / s for s in downs]), spread_of(small))


def _timed(work: Callable[[int], object], seconds: float) -> list[float]:
    """Seconds of each call."""
    started_s, took = monotonic_s(), list[float]()
    while len(took) < FEWEST_PAYLOADS or (monotonic_s() - started_s < seconds and len(took) < MAX_PAYLOADS):
        number = len(took)
        took.append(seconds_of(lambda number=number: work(number)))  # type: ignore[misc]
    return took


def _noise(num_bytes: int) -> bytes:
    """Bytes without a pattern, the same every time."""
    import numpy as np

    return np.random.default_rng(0).bytes(num_bytes)
