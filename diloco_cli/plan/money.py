"""The costs of a fleet: accelerators, egress, requests, storage.

Requests, counted from the protocol (M islands, slots of s seconds):

    class A (writes)  an island a slot: delta, offer; each 3 s a heartbeat; now and then its moments
                      the syncer a slot: state, weights, commit; each 3 s a heartbeat; every 64 commits a snapshot
    class B (reads)   an island a slot: its polls of the next commit, the new weights; at most each 5 s a fence
                      the syncer a slot: its polls of M mailboxes, M deltas, and state and weights where the store
                      does not check uploads; about once a slot M incarnations; each 2 s the log and requests

An object that comes once a slot is polled about the time at which it is due (protocol/rules/polling.py).
"""

from __future__ import annotations

from math import inf

from diloco_cli.config.settings import RunSettings
from diloco_cli.methods import OUTER_OPTIMIZERS
from diloco_cli.plan.flow import Fleet
from diloco_cli.plan.link import CODEC_BITS, HEARTBEAT_EVERY_S, moment_bytes
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Money
from diloco_cli.protocol.actors.collection import FLOORS_APART, KEPT_MOMENTS, LEAST_ROUNDS
from diloco_cli.protocol.rules.polling import DENSE, DENSE_BOUNDS_S, SHORT_SLOT_S, requests_every_s, watch_every_s

DAY_S = 86_400.0
GB = 1e9
CLASS_A_PRICE = 0.005 / 1000  # guessed from public price lists of object stores, as are the next two
CLASS_B_PRICE = 0.0004 / 1000
STORAGE_PRICE = 0.02 / 30  # of one GB a day
LEARNERS_LOOKS = 5.2  # a slot, the successful one included; measured in virtual time at slots of 2 to 60 s
SYNCERS_LOOKS = 3.8  # likewise, into one mailbox
FENCE_EVERY_S = 5.0
SNAPSHOT_EVERY = 64


def costs(fleet: Fleet, run: RunSettings, model: ModelFacts) -> Money:
    """Storage grows until the retained rounds are full (`retention.rounds`), then stays."""
    days = run.train.tokens / fleet.tokens_per_s / DAY_S
    accelerators = sum(candidate.island.price_per_h for candidate in fleet.kept)
    gigabytes = up_gb_per_day(fleet, run, model)
    egress_gb = gigabytes * len(fleet.kept)
    egress = gigabytes * sum(candidate.egress_per_gb for candidate in fleet.kept)
    class_a, class_b = requests_per_day(fleet, run)
    requests = class_a * CLASS_A_PRICE + class_b * CLASS_B_PRICE
    growth = storage_gb_per_day(fleet, run, model)
    growing = min(days, retained_days(fleet.served_slot_s, fleet.schedule.fragments, run))
    storage = growth * (growing * growing / 2 + growing * (days - growing)) * STORAGE_PRICE
    slot_s, fragments = fleet.served_slot_s, fleet.schedule.fragments
    slots = days * DAY_S / slot_s
    kept = objects_kept(len(fleet.kept), min(slots, growing * DAY_S / slot_s), fragments, run)
    mirrors_gb, mirrors = mirrors_per_day(fleet, model)
    per_day = 24 * accelerators + egress + mirrors + requests
    total = days * per_day + storage
    return Money(
        accelerators_per_h=accelerators,
        egress_per_day=egress,
        egress_gb_per_day=egress_gb,
        class_a_per_day=class_a,
        class_b_per_day=class_b,
        requests_per_day=requests,
        storage_gb_per_day=growth,
        storage_gb_at_end=growth * growing,
        storage_total=storage,
        objects_kept=kept,
        objects_at_end=kept + slots,
        per_h=total / days / 24,
        total=total,
        per_billion_tokens=total / run.train.tokens * 1e9,
        mirrors_gb_per_day=mirrors_gb,
        mirrors_per_day=mirrors,
    )


def up_gb_per_day(fleet: Fleet, run: RunSettings, model: ModelFacts) -> float:
    """GB a day that one island sends: its delta of every parameter once a round, its moments now and then."""
    bytes_each = CODEC_BITS[fleet.sync.codec] / 8 + moment_bytes(run.train.inner)
    return model.parameters * bytes_each / GB * DAY_S / fleet.served_round_s


