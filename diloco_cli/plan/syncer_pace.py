"""The syncer in a plan: its machine, the slots that it holds, and what is merged where slots are shorter.

Beyond its capacity (protocol/rules/capacity.py) a syncer merges at its own pace, so rounds get longer: islands train
on, and offer later what they have trained since. Of that is lost

    in flight   more of it: an offer waits for its slot, up to one merge, and for its own merge
    at_tau      everything beyond the syncer's pace: islands wait for each merge
    rounds      longer than an offer may hold: then a fragment's progress is given up again and again

Everything else of the schedule, such as what the overlap hides, goes by the slots that the syncer serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import fmean

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import StoreSettings, SyncSettings
from diloco_cli.formulas import formula
from diloco_cli.methods import OUTER_OPTIMIZERS
from diloco_cli.plan.link import CLIENT_BPS, CODEC_BITS, GUESSED_RTT_S, reached, rtt_of
from diloco_cli.protocol.log.heartbeats import SyncerHeartbeat
from diloco_cli.protocol.log.metrics import MergeNote
from diloco_cli.protocol.log.operations import MAX_AT_ONCE
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.rules.capacity import (
    MergeWork,
    SlotTime,
    SyncerMachine,
    measured_machine,
    merge_time,
    shortest_slot,
)
from diloco_cli.protocol.rules.merging import max_rounds
from diloco_cli.store.url import parse_url
from diloco_cli.units import format_bandwidth, format_count, format_duration

MERGE_PARAMETERS_PER_S = 1.6e9  # of one learner, in a second of one core: tests/benchmarks/README.md, int8, 8 deltas
SYNCER_BPS = 10e9  # guessed: rate at which a machine reads from a store near it, or writes to it, bits per second
MERGED_SHARE = 0.75  # of the progress that an offer may hold, in the mean over loads: 0.6 to 0.9 in virtual time
STATE_BYTES = OUTER_OPTIMIZERS["nesterov"].state_bytes  # of a parameter, by the usual outer optimizer
GUESSED_MACHINE = SyncerMachine(GUESSED_RTT_S, CLIENT_BPS, CLIENT_BPS, MERGE_PARAMETERS_PER_S)  # beside a bucket


def machine_of(store: StoreSettings) -> SyncerMachine:
    """The syncer's machine as the inventory states it; guesses for what it does not."""
    guess = GUESSED_MACHINE
    stated = replace(store.link, up_bps=store.link.up_bps or SYNCER_BPS, down_bps=store.link.down_bps or SYNCER_BPS)
    link = reached(stated, store.url)
    return SyncerMachine(
        rtt_of(store.link, store.url),
        link.up_bps,
        link.down_bps,
        guess.parameters_per_s,
        not parse_url(store.url).kind.checks_uploads,
        store.connections or guess.connections,
    )


def measured_by(
    said: SyncerHeartbeat, run: RunFormat, merges: Sequence[MergeNote]
) -> tuple[MergeWork, SyncerMachine] | None:
    """The mean merge of a syncer that exists, and the machine that it does that on, as it measures itself. None before
    its first merge."""
    figures = said.call_s, said.bytes_s, said.processor_s
    if not merges or not all(isfinite(figure) and figure >= 0 for figure in figures) or said.call_s == 0:
        return None  # a heartbeat is a hint, and may say anything
    learners = round(fmean(len(merge.participants) for merge in merges)) or 1  # its figures are means of several, too
    settings, mean_fragment = run.settings, run.layout.num_parameters / run.num_fragments
    work = work_of(mean_fragment, learners, settings.sync, OUTER_OPTIMIZERS[settings.outer.name].state_bytes)
    return work, measured_machine(work, *figures, said.reads_back, connections_of(said))


def connections_of(said: SyncerHeartbeat) -> int:
    """As many as a syncer can have."""
    return min(max(1, said.connections), MAX_AT_ONCE)


def machine_text(machine: SyncerMachine) -> str:
    """In words, without what takes no time."""
    links = [
        f"{format_bandwidth(bps)} {way}" for bps, way in ((machine.up_bps, "up"), (machine.down_bps, "down")) if bps
    ]
    per_s = machine.parameters_per_s
    merged = [f"merges {format_count(per_s)} parameters a second"] if isfinite(per_s) else []
    back = f"versions are {'' if machine.reads_back else 'not '}read back"
    calls = f"{format_duration(machine.call_s)} a call, {machine.connections} at a time"
    return ", ".join([calls, *links, *merged, back])


def work_of(parameters: float, num_islands: int, sync: SyncSettings, state_bytes: int = STATE_BYTES) -> MergeWork:
    """The merge of a fragment of `parameters` parameters."""
    version_bytes = state_bytes + CODEC_BITS[sync.weights_codec] / 8
    return MergeWork(num_islands, parameters, parameters * CODEC_BITS[sync.codec] / 8, parameters * version_bytes)


def syncer_s(parameters: float, num_islands: int, sync: SyncSettings, machine: SyncerMachine) -> float:
    """Seconds that a fragment of `parameters` spends at the syncer: every island's delta is read, all are merged, state
    and weights are written and, where the store does not check uploads, read back before the commit."""
    return merge_time(work_of(parameters, num_islands, sync), machine).seconds


def spent_a_slot(
    parameters: int, fragments: int, num_islands: int, sync: SyncSettings, machine: SyncerMachine, slot_s: float
) -> SlotTime:
    """What the syncer needs for a slot, in the mean over fragments. `parameters`: the whole model's."""
    return shortest_slot(work_of(parameters / fragments, num_islands, sync), machine, slot_s)


@formula("schedule", "waiting for its slot", "s")
def waiting_s(slot_s: float, spent_s: float) -> float:
    """How long an offer waits at the syncer for its slot, in the mean: the busier, the longer; at most one merge."""
    return min(1.0, spent_s / slot_s) * max(slot_s, spent_s)


def kept_at_pace(sync: SyncSettings, load: float) -> float:
    """The share of the progress that can be merged where slots are served `load` times as slowly as planned. With
    `adoption: at_tau` islands wait. Else they give a fragment's progress up each time it is more than an offer may
    hold: what is there when the merge comes depends on when they last did, so this is a mean."""
    return merged_share(merged_rounds(sync), load) if load > 1 else 1.0


@formula("island", "merged at the syncer's pace")
def merged_share(merged_rounds: float, syncer_load: float) -> float:
    return min(1.0, merged_rounds / syncer_load)


def merged_rounds(sync: SyncSettings) -> float:
    """How many planned rounds of progress are merged between two merges of a fragment, at most."""
    return 1.0 if sync.adoption == "at_tau" else MERGED_SHARE * max_rounds(sync)
