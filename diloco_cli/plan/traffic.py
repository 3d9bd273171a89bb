"""What an island's link really carries: fragments, the moments saved now and then, and records.

Every slot each island writes one offer, and reads one commit, which lists an input for every island that took part;
each few seconds it writes a beat. A look for the next commit that finds none carries no bytes. A process that joins
downloads every fragment once; of its saved moments it reads those of its predecessor, if there are any.

Sizes of records are those that the protocol writes (a test encodes some); names of islands and events make them differ
by a few per cent. Beside the fragments of a large model they are nothing, beside those of a small one a share.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.config.settings import InnerSettings, SyncSettings
from diloco_cli.plan.link import CODEC_BITS, MBPS, load_of_round
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Schedule

COMMIT_BYTES = 800  # of a merge, without its inputs
INPUT_BYTES = 300
OFFER_BYTES = 900
BEAT_BYTES = 260
BEAT_EVERY_S = 3.0


@dataclass(frozen=True)
class Traffic:
    """Of one island, payloads and records together, in Mbit/s."""

    sent_mbps: float
    received_mbps: float


def traffic(
    model: ModelFacts, sync: SyncSettings, inner: InnerSettings, schedule: Schedule, step_s: float, num_islands: int
) -> Traffic:
    """`step_s`: the island's own. Where a step takes longer than a round, the island exchanges once a step."""
    round_s = max(schedule.round_s, step_s)
    load = load_of_round(model, sync.codec, sync.broadcast, inner)
    up_bps = load.up_bps(round_s) + 8 * (schedule.fragments * OFFER_BYTES / round_s + BEAT_BYTES / BEAT_EVERY_S)
    down_bps = load.down_bps(round_s) + 8 * commit_bytes(num_islands) / schedule.slot_s
    return Traffic(up_bps / MBPS, down_bps / MBPS)


def commit_bytes(num_islands: int) -> int:
    """Of a merge that everybody takes part in."""
    return COMMIT_BYTES + num_islands * INPUT_BYTES


def join_bytes(model: ModelFacts, sync: SyncSettings) -> float:
    """What a new process downloads before its first step: the newest version of every fragment."""
    return model.parameters * CODEC_BITS[sync.broadcast] / 8
