"""The norm cap: one delta far longer than what its fragment has seen lately is refused."""

from __future__ import annotations

from collections import deque

CAP = 8.0  # times the running median of a fragment's accepted deltas
MEMORY = 31
FEWEST = 3  # accepted deltas before there is a cap
PATIENCE = 3  # refusals in a row after which the fragment's reference is taken to be out of date


class NormCap:
    """Compares each learner's delta with those that were accepted before it, fragment by fragment.

    A single learner's poison is refused for as long as others are accepted in between. Where nobody is, the deltas
    themselves have changed (another learning rate, a wiped momentum): the reference is forgotten, or the fragment
    would never merge again.
    """

    def __init__(self) -> None:
        self._accepted: dict[int, deque[float]] = {}
        self._refused_in_a_row: dict[int, int] = {}

    def admits(self, fragment: int, norm: float) -> bool:
        """Whether a delta of this (finite) norm may be merged; remembers the answer."""
        accepted = self._accepted.setdefault(fragment, deque(maxlen=MEMORY))
        if len(accepted) >= FEWEST and norm > CAP * sorted(accepted)[len(accepted) // 2]:
            self._refuse(fragment)
            return False
        accepted.append(norm)
        self._refused_in_a_row[fragment] = 0
        return True

    def _refuse(self, fragment: int) -> None:
        refused = self._refused_in_a_row.get(fragment, 0) + 1
        if refused >= PATIENCE:
            self._accepted[fragment].clear()
            refused = 0
        self._refused_in_a_row[fragment] = refused
