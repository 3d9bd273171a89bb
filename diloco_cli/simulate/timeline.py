"""What a learner did, as stretches of finished steps, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco_cli.simulate.chips import Learner

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Timeline:
    """Stretch i: `steps[i]` finished steps in a row from `start_ms[i]` on, with `active[i]` slices. Lost steps and
    stops lie between the stretches. `failures`: slices that failed while the learner stepped."""

    learner: Learner
    horizon_ms: int
    start_ms: Whole
    steps: Whole
    active: Whole
    failures: int

    @property
    def end_ms(self) -> Whole:
        return self.start_ms + self.steps * self.learner.step_ms

    @property
    def goodput(self) -> float:
        """Share of its chip time spent on steps that counted; a step with fewer slices counts in part, and a
        straggler's steps for what a learner of full speed would have needed."""
        useful_ms = float((self.steps * self.active).sum()) * self.learner.step_ms / self.learner.slices
        return useful_ms / self.horizon_ms / self.learner.slowdown


def timeline(learner: Learner, horizon_ms: int, stretches: Sequence[tuple[int, int, int]], failures: int) -> Timeline:
    """From (start, steps, active) triples; those without a step or a slice are left out."""
    table = np.array([stretch for stretch in stretches if stretch[1] and stretch[2]], dtype=np.int64).reshape(-1, 3)
    return Timeline(learner, horizon_ms, table[:, 0], table[:, 1], table[:, 2], failures)


def fleet_goodput(timelines: Sequence[Timeline]) -> float:
    """Of all chips together."""
    return sum(t.goodput * t.learner.weight for t in timelines) / sum(t.learner.weight for t in timelines)


def fleet_uptime(timelines: Sequence[Timeline]) -> float:
    """Share of time in which anything steps: the union of all stretches."""
    starts = np.concatenate([t.start_ms for t in timelines])
    ends = np.concatenate([t.end_ms for t in timelines])
    if not len(starts):
        return 0.0
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reached = np.maximum.accumulate(ends)
    before = np.concatenate([starts[:1], reached[:-1]])  # up to where earlier stretches have covered the time
    covered = np.maximum(0, ends - np.maximum(starts, before)).sum()
    return float(covered / timelines[0].horizon_ms)
