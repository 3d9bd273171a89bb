"""The traffic of an island's link: every parameter once up and once down in every round, and now and then the inner
optimizer's moments up.

Records are added. Every slot each island writes one offer, and reads one commit, which lists an input for every
island that took part; every few seconds it writes a heartbeat. A request for a commit that is not there carries no
bytes. Sizes of records are those that the protocol writes (a test encodes some); names of islands and events make them
differ by a few per cent. Records are negligible beside a large model's fragments, but not beside a small one's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings, Link, SyncSettings
from diloco_cli.formulas import formula
from diloco_cli.methods import CODECS, INNER_OPTIMIZERS
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.store.url import parse_url

if TYPE_CHECKING:
    from diloco_cli.plan.plan import Schedule

CODEC_BITS = {name: float(record.bits) for name, record in CODECS.items()}  # of a parameter, the finest first
ROUND_TRIPS = 4  # of one exchange: put the payload, put the offer, see the commit, get the merged fragment
GUESSED_RTT_S = 0.05  # of one request to a bucket
FOLDER_CALL_S = 0.001  # of one to a store in a folder
CLIENT_BPS = 3.5e9
"""That one process moves to a cloud's bucket or back over any link, through gcsfs: bits a second that one core
checks and encrypts, 3.7 up and 3.4 down where it was measured (tests/benchmarks/one_process.py)."""
MBPS = 1e6
COMMIT_BYTES = 800  # of a merge, without its inputs
INPUT_BYTES = 300
OFFER_BYTES = 700
HEARTBEAT_BYTES = 307
HEARTBEAT_EVERY_S = 3.0


Transfer = Callable[[float, float, float, float, float, float], float]


@dataclass(frozen=True)
class Need:
    """Bits of one round, up and down."""

    up_bits: float
    down_bits: float

    def up_bps(self, round_s: float) -> float:
        return self.up_bits / round_s

    def down_bps(self, round_s: float) -> float:
        return self.down_bits / round_s

    def shortest_round_s(self, link: Link) -> float:
        """The shortest round that the link can carry; 0 for an unknown link."""
        up = self.up_bits / link.up_bps if link.up_bps else 0.0
        down = self.down_bits / link.down_bps if link.down_bps else 0.0
        return max(up, down)


def need_of_round(model: ModelFacts, codec: str, weights_codec: str) -> Need:
    return Need(model.parameters * CODEC_BITS[codec], model.parameters * CODEC_BITS[weights_codec])


def load_of_round(model: ModelFacts, codec: str, weights_codec: str, inner: InnerSettings) -> Need:
    """An island's true traffic: the need of a round, and its share of the saved moments."""
    up_bits = sent_bits(model.parameters, CODEC_BITS[codec], moment_bytes(inner))
    return Need(up_bits, received_bits(model.parameters, CODEC_BITS[weights_codec]))


@formula("island", "sent in a round", "bits")
def sent_bits(parameters: int, codec_bits: float, moment_bytes: float) -> float:
    return parameters * codec_bits + 8 * parameters * moment_bytes


@formula("island", "received in a round", "bits")
def received_bits(parameters: int, codec_bits: float) -> float:
    return parameters * codec_bits


def moment_bytes(inner: InnerSettings) -> float:
    """Of a parameter, a round: the moments are saved every so many rounds."""
    return INNER_OPTIMIZERS[inner.name].state_bytes / inner.save_every


def traffic_mbps(
    model: ModelFacts, sync: SyncSettings, inner: InnerSettings, schedule: Schedule, step_s: float, num_islands: int
) -> tuple[float, float]:
    """(sent, received) by one island, payloads and records together. `step_s`: its own. If a step takes longer than a
    round, the island exchanges once a step."""
    round_s = max(schedule.round_s, step_s)
    load = load_of_round(model, sync.codec, sync.weights_codec, inner)
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


def transfer_s(
    link: Link, rtt_s: float, parameters: float, codec: str, weights_codec: str, way: Transfer | None = None
) -> float:
    """Upload and download of a fragment of `parameters`, with round trips; an unknown rate costs nothing. `way`: the
    formula that tells it."""
    up_bps, down_bps = link.up_bps or inf, link.down_bps or inf
    return (way or exchange_s)(parameters, CODEC_BITS[codec], up_bps, CODEC_BITS[weights_codec], down_bps, rtt_s)


@formula("island", "transfer", "s")
def exchange_s(
    fragment: float, up_bits: float, up_bps: float, down_bits: float, down_bps: float, rtt_s: float
) -> float:
    return fragment * up_bits / up_bps + fragment * down_bits / down_bps + ROUND_TRIPS * rtt_s


mean_exchange_s = exchange_s.named("transfer of the mean fragment")


def rounded_up(bps: float, digits: int) -> float:
    """A bandwidth for people, to so many digits."""
    unit = 10.0 ** (math.floor(math.log10(bps)) + 1 - digits)
    return math.ceil(bps / unit - 1e-9) * unit
