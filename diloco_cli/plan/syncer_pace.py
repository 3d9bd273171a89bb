"""The syncer in a plan: its machine, the slots that it holds, and what is merged where slots are shorter.

Beyond its capacity (protocol/rules/capacity.py) a syncer merges at its own pace, so rounds get longer: islands train
on, and offer later what they have trained since. Of that is lost

    in flight   more of it: an offer waits for its slot, up to one merge, and for its own merge
    at_tau      everything beyond the syncer's pace: islands wait for each merge
    rounds      longer than an offer may hold: then a fragment's progress is given up again and again

Everything else of the schedule, such as what the overlap hides, goes by the slots that the syncer serves.
"""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.config.settings import Inventory, SyncSettings
from diloco_cli.plan.link import CODEC_BITS, GUESSED_RTT_S, guessed_rtt_s
from diloco_cli.protocol.rules.capacity import MergeWork, SlotTime, SyncerMachine, merge_time, shortest_slot

MERGE_PARAMETERS_PER_S = 1.6e9  # of one learner, in a second of one core: tests/benchmarks/README.md, int8, 8 deltas
SYNCER_BPS = 10e9  # guessed: rate at which a machine near the bucket reads from it, or writes to it, bits per second
MERGED_SHARE = 0.75  # of the progress that an offer may hold, in the mean over loads: 0.6 to 0.9 in virtual time
STATE_BITS = 64  # of a parameter: itself and its momentum, float32
GUESSED_MACHINE = SyncerMachine(GUESSED_RTT_S, SYNCER_BPS, SYNCER_BPS, MERGE_PARAMETERS_PER_S)


def machine_of(inventory: Inventory) -> SyncerMachine:
    """The syncer's machine as the inventory states it, `store.link`; guesses for what it does not."""
    link, guess = inventory.store.link, guessed_machine(inventory.store.url)
    return SyncerMachine(
        guess.call_s if link.rtt_s is None else link.rtt_s,
        link.up_bps or guess.up_bps,
        link.down_bps or guess.down_bps,
        guess.parameters_per_s,
        guess.reads_back if inventory.store.checks_uploads is None else not inventory.store.checks_uploads,
    )


def guessed_machine(url: str) -> SyncerMachine:
    """Of a store about which nothing is stated: a bucket, or a folder, whose calls take next to no time. Of services
    that speak S3 some check uploads and some do not (store/proof.py)."""
    return replace(GUESSED_MACHINE, call_s=guessed_rtt_s(url), reads_back=url.startswith("s3://"))


def work_of(parameters: float, num_islands: int, sync: SyncSettings) -> MergeWork:
    """The merge of a fragment of `parameters` parameters."""
    version_bits = STATE_BITS + CODEC_BITS[sync.weights_codec]
    return MergeWork(num_islands, parameters, parameters * CODEC_BITS[sync.codec] / 8, parameters * version_bits / 8)


def syncer_s(parameters: float, num_islands: int, sync: SyncSettings, machine: SyncerMachine) -> float:
    """Seconds that a fragment of `parameters` spends at the syncer: every island's delta is read, all are merged, state
    and weights are written and, where the store does not check uploads, read back before the commit."""
    return merge_time(work_of(parameters, num_islands, sync), machine).seconds


def spent_a_slot(
    parameters: int, fragments: int, num_islands: int, sync: SyncSettings, machine: SyncerMachine, slot_s: float
) -> SlotTime:
    """What the syncer needs for a slot, in the mean over fragments. `parameters`: the whole model's."""
    return shortest_slot(work_of(parameters / fragments, num_islands, sync), machine, slot_s)


def syncer_load(parameters: float, num_islands: int, round_s: float) -> float:
    """The share of its time in which the syncer computes. `parameters`: the whole model's."""
    return parameters * num_islands / MERGE_PARAMETERS_PER_S / round_s


def waiting_s(slot_s: float, spent_s: float) -> float:
    """How long an offer waits at the syncer for its slot, in the mean: the busier, the longer; at most one merge."""
    return min(1.0, spent_s / slot_s) * max(slot_s, spent_s)


def most_rounds(sync: SyncSettings) -> int:
    """How many rounds of progress an offer may hold (eligibility.max_steps)."""
    return sync.drift_rounds + sync.staleness_rounds + 2


def kept_at_pace(sync: SyncSettings, load: float) -> float:
    """The share of the progress that can be merged where slots are served `load` times as slowly as planned. With
    `adoption: at_tau` islands wait. Else they give a fragment's progress up each time it is more than an offer may
    hold: what is there when the merge comes depends on when they last did, so this is a mean."""
    if load <= 1:
        return 1.0
    return min(1.0, merged_rounds(sync) / load)


def merged_rounds(sync: SyncSettings) -> float:
    """How many planned rounds of progress are merged between two merges of a fragment, at most."""
    return 1.0 if sync.adoption == "at_tau" else MERGED_SHARE * most_rounds(sync)
