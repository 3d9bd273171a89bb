"""Which ranks of an island hang: pure, a function of what they have counted and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_cli.learner.beats import RankCount

STEP_TIMES = 10
LEAST_S = 30.0
FIRST_S = 900.0  # building, the newest versions, and the first step, which may compile
SEEN = 16
PAUSED_S = 5.0  # a look that comes so late: this process was paused itself


@dataclass
class _WatchedRank:
    since_s: float
    count: RankCount = field(default_factory=RankCount)
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))

    @property
    def patience_s(self) -> float:
        """STEP_TIMES of the longest recent step; waits in between, which have signs of life of their own, are none."""
        if self.count.steps < 2:
            return FIRST_S
        return max(LEAST_S, STEP_TIMES * max(self.steps_s, default=0.0))


class Watchdog:
    """Of the ranks on one node. Ranks step together: where one hangs, the others wait for it, and soon all are silent.

    A rank is silent if it has given no sign of life for STEP_TIMES step times, and LEAST_S at the least; FIRST_S before
    its second step."""

    def __init__(self, ranks: int, now_s: float) -> None:
        self._ranks = [_WatchedRank(now_s) for _ in range(ranks)]
        self._looked_s = now_s

    def silent(self, counts: Sequence[RankCount], now_s: float) -> dict[int, float]:
        """The silent ranks, and since when, in seconds."""
        if now_s - self._looked_s > PAUSED_S:
            for rank in self._ranks:
                rank.since_s = now_s
        self._looked_s = now_s
        for rank, count in zip(self._ranks, counts, strict=True):
            if count != rank.count:
                if 0 < rank.count.steps < count.steps:
                    rank.steps_s.append(now_s - rank.since_s)
                rank.count, rank.since_s = count, now_s
        ages = {number: now_s - rank.since_s for number, rank in enumerate(self._ranks)}
        return {number: age for number, age in ages.items() if age > self._ranks[number].patience_s}

    def behind(self) -> list[int]:
        """The ranks that have stepped least, if others have stepped more."""
        steps = [rank.count.steps for rank in self._ranks]
        return [number for number, count in enumerate(steps) if count == min(steps) < max(steps)]
