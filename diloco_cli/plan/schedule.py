"""When fragments travel: rounds, slots, the overlap that hides the exchange, the grace window inside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco_cli.config.settings import SyncSettings
from diloco_cli.plan.link import FragmentSizes
from diloco_cli.plan.plan import Schedule
from diloco_cli.plan.syncer_pace import GUESSED_MACHINE, syncer_s
from diloco_cli.protocol.rules.capacity import SyncerMachine
from diloco_cli.protocol.rules.quorum import grace_seconds


def local_steps(round_s: float, step_s: float) -> int:
    """H_i = max(1, round(T / t_i)): every island ends its round when the fastest does."""
    return max(1, round(round_s / step_s))


def make_schedule(
    sync: SyncSettings, fragments: FragmentSizes, step_s: Sequence[float], transfer_s: Sequence[float],
    machine: SyncerMachine = GUESSED_MACHINE,
) -> Schedule:  # fmt: skip
    """`step_s` and `transfer_s` per island taking part.

    xi_slack = tau x slot - exchange and grace <= gamma x xi_slack, at most one slot (arXiv 2604.21428,
    adaptive grace window; through a bucket its inner step is one slot). `auto` adds one slot to the smallest
    overlap that hides the exchange: without it the slack, and so the grace window, would be close to 0.
    """
    round_s = sync.every * min(step_s)
    slot_s = round_s / fragments.count
    merging_s = syncer_s(fragments.largest, len(step_s), sync, machine)
    waiting_s = quorum_s(sync.quorum, step_s)
    exchange_s = max(transfer_s) + waiting_s + merging_s
    if sync.overlap == "auto":
        overlap = min(slots_to_hide(exchange_s, slot_s) + 1, max_overlap(fragments.count))
    else:
        overlap = sync.overlap
    slack_s = overlap * slot_s - exchange_s
    return Schedule(
        fragments=fragments.count,
        sync_every=sync.every,
        overlap=overlap,
        quorum=sync.quorum,
        grace_s=grace_seconds(sync.grace.gamma, slack_s, slot_s),
        codec=sync.codec,
        weights_codec=sync.weights_codec,
        round_s=round_s,
        slot_s=slot_s,
        exchange_s=exchange_s,
        slack_s=slack_s,
        quorum_s=waiting_s,
        merge_s=merging_s,
        fragment_parameters=fragments.largest,
    )


def fragment_offsets(every: int, num_fragments: int) -> tuple[int, ...]:
    """t_p: the step of a round, counted from 1 at the fastest island, after which fragment p is due."""
    return tuple(max(1, round((index + 1) * every / num_fragments)) for index in range(num_fragments))


def slots_to_hide(exchange_s: float, slot_s: float) -> int:
    """The smallest tau with tau x slot >= exchange, and at least 1."""
    return max(1, math.ceil(exchange_s / slot_s))


def max_overlap(num_fragments: int) -> int:
    """A fragment must be back before it is sent again, one round of slots later."""
    return max(1, num_fragments - 1)


def quorum_s(quorum: int, step_s: Sequence[float]) -> float:
    """Offers appear at the ends of steps: the K-th may come one step of its island after the first."""
    return 0.0 if quorum == 1 else sorted(step_s)[quorum - 1]


def schedule_warnings(schedule: Schedule) -> list[str]:
    if schedule.slack_s > 0:
        return []
    needed = slots_to_hide(schedule.exchange_s, schedule.slot_s) + 1
    have = f"the overlap of {schedule.overlap} slots of {schedule.slot_s:.3g} s"
    head = f"{have} does not hide an exchange of {schedule.exchange_s:.3g} s, so there is no grace window"
    if needed <= max_overlap(schedule.fragments):
        return [f"{head}: --set sync.overlap={needed}"]
    every = math.ceil(schedule.sync_every * needed / max_overlap(schedule.fragments))
    return [f"{head}: it takes {needed} slots, more than a round has; --set sync.every={every}"]