def mirrors_per_day(fleet: Fleet, model: ModelFacts) -> tuple[float, float]:
    """GB between the home bucket and the buckets of regions, and their egress price.

    A round carries every fragment's new version once to each region with a bucket of its own, for any number of islands
    there, and every delta of such a region's islands once to the home bucket. Saved moments are not copied. Records are
    small beside both.
    """
    crossings = [kept.crossing for kept in fleet.kept if kept.crossing is not None]
    version, delta = (
        model.parameters * CODEC_BITS[codec] / 8 / GB * DAY_S / fleet.served_round_s
        for codec in (fleet.sync.weights_codec, fleet.sync.codec)
    )
    home_per_gb = {crossing.region: crossing.home_per_gb for crossing in crossings}
    cost = version * sum(home_per_gb.values()) + delta * sum(crossing.per_gb for crossing in crossings)
    return len(home_per_gb) * version + len(crossings) * delta, cost


def storage_gb_per_day(fleet: Fleet, run: RunSettings, model: ModelFacts) -> float:
    """A round adds a new state and weights of every parameter, a delta of each island, and now and then moments."""
    of_islands = len(fleet.kept) * (CODEC_BITS[fleet.sync.codec] / 8 + moment_bytes(run.train.inner))
    per_parameter = OUTER_OPTIMIZERS[run.outer.name].state_bytes + CODEC_BITS[fleet.sync.weights_codec] / 8 + of_islands
    return model.parameters * per_parameter / GB * DAY_S / fleet.served_round_s


def retained_days(slot_s: float, fragments: int, run: RunSettings) -> float:
    """For how long a bucket grows before deletions balance writes; for ever if everything is kept."""
    return retained_commits(slot_s, fragments, run) * slot_s / DAY_S


def retained_commits(slot_s: float, fragments: int, run: RunSettings) -> float:
    """So many commits at most have their objects in the bucket (protocol/actors/collection.py): those that are kept, a
    quarter more before the floor moves, and those of the readers' grace."""
    if run.retention.rounds == "all":
        return inf
    kept = max(LEAST_ROUNDS, run.retention.rounds) * fragments
    return kept + max(FLOORS_APART, kept // 4) + run.retention.grace_s / slot_s


def objects_kept(islands: int, commits: float, fragments: int, run: RunSettings) -> float:
    """The objects of so many commits beside the log's records: deltas and offers, states and weights; each fragment's
    current state, its weights that a delta may still be based on, and learners' newest moments."""
    versions = fragments * (1 + run.sync.staleness_rounds + 2)
    return commits * (2 * islands + 2) + versions + islands * KEPT_MOMENTS


def looks_per_s(slot_s: float, looks_a_slot: float) -> float:
    """Requests per second of one reader for an object that comes once a slot, the successful one included.
    `looks_a_slot`: LEARNERS_LOOKS or SYNCERS_LOOKS, for slots that are not short."""
    if slot_s >= SHORT_SLOT_S:
        return looks_a_slot / slot_s
    shortest_s, max_s = DENSE_BOUNDS_S
    return 1 / min(max_s, max(shortest_s, slot_s * DENSE)) + 1 / slot_s


def requests_per_day(fleet: Fleet, run: RunSettings) -> tuple[float, float]:
    """(class A, class B) of all islands and the syncer."""
    islands, slot_s = len(fleet.kept), fleet.served_slot_s
    snapshots = 1 / SNAPSHOT_EVERY
    saves = islands / (run.train.inner.save_every * fleet.schedule.fragments)
    class_a = (2 * islands + 3 + snapshots + saves) / slot_s + (islands + 1) / HEARTBEAT_EVERY_S
    watch_s = watch_every_s(slot_s)
    learners, syncers = looks_per_s(slot_s, LEARNERS_LOOKS), looks_per_s(slot_s, SYNCERS_LOOKS)
    learners_b = islands * (learners + 1 / slot_s + 1 / max(FENCE_EVERY_S, watch_s))
    syncer_b = (
        islands * (syncers + 1 / slot_s + 1 / watch_s)
        + 2 * fleet.kept[0].syncer.reads_back / slot_s
        + 2 / requests_every_s(slot_s)
    )
    return class_a * DAY_S, (learners_b + syncer_b) * DAY_S
