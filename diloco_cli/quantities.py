"""Quantities as people write them: strict to read, short to print, as are lists of names. Units are never guessed.

bandwidth  "2 Gbps", "30 Mbit/s", "12 MB/s"   -> bits per second
duration   "5 ms", "4 min", "6 h"             -> seconds
count      "20B", "1.5M", "524288"            -> a whole number
size       "80 GB", "16 GiB"                  -> bytes
price      "112.0/h"                          -> money per hour
egress     "0.02/GB"                          -> money per 10^9 bytes
time       "2026-01-01T00:00:00.000Z"         -> seconds since the epoch
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from diloco_cli.errors import UsageError

NUMBER_THEN_UNIT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,2})?)\s*(.*)", re.DOTALL)
MAX_COUNT = 10**18
MAX_NAMES = 6  # in one line

BANDWIDTH_BPS = {
    "bps": 1, "kbps": 10**3, "Kbps": 10**3, "Mbps": 10**6, "Gbps": 10**9, "Tbps": 10**12,
    "bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12,
    "B/s": 8, "kB/s": 8 * 10**3, "MB/s": 8 * 10**6, "GB/s": 8 * 10**9,
}  # fmt: skip
SIZE_BYTES = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
    "TiB": 1 << 40,
}  # fmt: skip
DURATION_MS = {
    "ms": 1, "s": 10**3, "min": 60 * 10**3, "h": 3600 * 10**3, "d": 86400 * 10**3,
}  # fmt: skip
COUNT_SUFFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

BANDWIDTH_FORMS = "write for example 30 Mbps, 2 Gbps, 30 Mbit/s or 12 MB/s"
DURATION_FORMS = "write for example 5 ms, 60 s, 4 min, 6 h or 2 d"
SIZE_FORMS = "write for example 500 MB, 20 GB or 16 GiB"
COUNT_FORMS = "write a whole number such as 524288, 65k, 1.5M, 20B or 1T"
PRICE_FORMS = "write an amount per hour, for example 112.0/h"
EGRESS_FORMS = "write an amount per gigabyte, for example 0.02/GB"


def parse_bandwidth(text: str) -> float:
    """Bits per second. A bare number is refused: it may mean bits or bytes, and those differ by eight."""
    number, unit = _split(text, "bandwidth", BANDWIDTH_FORMS)
    if not unit:
        raise UsageError(f"bandwidth '{text}' has no unit, so bits or bytes is unclear; {BANDWIDTH_FORMS}")
    bps = float(number * _factor(text, unit, BANDWIDTH_BPS, "bandwidth", BANDWIDTH_FORMS))
    if bps <= 0:
        raise UsageError(f"bandwidth '{text}' must be above 0; {BANDWIDTH_FORMS}")
    return bps


def parse_duration(text: str) -> float:
    """Seconds. A bare number is refused: it may mean milliseconds, seconds or minutes."""
    number, unit = _split(text, "duration", DURATION_FORMS)
    if not unit:
        raise UsageError(f"duration '{text}' has no unit, so seconds or minutes is unclear; {DURATION_FORMS}")
    return float(number * _factor(text, unit, DURATION_MS, "duration", DURATION_FORMS) / 1000)


def parse_count(text: str) -> int:
    """A whole number, with k, M, B (10^9) or T (10^12) if wanted."""
    number, unit = _split(text, "count", COUNT_FORMS)
    value = number * _factor(text, unit, COUNT_SUFFIXES, "count", COUNT_FORMS)
    if value != value.to_integral_value():
        raise UsageError(f"count '{text}' is not a whole number; {COUNT_FORMS}")
    if value > MAX_COUNT:
        raise UsageError(f"count '{text}' is larger than {MAX_COUNT:.0e}; {COUNT_FORMS}")
    return int(value)


def parse_size(text: str) -> int:
    """Bytes. A bare number is refused: it may mean bytes or megabytes."""
    number, unit = _split(text, "size", SIZE_FORMS)
    if not unit:
        raise UsageError(f"size '{text}' has no unit; {SIZE_FORMS}")
    value = number * _factor(text, unit, SIZE_BYTES, "size", SIZE_FORMS)
    if value > MAX_COUNT:
        raise UsageError(f"size '{text}' is larger than {MAX_COUNT:.0e} bytes; {SIZE_FORMS}")
    return int(value)


def parse_price(text: str) -> float:
    """Money per hour, for the whole island."""
    return _parse_rate(text, "/h", "price", PRICE_FORMS)


def parse_egress(text: str) -> float:
    """Money per 10^9 bytes that leave the island."""
    return _parse_rate(text, "/GB", "egress price", EGRESS_FORMS)


def _parse_rate(text: str, unit: str, what: str, forms: str) -> float:
    number, found = _split(text, what, forms)
    if found != unit:
        raise UsageError(f"{what} '{text}' does not end in '{unit}'; {forms}")
    return float(number)


def _split(text: str, what: str, forms: str) -> tuple[Decimal, str]:
    match = NUMBER_THEN_UNIT.fullmatch(text.strip())
    if match is None and NUMBER_THEN_UNIT.fullmatch(text.strip().removeprefix("-")):
        raise UsageError(f"{what} '{text}' must not be negative; {forms}")
    if match is None:
        raise UsageError(f"{what} '{text}' is no number with a unit; {forms}")
    return Decimal(match[1]), match[2]


def _factor(text: str, unit: str, units: Mapping[str, int], what: str, forms: str) -> int:
    if unit not in units:
        raise UsageError(f"{what} '{text}' has the unknown unit '{unit}'; {forms}")
    return units[unit]


def format_bandwidth(bps: float) -> str:
    """142e6 -> '142 Mbps'."""
    return _scaled(bps, ((1e12, " Tbps"), (1e9, " Gbps"), (1e6, " Mbps"), (1e3, " kbps"), (1, " bps")))


def format_duration(seconds: float) -> str:
    """0.005 -> '5 ms', 4.7 -> '4.7 s', 240 -> '4 min', 200000 -> '2.31 d'."""
    if 1 <= seconds < 120:  # 90 s reads better than 1.5 min
        return f"{_three_digits(seconds)} s"
    return _scaled(seconds, ((86400, " d"), (3600, " h"), (60, " min"), (1, " s"), (1e-3, " ms")))


def format_count(value: float) -> str:
    """465060 -> '465k', 1e9 -> '1B'."""
    return _scaled(value, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")))


def format_size(num_bytes: float) -> str:
    """2e9 -> '2 GB'."""
    return _scaled(num_bytes, ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1, " B")))


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """Three significant digits in the largest unit that keeps the rounded number at one or more."""
    for threshold, unit in steps:
        if abs(value) >= threshold * 0.9995:
            return _three_digits(value / threshold) + unit
    threshold, unit = steps[-1]
    return _three_digits(value / threshold) + unit


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def some_of(names: Sequence[str]) -> str:
    """`a, b, c and 29 more`."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more"


def time_text(seconds: float) -> str:
    """Seconds since the epoch as ISO 8601, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: str) -> float | None:
    """Seconds since the epoch of an ISO 8601 text, in UTC if it names no zone; None for any other text. Times in the
    log are stated by their writers: no decision depends on them, and a bad one must not break a screen."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    if not 1970 <= found.year < datetime.max.year:  # so that it may be moved by a zone
        return None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
