"""Learners' saved moments: what an offer names is there, a restart goes on from what was named last, and nobody from what
a rollback left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from diloco_cli.digests import digest
from diloco_cli.simulate.histories.bucket import Bucket
from diloco_cli.simulate.histories.replayer import Replayer, expect

FRESH = -1  # the commit of moments that were never saved


def moments_bytes(step: int, n: int) -> bytes:
    """Of the optimizer after so many steps, as of commit n."""
    return f"moments:{step}:{n}".encode()


def read_moments(data: bytes) -> tuple[int, int]:
    step, n = data.decode().removeprefix("moments:").split(":")
    return int(step), int(n)


@dataclass
class MomentsWatch:
    """Of all learners. `named`: what the offers of one have named, and from which base, in their order; `claimed`: how
    many there were when an incarnation came to be."""

    replayer: Replayer
    bucket_of: dict[str, Bucket] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    named: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    claimed: dict[tuple[str, int], int] = field(default_factory=dict)

    def born(self, key: str, data: bytes, bucket: Bucket) -> None:
        """A learner has written this, in its own bucket."""
        kind, learner, *rest = key.split("/")
        if kind == "inner":
            self.saved.add(key)
        elif kind == "incarnation":
            self.bucket_of[learner] = bucket
            self.claimed[learner, int(rest[0].partition(".")[0])] = len(self.named.get(learner, ()))
        elif kind == "offer":
            offer = json.loads(data)
            inner = offer["inner"]
            expect(inner is None or inner in self.saved, "9", f"{key} names {inner}, which nobody has saved")
            if inner is not None:
                self.named.setdefault(learner, []).append((offer["base"], inner))

    def restored(self, learner: str, incarnation: int, moments: bytes | None) -> None:
        """A new incarnation goes on from these: what was named last before it came, or later. (Where a rollback has
        come since, or the collector, it may have none.)"""
        known, first = self.named.get(learner, []), self.claimed.get((learner, incarnation), 0)
        if not first or known[first - 1][0] < self.replayer.base_floor:
            return
        newest = known[first - 1][1]
        named = moments is not None and any(key.endswith(digest(moments)) for _, key in known[first - 1 :])
        there = self.bucket_of[learner].get(newest) is not None
        expect(named or not there, "loss", f"{learner} {incarnation} does not go on from {newest}")

    def fitting(self, learner: str, head: int, n: int) -> None:
        """Who knows the log up to `head` goes on with moments as of commit n."""
        fits = n == FRESH or n > head or self.replayer.leads_to(head, n)
        expect(fits, "6", f"{learner} goes on at {head} with the moments of {n}, which a rollback left behind")
