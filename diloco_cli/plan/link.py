"""The traffic of an island's link: every parameter once up and once down in every round, and now and then the inner
optimizer's moments up.

Records are added: offers, commits, heartbeats, of the sizes that the protocol writes (a test encodes some; names of
islands and events make them differ by a few per cent). Beside a small model's fragments they are not negligible.

The syncer in a plan: its machine, the slots that it holds, and what is merged where slots are shorter.

Beyond its capacity (protocol/rules/capacity.py) a syncer merges at its own pace, so rounds get longer: islands train
on, and offer later what they have trained since. Of that is lost

    in flight   more of it: an offer waits for its slot, up to one merge, and for its own merge
    rounds      longer than an offer may hold: then a fragment's progress is given up again and again

Everything else of the schedule, such as what the overlap hides, goes by the slots that the syncer serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from statistics import fmean
from typing import TYPE_CHECKING

from diloco_cli.config.codec import replace
from diloco_cli.config.models import ModelFacts
from diloco_cli.config.settings import InnerSettings, Link, StoreSettings, SyncSettings
from diloco_cli.formulas import formula
from diloco_cli.methods import CODECS, INNER_OPTIMIZERS, OUTER_OPTIMIZERS
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
from diloco_cli.quantities import format_bandwidth, format_count, format_duration
from diloco_cli.store.url import parse_url

if TYPE_CHECKING:
    from diloco_cli.plan.plan import Schedule

CODEC_BITS = {name: float(record.bits) for name, record in CODECS.items()}  # of a parameter, the finest first
ROUND_TRIPS = 4  # of one exchange: put the payload, put the offer, see the commit, get the merged fragment
GUESSED_RTT_S = 0.05  # of one request to a bucket
FOLDER_CALL_S = 0.001  # of one to a store in a folder
CLIENT_BPS = 3.5e9
"""That one process moves to a cloud's bucket or back over any link, through gcsfs: bits a second that one core
checks and encrypts, 3.7 up and 3.4 down where it was measured (TLS included, an Intel Xeon, 2026-11-27)."""
MBPS = 1e6
COMMIT_BYTES = 800  # of a merge, without its inputs
INPUT_BYTES = 350
OFFER_BYTES = 700
HEARTBEAT_BYTES = 349
HEARTBEAT_EVERY_S = 3.0
MOST_BESIDE = 0.9  # of a lane's time, for calls beside


UP_CALLS, DOWN_CALLS = 2, 3  # of a slot, in turn: payload, offer; the next commit, its version, a look in vain
FOLLOWS_PER_S = 1 / HEARTBEAT_EVERY_S + 1 / 5  # calls between those that read: heartbeats, looks for a successor


@dataclass(frozen=True)
class Need:
    """Bits of one round, up and down, and the calls that carry them, in turn: what is sent and what comes each have one
    lane, in which a fragment waits for the one before."""

    up_bits: float
    down_bits: float
    up_calls: int = 0
    down_calls: int = 0

    def up_bps(self, round_s: float) -> float:
        return self.up_bits / round_s

    def down_bps(self, round_s: float) -> float:
        return self.down_bits / round_s

    def shortest_round_s(self, link: Link) -> float:
        """The shortest round that the link can carry; 0 for an unknown link."""
        up = self.up_bits / link.up_bps if link.up_bps else 0.0
        down = self.down_bits / link.down_bps if link.down_bps else 0.0
        return max(up, down)

    def busy_s(self, link: Link) -> float:
        """Of a round, in the busier lane: its bytes and its calls. Whoever needs more falls behind, and more than a
        little less is caught up with only slowly, after a start or saved moments."""
        up = (self.up_bits / link.up_bps if link.up_bps else 0.0) + self.up_calls * (link.rtt_s or 0.0)
        return max(up, coming_s(self.down_bits, self.down_calls, link))


def coming_s(bits: float, calls: int, link: Link) -> float:
    """In the lane of what comes: bytes and calls in turn, the calls between them that follow the run beside."""
    rtt_s = link.rtt_s or 0.0
    alone_s = (bits / link.down_bps if link.down_bps else 0.0) + calls * rtt_s
    return alone_s / (1 - min(MOST_BESIDE, FOLLOWS_PER_S * rtt_s))


def load_of_round(model: ModelFacts, sync: SyncSettings, inner: InnerSettings) -> Need:
    """An island's true traffic: deltas and versions, and its share of the saved moments."""
    up_bits = CODEC_BITS[sync.codec] + 8 * moment_bytes(inner, model)
    count = model.fragments(sync.fragments).count
    down_bits = model.parameters * CODEC_BITS[sync.weights_codec]
    return Need(model.parameters * up_bits, down_bits, UP_CALLS * count, DOWN_CALLS * count)


def moment_bytes(inner: InnerSettings, model: ModelFacts) -> float:
    """Of a parameter, a round: the moments are saved every so many rounds."""
    return INNER_OPTIMIZERS[inner.name].state_bytes(model.hidden) / inner.save_every


BESIDE_MOMENTS = 0.5
"""Of the uplink, what an offer has at least while saved moments travel over one connection (store/transfers.py)."""


@formula("island", "moments on their way")
def moments_share(moments_of_a_round: float, deltas_of_a_round: float) -> float:
    """Of the time. `..._of_a_round`: of a round, in which each alone would use the uplink."""
    return min(1.0, moments_of_a_round / max(1 - BESIDE_MOMENTS, 1 - deltas_of_a_round))


