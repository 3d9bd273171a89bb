"""Which sequences of a stream are held out: groups of neighbours, evenly spread; arithmetic alone.

Of every `period` groups the last one is held out, so the held-out part is like the whole, wherever a corpus changes its
subject; neighbours stay together, so few held-out sequences touch one that is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LARGEST_GROUP = 16  # sequences
SMALLEST_SHARE = 1e-6
LEAST_GROUPS = 64  # held-out groups, before they are made longer than one sequence

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Of `size` sequences; `share` of them are held out."""

    size: int
    share: float

    @property
    def period(self) -> int:
        """In groups."""
        return max(2, round(1 / max(self.share, SMALLEST_SHARE))) if self.share else 0

    @property
    def group(self) -> int:
        """Sequences in a group."""
        return min(LARGEST_GROUP, max(1, int(self.size * self.share) // LEAST_GROUPS))

    @property
    def held_out(self) -> int:
        """How many sequences are held out."""
        return self.size // (self.period * self.group) * self.group if self.share else 0

    @property
    def train(self) -> int:
        return self.size - self.held_out

    def trained(self, numbers: Numbers) -> Numbers:
        """Sequence number n of those trained on -> its number in the stream. What is left after the last whole period
        is trained on."""
        if not self.held_out:
            return numbers
        spans = numbers // ((self.period - 1) * self.group)
        return np.asarray(numbers + np.minimum(spans, self.held_out // self.group) * self.group, np.int64)

    def evaluated(self, count: int) -> list[int]:
        """At most `count` of the held-out sequences, the same every time: whole groups, spread evenly."""
        groups = self.held_out // self.group
        wanted = min(groups, -(-count // self.group))
        chosen = [place * groups // wanted for place in range(wanted)]
        last = (self.period - 1) * self.group
        found = [(g * self.period * self.group) + last + member for g in chosen for member in range(self.group)]
        return found[:count]
