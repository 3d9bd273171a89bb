"""How much garbage waits to be deleted, and whether it becomes more: for people, in the syncer's heartbeat."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from diloco_cli.protocol.log.heartbeats import GarbageHeartbeat

SAMPLE_EVERY_S = 30.0
SAMPLES = 20  # the trend is that of the last ten minutes
HOUR_S = 3600.0
NOT_KNOWN = -1  # commits, before the first sweep of a process has ended


class Backlog:
    """What a collector has not deleted yet, behind floors whose grace is over. Nobody lists a bucket for this: how many
    objects a commit leaves behind is known from the last sweep."""

    def __init__(self) -> None:
        self.swept: int | None = None
        self._each = 0.0
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES)

    def swept_to(self, floor: int, deleted: int) -> None:
        """A sweep has ended. The first one of a process may have found what earlier processes left."""
        if self.swept is not None and floor > self.swept:
            self._each = deleted / (floor - self.swept)
        self.swept = floor

    def at(self, floor: int, deleted: int, found: int, now_s: float) -> GarbageHeartbeat:
        """`floor`: the newest one whose grace is over; `deleted` and `found`: objects of the sweep that goes on. Before
        the first one ends nobody knows what earlier processes have left."""
        if self.swept is None:
            return GarbageHeartbeat(found, NOT_KNOWN)
        commits = max(0, floor - self.swept)
        objects = max(found, round(commits * self._each) - deleted)
        if not self._samples or now_s - self._samples[-1][0] >= SAMPLE_EVERY_S:
            self._samples.append((now_s, objects))
        return GarbageHeartbeat(objects, commits, self._per_h())

    def _per_h(self) -> float:
        """By the means of the older and of the newer half, as a backlog goes up with each floor and down again."""
        half = len(self._samples) // 2
        if half == 0:
            return 0.0
        older, newer = list(self._samples)[:half], list(self._samples)[-half:]
        apart_s = fmean(at_s for at_s, _ in newer) - fmean(at_s for at_s, _ in older)
        return round((fmean(n for _, n in newer) - fmean(n for _, n in older)) / apart_s * HOUR_S, 1)
