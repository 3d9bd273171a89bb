"""How long at least K learners step at once, and what they do in that time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diloco_cli.simulate.timeline import Timeline


@dataclass(frozen=True)
class Presence:
    """Shares of the time, and of the fleet's work. `goodput` counts only steps made while at least K learners step:
    what is left where learners stand still without a quorum."""

    share: float
    goodput: float


def presence(timelines: Sequence[Timeline], quorum: int) -> Presence:
    """Over all stretches of finished steps: between two of their ends the number of learners that step is constant."""
    starts = np.concatenate([t.start_ms for t in timelines])
    ends = np.concatenate([t.end_ms for t in timelines])
    horizon_ms = timelines[0].horizon_ms
    moments, place = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    if not len(moments):
        return Presence(0.0, 0.0)
    change = np.zeros(len(moments), dtype=np.int64)
    np.add.at(change, place, np.repeat([1, -1], [len(starts), len(ends)]))
    there = np.cumsum(change)[:-1] >= quorum
    together_ms = np.concatenate([[0], np.cumsum(np.diff(moments) * there)])  # at each moment: how long until then
    done = 0.0
    for t in timelines:
        counted = np.interp(t.end_ms, moments, together_ms) - np.interp(t.start_ms, moments, together_ms)
        learner = t.learner
        done += learner.weight / learner.slowdown * float((counted * t.active).sum()) / learner.slices
    total = sum(t.learner.weight for t in timelines) * horizon_ms
    return Presence(float(together_ms[-1]) / horizon_ms, done / total)
