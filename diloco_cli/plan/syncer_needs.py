"""What a plan needs of the syncer's machine, and what to change where that cannot keep pace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from diloco_cli.plan.flow import MAX_EVERY, Fleet
from diloco_cli.plan.link import CLIENT_BPS, CODEC_BITS, MBPS, known_codecs, need_of_round
from diloco_cli.plan.memory import syncer_memory_gb
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import SyncerNeeds
from diloco_cli.plan.syncer_pace import STATE_BITS, spent_a_slot, syncer_load, work_of
from diloco_cli.protocol.rules.capacity import SlotTime, most_learners
from diloco_cli.units import format_duration

CROWDED = 80.0  # percent of a slot; a syncer that needs more gets a warning
TAKES = {"calls": "its calls to the store", "bytes": "its link", "processor": "its processor"}


def syncer_needs(fleet: Fleet, model: ModelFacts) -> SyncerNeeds:
    """The syncer reads every island's delta once a round, writes state and weights, and may have to read them back."""
    sync, s, islands, spent = fleet.sync, fleet.schedule, len(fleet.kept), fleet.syncer
    up_bits, down_bits = CODEC_BITS[sync.codec], CODEC_BITS[sync.weights_codec]
    need = need_of_round(model, sync.codec, sync.weights_codec)
    written_bits = model.parameters * STATE_BITS + need.down_bits
    machine = fleet.kept[0].syncer
    read_bits = islands * need.up_bits + machine.reads_back * written_bits
    merging = work_of(model.parameters / s.fragments, islands, sync)
    return SyncerNeeds(
        memory_gb=syncer_memory_gb(model, s.fragment_parameters, up_bits, down_bits, islands, machine.reads_back),
        down_mbps=read_bits / fleet.served_round_s / MBPS,
        up_mbps=written_bits / fleet.served_round_s / MBPS,
        merge_percent=100 * syncer_load(model.parameters, islands, fleet.served_round_s),
        fastest_slot_s=spent.seconds,
        calls_s=spent.calls_s,
        bytes_s=spent.bytes_s,
        processor_s=spent.processor_s,
        limit=spent.limit,
        busy_percent=100 * fleet.syncer_load,
        max_islands=most_learners(merging, machine, s.slot_s),
        reads_back=machine.reads_back,
    )


def syncer_warnings(needs: SyncerNeeds, fleet: Fleet, model: ModelFacts) -> list[str]:
    """A warning where the syncer is nearly as slow as the slots, or slower; with what would help."""
    if needs.busy_percent <= CROWDED:
        return []
    slot, fastest = (format_duration(seconds) for seconds in (fleet.schedule.slot_s, needs.fastest_slot_s))
    most = f"most of it for {TAKES[needs.limit]}"
    if needs.busy_percent <= 100:
        head = f"the syncer needs {fastest} for each slot of {slot}, {most}"
    else:
        times = f"rounds take {needs.busy_percent / 100:.2g} times as long"
        head = f"the syncer cannot hold slots of {slot}: a merge takes it {fastest}, {most}; {times}"
    return [": ".join(filter(None, (head, "; or ".join(_ways(needs, fleet, model)))))]


def _ways(needs: SyncerNeeds, fleet: Fleet, model: ModelFacts) -> Iterator[str]:
    """Settings under which the syncer would be free for a fifth of each slot; what to change about its machine."""
    sync, s, machine, islands = fleet.sync, fleet.schedule, fleet.kept[0].syncer, len(fleet.kept)
    every = math.ceil(sync.every * needs.busy_percent / CROWDED)
    if every <= MAX_EVERY:
        yield f"--set sync.every={every}"
    fragments = _fewer_fragments(fleet, model) if needs.limit == "calls" else None
    if fragments is not None:
        yield f"--set sync.fragments={fragments}"
    smaller = min(known_codecs(), key=lambda codec: CODEC_BITS[codec])
    coded = replace(sync, codec=smaller)  # type: ignore[arg-type]
    spent = spent_a_slot(model.parameters, s.fragments, islands, coded, machine, s.slot_s)
    if needs.limit == "bytes" and sync.codec != smaller and _leaves_room(spent, s.slot_s):
        yield f"--set sync.codec={smaller}"
    most = most_learners(work_of(model.parameters / s.fragments, islands, sync), machine, s.slot_s * CROWDED / 100)
    if 0 < most < islands:
        yield f"at most {most} islands"
    if needs.limit == "calls":
        yield f"a syncer nearer to its bucket than {format_duration(machine.call_s)} a call (store.link.rtt)"
    elif needs.limit == "bytes" and min(machine.up_bps or math.inf, machine.down_bps or math.inf) < CLIENT_BPS:
        yield "a faster link of the syncer's machine (store.link)"


def _leaves_room(spent: SlotTime, slot_s: float) -> bool:
    return 100 * spent.seconds <= CROWDED * slot_s


def _fewer_fragments(fleet: Fleet, model: ModelFacts) -> int | None:
    """The largest number of fragments whose slots leave the syncer a fifth of them."""
    s, sync, islands, machine = fleet.schedule, fleet.sync, len(fleet.kept), fleet.kept[0].syncer
    for count in range(s.fragments - 1, 0, -1):
        slot_s = s.round_s / count
        spent = spent_a_slot(model.parameters, count, islands, sync, machine, slot_s)
        if _leaves_room(spent, slot_s):
            return count
    return None
