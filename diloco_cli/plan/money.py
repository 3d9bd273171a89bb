"""What a fleet costs: accelerators, egress, requests, storage.

Requests, counted from the protocol (M islands, P slots in a round of T seconds, polls each p = slot / 20, between
0.02 and 0.5 s):

    class A (writes)  an island a slot: delta, offer; each 3 s a beat; now and then its moments
                      the syncer a slot: state, cast, commit; each 3 s a beat; every 64 commits a snapshot
    class B (reads)   an island a slot: the new cast and commit; each p a look for the next commit; each 5 s a fence
                      the syncer a slot: M offers, M deltas, state and cast read back; each p a look into M mailboxes;
                      each second M incarnations, the log, requests
"""

from __future__ import annotations

from diloco_cli.config.settings import RunSettings
from diloco_cli.plan.flow import Fleet
from diloco_cli.plan.link import CODEC_BITS, moment_bytes
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Money

DAY_S = 86_400.0
GB = 1e9
CLASS_A_PRICE = 0.005 / 1000  # guessed from public price lists of object stores, as are the next two
CLASS_B_PRICE = 0.0004 / 1000
STORAGE_PRICE = 0.02 / 30  # of one GB a day
POLL_BOUNDS_S = (0.02, 0.5)
POLLS_A_SLOT = 20
BEAT_EVERY_S, FENCE_EVERY_S = 3.0, 5.0
SNAPSHOT_EVERY = 64
STATE_BYTES = 8  # parameters and momentum, float32


def costs(fleet: Fleet, run: RunSettings, model: ModelFacts) -> Money:
    """Nothing is deleted during a run, so storage grows from the first round to the last."""
    days = run.train.tokens / fleet.tokens_per_s / DAY_S
    accelerators = sum(candidate.island.price_per_h for candidate in fleet.kept)
    gigabytes = up_gb_per_day(fleet, run, model)
    egress_gb = gigabytes * len(fleet.kept)
    egress = gigabytes * sum(candidate.egress_per_gb for candidate in fleet.kept)
    class_a, class_b = requests_per_day(fleet, run)
    requests = class_a * CLASS_A_PRICE + class_b * CLASS_B_PRICE
    growth = storage_gb_per_day(fleet, run, model)
    storage = growth * days * days / 2 * STORAGE_PRICE
    per_day = 24 * accelerators + egress + requests
    total = days * per_day + storage
    return Money(
        accelerators_per_h=accelerators,
        egress_per_day=egress,
        egress_gb_per_day=egress_gb,
        class_a_per_day=class_a,
        class_b_per_day=class_b,
        requests_per_day=requests,
        storage_gb_per_day=growth,
        storage_gb_at_end=growth * days,
        storage_total=storage,
        per_h=total / days / 24,
        total=total,
        per_billion_tokens=total / run.train.tokens * 1e9,
    )


def up_gb_per_day(fleet: Fleet, run: RunSettings, model: ModelFacts) -> float:
    """What one island sends: its delta of every parameter once a round, its moments now and then."""
    bytes_each = CODEC_BITS[fleet.sync.codec] / 8 + moment_bytes(run.train.inner)
    return model.parameters * bytes_each / GB * DAY_S / fleet.schedule.round_s


def storage_gb_per_day(fleet: Fleet, run: RunSettings, model: ModelFacts) -> float:
    """A round leaves a new state and cast of every parameter, a delta of each island, and now and then moments."""
    of_islands = len(fleet.kept) * (CODEC_BITS[fleet.sync.codec] / 8 + moment_bytes(run.train.inner))
    per_parameter = STATE_BYTES + CODEC_BITS[fleet.sync.broadcast] / 8 + of_islands
    return model.parameters * per_parameter / GB * DAY_S / fleet.schedule.round_s


def poll_s(slot_s: float) -> float:
    low, high = POLL_BOUNDS_S
    return min(high, max(low, slot_s / POLLS_A_SLOT))


def requests_per_day(fleet: Fleet, run: RunSettings) -> tuple[float, float]:
    """(class A, class B) of all islands and the syncer."""
    islands, slot_s, poll = len(fleet.kept), fleet.schedule.slot_s, poll_s(fleet.schedule.slot_s)
    snapshots = 1 / SNAPSHOT_EVERY
    saves = islands / (run.train.inner.save_every * fleet.schedule.fragments)
    class_a = (2 * islands + 3 + snapshots + saves) / slot_s + (islands + 1) / BEAT_EVERY_S
    learners_b = islands * (2 / slot_s + 1 / poll + 1 / FENCE_EVERY_S)
    syncer_b = (2 * islands + 2) / slot_s + islands / poll + islands + 2
    return class_a * DAY_S, (learners_b + syncer_b) * DAY_S