@formula("island", "sent beside moments")
def sent_beside_moments(moments_on_their_way: float, deltas_of_a_round: float) -> float:
    """Of its deltas, where they need more than their part of the link meanwhile: others' merges replace the rest."""
    return 1 - moments_on_their_way * max(0.0, 1 - BESIDE_MOMENTS / max(BESIDE_MOMENTS, deltas_of_a_round))


def traffic_mbps(
    model: ModelFacts, sync: SyncSettings, inner: InnerSettings, schedule: Schedule, step_s: float, num_islands: int
) -> tuple[float, float]:
    """(sent, received) by one island, payloads and records together. `step_s`: its own. If a step takes longer than a
    round, the island exchanges once a step."""
    round_s = max(schedule.round_s, step_s)
    load = load_of_round(model, sync, inner)
    return (
        sent_mbps(load.up_bits, round_s, schedule.fragments),
        received_mbps(load.down_bits, round_s, commit_bytes(num_islands), schedule.slot_s),
    )


@formula("island", "sent", "Mbps")
def sent_mbps(sent_in_a_round: float, round_s: float, fragments: int) -> float:
    records = fragments * OFFER_BYTES / round_s + HEARTBEAT_BYTES / HEARTBEAT_EVERY_S
    return (sent_in_a_round / round_s + 8 * records) / MBPS


@formula("island", "received", "Mbps")
def received_mbps(received_in_a_round: float, round_s: float, commit_bytes: int, slot_s: float) -> float:
    return (received_in_a_round / round_s + 8 * commit_bytes / slot_s) / MBPS


def commit_bytes(num_islands: int) -> int:
    """Bytes of the commit of a merge in which all islands take part."""
    return COMMIT_BYTES + num_islands * INPUT_BYTES


@formula("island", "uplink needed", "Mbps")
def uplink_mbps(parameters: int, codec_bits: float, round_s: float) -> float:
    return parameters * codec_bits / round_s / MBPS


downlink_mbps = uplink_mbps.named("downlink needed")


def join_bytes(model: ModelFacts, sync: SyncSettings) -> float:
    """Bytes that a new process downloads before its first step: the newest version of every fragment. (Saved moments of
    a predecessor come in addition.)"""
    return model.parameters * CODEC_BITS[sync.weights_codec] / 8


def guessed_rtt_s(url: str) -> float:
    """Of a call to this store, where nothing is stated."""
    return GUESSED_RTT_S if is_bucket(url) else FOLDER_CALL_S


def to_store(link: Link, url: str) -> Link:
    """What a process has of a link to this store: no more than CLIENT_BPS to a bucket; a guess where the round trip is
    not stated."""
    return replace(reached(link, url), rtt_s=rtt_of(link, url))


def reached(link: Link, url: str) -> Link:
    """With the rates that a process reaches over it; unknown ones stay unknown."""
    if not is_bucket(url):
        return link
    up, down = (bps and min(bps, CLIENT_BPS) for bps in (link.up_bps, link.down_bps))
    return replace(link, up_bps=up, down_bps=down)


@lru_cache(maxsize=256)  # a search asks it of the same few places again and again
def is_bucket(url: str) -> bool:
    """Whether the store is a cloud's, and not a folder or memory."""
    return parse_url(url).kind.is_bucket


def rtt_of(link: Link, url: str) -> float:
    """Of a call over this link to this store: as stated, or guessed."""
    return guessed_rtt_s(url) if link.rtt_s is None else link.rtt_s


def transfer_s(link: Link, rtt_s: float, parameters: float, codec: str, weights_codec: str) -> float:
    """Upload and download of a fragment of `parameters`, with round trips; an unknown rate costs nothing."""
    up_bps, down_bps = link.up_bps or inf, link.down_bps or inf
    return exchange_s(parameters, CODEC_BITS[codec], up_bps, CODEC_BITS[weights_codec], down_bps, rtt_s)


@formula("island", "transfer", "s")
def exchange_s(
    fragment: float, up_bits: float, up_bps: float, down_bits: float, down_bps: float, rtt_s: float
) -> float:
    return fragment * up_bits / up_bps + fragment * down_bits / down_bps + ROUND_TRIPS * rtt_s


def rounded_up(bps: float, digits: int) -> float:
    """A bandwidth for people, to so many digits."""
    unit = 10.0 ** (math.floor(math.log10(bps)) + 1 - digits)
    return math.ceil(bps / unit - 1e-9) * unit


MERGE_PARAMETERS_PER_S = 1.6e9  # of one learner, in a second of one core: tests/benchmarks/README.md, int8, 8 deltas
SYNCER_BPS = 10e9  # guessed: rate at which a machine reads from a store near it, or writes to it, bits per second
REPLACED_SHARE = 0.75  # of the progress that an offer may hold, in the mean over loads: 0.6 to 1.0 in virtual time
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
    """How long an offer waits at the syncer for its slot, in the mean: hardly while the syncer keeps its pace (in
    virtual time .1 of a slot at a load of .75, .3 at .99), at most one merge."""
    return min(1.0, (spent_s / slot_s) ** 4 / 3) * spent_s


def kept_at_pace(sync: SyncSettings, load: float) -> float:
    """The share of the progress that can be merged where slots are served `load` times as slowly as planned. Islands
    stand still while a fragment holds as much as an offer may. With `rebase` they go on beside an offer that is on its
    way, so that the next one is full; with `replace` what it holds depends on when the one before was merged."""
    share = 1.0 if sync.keeps_progress else REPLACED_SHARE
    return merged_share(share * max_rounds(sync), load) if load > 1 else 1.0


@formula("island", "merged at the syncer's pace")
def merged_share(merged_rounds: float, syncer_load: float) -> float:
    return min(1.0, merged_rounds / syncer_load)
