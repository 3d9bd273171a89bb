"""Learners' work as stretches of finished steps; its goodput, and how long a quorum of learners is present."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco_cli.forecast.chips import MS, ChipsLearner

Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Timeline:
    """Stretch i: `steps[i]` finished steps in a row from `start_ms[i]` on, with `active[i]` slices. Lost steps and
    stops lie between the stretches. `failures`: slices that failed while the learner stepped."""

    learner: ChipsLearner
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


def timeline(
    learner: ChipsLearner, horizon_ms: int, stretches: Sequence[tuple[int, int, int]], failures: int
) -> Timeline:
    """From (start, steps, active) triples; those without a step or a slice are left out."""
    table = np.array([stretch for stretch in stretches if stretch[1] and stretch[2]], dtype=np.int64).reshape(-1, 3)
    return Timeline(learner, horizon_ms, table[:, 0], table[:, 1], table[:, 2], failures)


def fleet_goodput(timelines: Sequence[Timeline]) -> float:
    """The goodput of all chips together."""
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


@dataclass(frozen=True)
class Presence:
    """Shares of the time, and of the fleet's work. `share`: of the time with at least K learners. `uptime`, `goodput`:
    of steps that count, because the quorum is present or has been missing for no longer than the drift bound."""

    share: float
    uptime: float
    goodput: float


def presence(timelines: Sequence[Timeline], quorum: int, drift_s: float = 0.0) -> Presence:
    """Over all stretches of finished steps: between two of their ends the number of learners that step is constant.
    With fewer than K, learners step on for `drift_s` and then stand still."""
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
