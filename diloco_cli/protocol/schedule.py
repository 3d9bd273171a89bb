"""Slots: the paper's schedule through a bucket.

Merges are numbered slots k = 0, 1, ... With P fragments, slot k belongs to fragment k mod P, so that each fragment is
due once a round of H steps, on its own offset (arXiv 2604.21428, algorithm 1: t mod H = t_p, offsets spread evenly).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

MOST_IN_FLIGHT = 1_000_000  # slots: whatever a clock says
UNSEEN_S = 0.5  # what no clock of a learner's sees of its exchange: the syncer's polls, its merge, its commit
SLOWEST = 32  # times slower than the fastest island


def fragment_of_slot(slot: int, num_fragments: int) -> int:
    return slot % num_fragments


def slots_reached(credit: int, local_steps: int, num_fragments: int) -> tuple[int, int]:
    """After one more inner step: (slots that came due, credit left). A learner reaches one slot each H_i / P steps;
    `credit` counts in steps x P, so that nothing is rounded and H_i may change on the way."""
    return divmod(credit + num_fragments, local_steps)


def measured_local_steps(every: int, own_step_s: float, fastest_step_s: float) -> int:
    """H_i = round(H * fastest step / own step): every island reaches its sync at the same time as the fastest.

    Never below H / SLOWEST: what a peer says of its own speed must not drive everybody to a sync a step."""
    return max(1, round(every / SLOWEST), round(every * min(1.0, fastest_step_s / own_step_s)))


def most_ahead(exchange_s: float, slot_s: float) -> int:
    """How far a learner's next slot may be ahead of the log's head: by the slots that its exchange takes (upload, and
    from the commit to its adoption; begun ones counted), and by one of grace."""
    return ceil(min((exchange_s + UNSEEN_S) / slot_s, MOST_IN_FLIGHT)) + 1 if slot_s > 0 else MOST_IN_FLIGHT


def slot_to_offer(own_next: int, head: int, num_fragments: int, ahead: int, in_touch: bool) -> int | None:
    """The next slot this learner can still reach: it never offers for a slot that the log has passed.

    None: it is more than `ahead` slots before the others, who are slower or were away, and lets this occasion go: an
    offer that lies there for rounds would merge old progress, and what was trained since would be given up at its
    adoption. One that is not `in_touch` with the log offers all the same, each fragment for its next slot: whoever
    answers then shall find what was trained."""
    lead = max(own_next - head, 0)
    if lead <= ahead:
        return head + lead
    return None if in_touch else head + lead % num_fragments


@dataclass(frozen=True)
class StepPermit:
    """Whether a learner may step on, and if not, why."""

    allowed: bool
    reason: str = ""


def may_step(steps_since_commit: int, local_steps: int, drift_rounds: int) -> StepPermit:
    """The drift bound: without news from the log a learner steps on for `drift_rounds` rounds, then pauses."""
    bound = drift_rounds * local_steps
    if steps_since_commit < bound:
        return StepPermit(True)
    return StepPermit(False, f"no commit for {bound} own steps ({drift_rounds} rounds): the drift bound")


def fraction_of_run(
    merged_tokens: int, target_tokens: int, round_tokens: int, own_steps: int, local_steps: int, drift_rounds: int
) -> float:
    """Position on the learning-rate schedule in [0, 1]: merged tokens / target as of the newest merge heard of, and
    from there on as if all islands kept the planned pace (`round_tokens` a round, all together) for the `own_steps`
    since, of which a learner makes `local_steps` a round. Interpolates no further than the drift bound."""
    ahead = round_tokens * min(own_steps / local_steps, float(drift_rounds))
    return min(1.0, (merged_tokens + ahead) / target_tokens)
