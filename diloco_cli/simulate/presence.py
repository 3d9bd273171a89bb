"""How long at least K learners step at once, and what they do in that time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco_cli.simulate.chips import MS
from diloco_cli.simulate.timeline import Timeline, Whole

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Presence:
    """Shares of the time, and of the fleet's work. `share`: at least K learners are there. `uptime` and `goodput`: of
    steps that need not wait for a quorum, since it is there or has not been missing for longer than the drift bound."""

    share: float
    uptime: float
    goodput: float


def presence(timelines: Sequence[Timeline], quorum: int, drift_s: float = 0.0) -> Presence:
    """Over all stretches of finished steps: between two of their ends the number of learners that step is constant.
    Whenever fewer than K are there, learners step on for `drift_s` and then stand still."""
    starts = np.concatenate([t.start_ms for t in timelines])
    ends = np.concatenate([t.end_ms for t in timelines])
    horizon_ms = timelines[0].horizon_ms
    moments, place = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    if not len(moments):
        return Presence(0.0, 0.0, 0.0)
    change = np.zeros(len(moments), dtype=np.int64)
    np.add.at(change, place, np.repeat([1, -1], [len(starts), len(ends)]))
    number = np.cumsum(change)[:-1]
    there = number >= quorum
    share = float((np.diff(moments) * there).sum()) / horizon_ms
    moments, which, counts = _counted(moments, there, round(min(drift_s * MS, horizon_ms)))
    counted_ms = np.concatenate([[0], np.cumsum(np.diff(moments) * counts)])  # at each moment: how long until then
    done = 0.0
    for t in timelines:
        counted = np.interp(t.end_ms, moments, counted_ms) - np.interp(t.start_ms, moments, counted_ms)
        learner = t.learner
        done += learner.weight / learner.slowdown * float((counted * t.active).sum()) / learner.slices
    total = sum(t.learner.weight for t in timelines) * horizon_ms
    uptime = float((np.diff(moments) * (counts & (number[which] > 0))).sum()) / horizon_ms
    return Presence(share, uptime, done / total)


def _counted(moments: Whole, there: Flags, drift_ms: int) -> tuple[Whole, Whole, Flags]:
    """(moments, with those at which the drift bound ends an absence; the interval before, of each interval now; whether
    a step counts in it)"""
    lost = ~there & np.concatenate([[True], there[:-1]])
    since = np.maximum.accumulate(np.where(lost, moments[:-1], moments[0]))  # when the last absence began
    finer = np.unique(np.concatenate([moments, np.minimum(moments[:-1][lost] + drift_ms, moments[-1])]))
    which = np.searchsorted(moments, finer[:-1], side="right") - 1
    return finer, which, there[which] | (finer[:-1] - since[which] < drift_ms)
