"""The norm cap and the norm clip: what happens to a delta longer than what its fragment has seen lately.

Both compare with the running median of the fragment's accepted deltas. The cap refuses what is far beyond any honest
delta; the clip (`sync.clip`) shortens what is merely long. A median lives in one syncer's memory, so the log records
the scale that a clip applied, and a verifier keeps books of its own (syncer/scales.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

CAP = 8.0  # times the running median of a fragment's accepted deltas
MEMORY = 31
FEWEST = 3  # accepted deltas before there is a cap
PATIENCE = 3  # refusals in a row after which the fragment's reference is taken to be out of date


def scale_of(norm: float, median: float | None, clip: float | Literal["none"]) -> float | None:
    """What to multiply a delta of this (finite) norm by before it is merged, 1 unless it is clipped; None if it is
    refused. `median`: of the fragment's accepted norms, None while too few are known."""
    if median is None:
        return 1.0
    if norm > CAP * median:
        return None
    return 1.0 if clip == "none" or norm <= clip * median else clip * median / norm


def median_of(accepted: Sequence[float]) -> float | None:
    return sorted(accepted)[len(accepted) // 2] if len(accepted) >= FEWEST else None


class NormCap:
    """Compares each learner's delta with those that were accepted before it, fragment by fragment.

    A single learner's poison is refused for as long as others are accepted in between. Where nobody is, the deltas
    themselves have changed (another learning rate, a wiped momentum): the reference is forgotten, or the fragment
    would never merge again.
    """

    def __init__(self, clip: float | Literal["none"] = "none") -> None:
        self.clip = clip
        self._accepted: dict[int, deque[float]] = {}
        self._refused_in_a_row: dict[int, int] = {}

    def scale(self, fragment: int, norm: float) -> float | None:
        """As `scale_of` says, by what was accepted before. Norms are the learner's word until a merge has measured
        them: only then they are `accept`ed."""
        scale = scale_of(norm, median_of(self._accepted.get(fragment, ())), self.clip)
        if scale is None:
            self._refuse(fragment)
        return scale

    def accept(self, fragment: int, norm: float) -> None:
        """A delta of this norm, clipped as it was, has been merged."""
        self._accepted.setdefault(fragment, deque(maxlen=MEMORY)).append(norm)
        self._refused_in_a_row[fragment] = 0

    def _refuse(self, fragment: int) -> None:
        refused = self._refused_in_a_row.get(fragment, 0) + 1
        if refused >= PATIENCE:
            self._accepted[fragment].clear()
            refused = 0
        self._refused_in_a_row[fragment] = refused
