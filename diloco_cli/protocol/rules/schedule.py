"""A learner's schedule: its local steps a round, how far it may step, where it is in the run. Pure. For which slot it
makes its next offer: aim.py.

In the first rounds of a run `cold_start` may ask for something else than in the rest. Models that are hardly trained
move fast and apart, and what an average of them loses then is missing for long. All that is different in these rounds
follows from a slot's number, which the log knows; so nobody is told when they end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from diloco_cli.config.settings import OuterSettings
from diloco_cli.protocol.log.records import RunFormat

SLOWEST = 32  # times slower than the fastest island
EXACT_TO = 3  # decimals of H_i


def measured_local_steps(every: int, own_step_s: float, fastest_step_s: float) -> float:
    """H_i = H * fastest step / own step: every island reaches its sync at the same time as the fastest. Not rounded to
    whole steps: what rounding leaves over would add up until the island misses a slot.

    Never below H / SLOWEST: what a peer says of its own speed must not drive everybody to a sync a step."""
    share = min(1.0, fastest_step_s / own_step_s)
    return round(max(1.0, every / SLOWEST, every * share), EXACT_TO)


@dataclass(frozen=True)
class StepPermit:
    """Whether a learner may step on, and if not, why."""

    allowed: bool
    reason: str = ""


def may_step(drift: int, local_steps: float, drift_rounds: int) -> StepPermit:
    """The drift bound: without news from the log a learner steps on for `drift_rounds` rounds, then pauses. `drift`:
    its steps since the newest merge that it knows of, as far as they are in its parameters: what an adoption gave up
    has not drifted."""
    if drift < drift_rounds * local_steps:
        return StepPermit(True)
    return StepPermit(False, f"no commit for {drift} own steps ({drift_rounds} rounds): the drift bound")


def fraction_of_run(
    merged_tokens: int, target_tokens: int, round_tokens: int, own_steps: int, local_steps: float, drift_rounds: int
) -> float:
    """Position on the learning-rate schedule in [0, 1]: merged tokens / target as of the newest merge heard of, and
    from there on as if all islands kept the planned pace (`round_tokens` a round, all together) for the `own_steps`
    since, of which a learner makes `local_steps` a round. Interpolates no further than the drift bound."""
    ahead = round_tokens * min(own_steps / local_steps, float(drift_rounds))
    return min(1.0, (merged_tokens + ahead) / target_tokens)


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
