"""Slots: the paper's schedule through a bucket, and how far a learner may step.

Merges are numbered slots k = 0, 1, ... With P fragments, slot k belongs to fragment k mod P, so that each fragment is
due once a round of H steps, on its own offset (arXiv 2604.21428, algorithm 1: t mod H = t_p, offsets spread evenly).
For which slot a learner makes its next offer: protocol/rules/aim.py.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOWEST = 32  # times slower than the fastest island
EXACT_TO = 3  # decimals of H_i


def fragment_of_slot(slot: int, num_fragments: int) -> int:
    return slot % num_fragments


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
