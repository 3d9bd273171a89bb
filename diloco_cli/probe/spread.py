"""A figure that was measured several times, because the machine may be busy with other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """The median of `num` values, and their range."""

    median: float
    low: float
    high: float
    num: int

    @property
    def relative(self) -> float:
        """(high - low) / median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.num)


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(median(values), min(values), max(values), len(values))
