"""A learner's schedule: its local steps a round, how far it may step, its position in the run. Pure. aim.py chooses the
slot of its next offer.

In the first `cold_start.rounds` rounds of a run the fastest island trains alone. Models that are hardly trained move
fast and apart, and what an average of them loses then is missing for long. When that ends follows from the slot's
number, which the log gives to every process; so no message says it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.rules.quorum import patience_s

SLOWEST = 32  # times slower than the fastest island
EXACT_TO = 3  # decimals of H_i


def measured_local_steps(every: int, own_step_s: float, fastest_step_s: float) -> float:
    """H_i = H * fastest step / own step: every island reaches its sync at the same time as the fastest. Not rounded to
    whole steps: the rounding errors would add up until the island misses a slot.

    Never below H / SLOWEST: one learner's false speed must not drive all the others to a sync per step."""
    share = min(1.0, fastest_step_s / own_step_s)
    return round(max(1.0, every / SLOWEST, every * share), EXACT_TO)


@dataclass(frozen=True)
class StepPermit:
    """Whether a learner may step on, and if not, why."""

    allowed: bool
    reason: str = ""


def may_step(drift: int, local_steps: float, drift_rounds: int) -> StepPermit:
    """The drift bound: without news from the log a learner steps on for `drift_rounds` rounds, then pauses. `drift`:
    its steps since the newest merge that it knows of, without those that an adoption has dropped from its
    parameters."""
    if drift < drift_rounds * local_steps:
        return StepPermit(True)
    return StepPermit(False, f"no commit for {drift} own steps ({drift_rounds} rounds): the drift bound")


def fraction_of_run(
    merged_tokens: int, target_tokens: int, round_tokens: int, own_steps: int, local_steps: float, drift_rounds: int
) -> float:
    """Position on the learning-rate schedule in [0, 1]: merged tokens / target as of the newest merge heard of, plus
    the tokens that all islands process at the planned pace (`round_tokens` a round, together) during the `own_steps`
    since then, of which a learner makes `local_steps` a round. Extrapolates no further than the drift bound."""
    ahead = round_tokens * min(own_steps / local_steps, float(drift_rounds))
    return min(1.0, (merged_tokens + ahead) / target_tokens)


def beginner(run: RunFormat, slot: int) -> str | None:
    """The learner that trains until this slot is merged, while the others wait: the one planned as the fastest, with
    ties broken by name. None: all learners train."""
    if slot >= run.settings.cold_start.rounds * run.num_fragments:
        return None
    return min(run.islands, key=lambda island: (-island.tokens_per_s, island.name)).name


class Turn:
    """Whether one learner may train yet in a cold start. It waits for the beginner's merges for a limited time, because
    the beginner may be dead or slow to start; after that it trains."""

    def __init__(self, run: RunFormat, learner: str) -> None:
        self._run, self._learner, self._quiet_since_s, self._is_mine = run, learner, inf, False
        slot_s = max(island.local_steps * island.step_s for island in run.islands) / run.num_fragments
        self._patience_s = patience_s(run.settings.sync.skip_after_s, slot_s)

    def held(self, head: int) -> str | None:
        """The reason why the learner may not step yet; None: it may."""
        first = None if self._is_mine else beginner(self._run, head)
        if first in (None, self._learner):
            return None
        until = self._run.settings.cold_start.rounds * self._run.num_fragments
        return f"cold start: {first} alone until slot {until}, now {head}"

    def heard(self) -> None:
        """The log has a newer merge."""
        self._quiet_since_s = inf

    def waited(self, now_s: float) -> None:
        self._quiet_since_s = min(self._quiet_since_s, now_s)
        self._is_mine |= now_s - self._quiet_since_s > self._patience_s
