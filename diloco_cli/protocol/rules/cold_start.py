"""The first rounds of a run, in which `cold_start` may ask for something else than in the rest. Pure.

Models that are hardly trained move fast and apart, and what an average of them loses then is missing for long. All that
is different in these rounds follows from a slot's number, which the log knows; so nobody is told when they end.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from diloco_cli.config.settings import OuterSettings
from diloco_cli.protocol.log.records import RunFormat

PATIENCE_SLOTS = 4  # without a merge, as planned


def is_cold(run: RunFormat, slot: int) -> bool:
    """Whether a slot is in the first `cold_start.rounds` rounds."""
    return slot < run.settings.cold_start.rounds * run.num_fragments


def beginners(run: RunFormat, slot: int) -> tuple[str, ...] | None:
    """The learners that train until this slot is merged, while the others wait: the fastest, as planned, names breaking
    ties. None: all do."""
    count = run.settings.cold_start.learners
    if count is None or not is_cold(run, slot):
        return None
    return tuple(island.name for island in sorted(run.islands, key=lambda i: (-i.tokens_per_s, i.name))[:count])


class Turn:
    """Whether one learner may train yet. It does not wait for ever for those that begin: they may be dead, or slow to
    start; then it begins, and goes on."""

    def __init__(self, run: RunFormat, learner: str) -> None:
        self._run, self._learner, self._quiet_since_s, self._is_mine = run, learner, inf, False
        slot_s = max(island.local_steps * island.step_s for island in run.islands) / run.num_fragments
        self._patience_s = max(run.settings.sync.skip_after_s, PATIENCE_SLOTS * slot_s)

    def held(self, head: int) -> str | None:
        """Why it may not step yet; None: it may."""
        first = None if self._is_mine else beginners(self._run, head)
        if first is None or self._learner in first:
            return None
        until = self._run.settings.cold_start.rounds * self._run.num_fragments
        return f"cold start: {', '.join(first)} alone until slot {until}, now {head}"

    def heard(self) -> None:
        """Of a merge."""
        self._quiet_since_s = inf

    def waited(self, now_s: float) -> None:
        self._quiet_since_s = min(self._quiet_since_s, now_s)
        self._is_mine |= now_s - self._quiet_since_s > self._patience_s


def steps_share(run: RunFormat, slot: int) -> float:
    """The steps of this slot's round, as a share of those of a later one."""
    every = run.settings.cold_start.every
    if every is None or not is_cold(run, slot):
        return 1.0
    return every / run.settings.sync.every


def outer_at(run: RunFormat, slot: int) -> OuterSettings:
    """The outer optimizer of this slot's merge: from the cold start's values at the first round, in even steps, to its
    own after the last. All fragments of a round are merged alike."""
    outer, cold = run.settings.outer, run.settings.cold_start
    if not is_cold(run, slot):
        return outer
    share = (slot // run.num_fragments) / cold.rounds
    lr = _between(cold.outer_lr, outer.lr, share)
    return replace(outer, lr=lr, momentum=_between(cold.outer_momentum, outer.momentum, share))


def _between(first: float | None, own: float, share: float) -> float:
    return own if first is None else first + share * (own - first)
