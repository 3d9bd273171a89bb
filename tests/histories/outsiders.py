"""A forger and a flooder: they run no code of the product's, and write straight into the buckets at random times, until
the run is over. Whatever is demanded of a healthy run is demanded beside them, for they do not cease with the faults.

    forger    has no key, or another one than it needs: claims, offers and joins in others' names, operators' requests,
              epochs, snapshots, hints, heartbeats
    flooder   takes part in the run by name, and never trains: piles of objects under its own names, with its own key.
              Claims of dead incarnations, dense and sparse, junk, genuine offers of no use, joins that none may make

`Outsider`: what both have in common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.histories.client import Bucket
from tests.histories.replayer import FLOODER
from tests.histories.stream import Stream

if TYPE_CHECKING:
    from tests.histories.history import History


MAX_ACTS = 200
PAUSE_SLOTS = (0.5, 4.0)
REQUESTS = 2
ASKED_AFTER_SLOTS = (2.0, 12.0)  # by an operator, once faults have ceased


class Outsider:
    """Acts now and then. `ACTS`: names of methods."""

    ACTS: tuple[str, ...] = ()

    def __init__(self, history: History, name: str) -> None:
        self.history, self.draw = history, Stream(history.seed, name)
        self.acts = 0
        self._later()

    def _later(self) -> None:
        wait_s = self.draw.between(*PAUSE_SLOTS) * self.history.options.slot_s
        self.history.world.call_at(self.history.world.now_s + wait_s, self._act)

    def _act(self) -> None:
        if self.acts >= MAX_ACTS or "finish" in self.history.monitor.replayer.kinds[-1:]:
            return
        self.acts += 1
        getattr(self, f"_{self.draw.choice(self.ACTS)}")()
        self._later()

    def bucket_of(self, learner: str) -> Bucket:
        """Where this learner's own objects lie."""
        region = self.history.region
        return region.bucket if region is not None and learner in region.residents else self.history.bucket

    def place(self, bucket: Bucket, key: str, data: bytes) -> bool:
        """Create an object; False if there is one."""
        if key in bucket.objects:
            return False
        bucket.put(key, data)
        bucket.foreign.add(key)
        return True

    def overwrite(self, key: str, data: bytes) -> None:
        """What the others overwrite, too."""
        self.history.bucket.put(key, data)

    @property
    def others(self) -> list[str]:
        """Learners, but for the flooder."""
        return [name for name in self.history.monitor.replayer.batches if name != FLOODER]


def asked_again(history: History) -> None:
    """Operators make some requests that change nothing, to be answered in time whatever others write."""
    draw, at_s = Stream(history.seed, "asked again"), history.world.now_s
    for _ in range(REQUESTS):
        at_s += draw.between(*ASKED_AFTER_SLOTS) * history.options.slot_s
        history.world.call_at(at_s, history.nemesis.readmit_nobody)


def last_number(bucket: Bucket, prefix: str, digits: int) -> int:
    """The greatest number under a prefix, others' objects included; -1 if there is none."""
    newest = max((key for key in bucket.objects if key.startswith(prefix)), default="")
    return int(newest[len(prefix) : len(prefix) + digits]) if newest else -1
