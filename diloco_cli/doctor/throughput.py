"""How fast whole objects go up and come down, one after the other, and how long the smallest read takes."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from diloco_cli.clock import seconds_of
from diloco_cli.doctor.place import Place, noise
from diloco_cli.units import format_bandwidth, format_duration, format_size

SMALL_READS = 11
FIRST_BYTES = 1_000_000
MAX_BYTES = 64_000_000
QUICK_MAX_BYTES = 4_000_000
GROWTH = 4
LONG_ENOUGH_S = 1.0
"""An object that takes this long says enough: larger ones are not tried."""
SLOWER_BY = 12.0
"""The next size up may take `GROWTH` times as long, thrice (up, down, clean-up): not begun with less time left."""


@dataclass(frozen=True)
class Speed:
    """Of the largest object that was tried."""

    payload_bytes: int
    up_bps: float
    down_bps: float
    latency_s: float

    def text(self) -> str:
        return (
            f"{format_bandwidth(self.up_bps)} up, {format_bandwidth(self.down_bps)} down (one object of "
            f"{format_size(self.payload_bytes)}), {format_duration(self.latency_s)} a small read"
        )


def measure_speed(place: Place, max_bytes: int) -> Speed:
    """Objects grow until one takes a second, or there is no time for the next."""
    place.store.create("speed/small", b"x" * 64)
    latency_s = median(seconds_of(lambda: place.store.get("speed/small", 64)) for _ in range(SMALL_READS))
    size = FIRST_BYTES
    while True:
        key, data = f"speed/{size}", noise(f"speed {size}", size)
        up_s = seconds_of(lambda key=key, data=data: place.store.create(key, data))  # type: ignore[misc]
        down_s = seconds_of(lambda key=key, size=size: place.store.get(key, size))  # type: ignore[misc]
        slower_s = max(up_s, down_s)
        bigger = size * GROWTH
        if slower_s >= LONG_ENOUGH_S or bigger > max_bytes or SLOWER_BY * slower_s > place.box.left_s():
            return Speed(size, 8 * size / up_s, 8 * size / down_s, latency_s)
        size = bigger
