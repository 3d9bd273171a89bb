"""Seeded draws: the same on every machine and for every hash seed, and cheap enough for some at each operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from diloco_cli.digests import ALGORITHM, digest

T = TypeVar("T")
_MASK = (1 << 64) - 1
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407  # Knuth's 64-bit linear congruential generator
_RANGE = 1 << 48


class Stream:
    """Independent streams for different names. Every draw advances by exactly one number."""

    __slots__ = ("_state",)

    def __init__(self, seed: int, name: str) -> None:
        text = digest(f"{seed}/{name}".encode()).removeprefix(f"{ALGORITHM}-")
        self._state = int(text[:16], 16)

    def uniform(self) -> float:
        """In [0, 1): from the upper bits of the state, because the lower ones are weak."""
        self._state = state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        return (state >> 16) / _RANGE

    def index(self, length: int) -> int:
        """In 0..length - 1, as `choice` draws it, by integer arithmetic, for draws at every call."""
        self._state = state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        return (state >> 16) * length >> 48

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.uniform()

    def whole(self, low: int, high: int) -> int:
        """In low..high, both included."""
        return low + int(self.uniform() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        return self.uniform() < probability

    def choice(self, items: Sequence[T]) -> T:
        return items[int(self.uniform() * len(items))]
