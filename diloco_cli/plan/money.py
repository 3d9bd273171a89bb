"""The costs of a fleet: accelerators, egress, requests, storage.

Requests, counted from the protocol (M islands, slots of s seconds):

    class A (writes)  an island a slot: delta, offer; each 3 s a heartbeat; now and then its moments
                      the syncer a slot: state, weights, commit; each 3 s a heartbeat; every 64 commits a snapshot
    class B (reads)   an island a slot: its polls of the next commit, the new weights; at most each 5 s a fence
                      the syncer a slot: its polls of M mailboxes, M deltas, and state and weights where the store
                      does not check uploads; about once a slot M incarnations; each 2 s the log and requests

An object that comes once a slot is polled about the time at which it is due (protocol/rules/pacing.py).
"""

from __future__ import annotations

from math import inf

from diloco_cli.config.settings import RunSettings
from diloco_cli.formulas import formula
from diloco_cli.methods import OUTER_OPTIMIZERS
from diloco_cli.plan.flow import Fleet
from diloco_cli.plan.link import CODEC_BITS, HEARTBEAT_EVERY_S, moment_bytes
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Money
from diloco_cli.protocol.actors.collection import FLOORS_APART, KEPT_MOMENTS, LEAST_ROUNDS
from diloco_cli.protocol.rules.pacing import DENSE, DENSE_BOUNDS_S, SHORT_SLOT_S, requests_every_s, watch_every_s

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
    islands, slot_s, fragments = len(fleet.kept), fleet.served_slot_s, fleet.schedule.fragments
    days = run.train.tokens / fleet.tokens_per_s / DAY_S
    accelerators = sum(candidate.island.price_per_h for candidate in fleet.kept)
    egress_gb = egress_of_islands(islands, up_gb_per_day(fleet, run, model))
    egress = egress_price(up_gb_per_day(fleet, run, model), sum(candidate.egress_per_gb for candidate in fleet.kept))
    class_a, class_b = requests_per_day(fleet, run)
    requests = requests_price(class_a, class_b)
    growth = storage_gb_per_day(fleet, run, model)
    growing = min(days, retained_days(slot_s, fragments, run))
    storage = storage_price(growth, growing, days)
    slots = days * DAY_S / slot_s
    kept = objects_kept(islands, min(slots, growing * DAY_S / slot_s), fragments, run)
    mirrors_gb, mirrors = mirrors_per_day(fleet, model)
    total = all_money(days, accelerators, egress, mirrors, requests, storage)
    return Money(
        accelerators_per_h=accelerators,
        egress_per_day=egress,
        egress_gb_per_day=egress_gb,
        class_a_per_day=class_a,
        class_b_per_day=class_b,
        requests_per_day=requests,
        storage_gb_per_day=growth,
        storage_gb_at_end=stored_gb(growth, growing),
        storage_total=storage,
        objects_kept=kept,
        objects_at_end=kept + slots,
        per_h=money_per_h(total, days),
        total=total,
        per_billion_tokens=total / run.train.tokens * 1e9,
        mirrors_gb_per_day=mirrors_gb,
        mirrors_per_day=mirrors,
    )


@formula("money", "egress", "GB/day")
def egress_of_islands(islands: int, sent_by_an_island: float) -> float:
    return sent_by_an_island * islands


@formula("money", "price of egress", "/day")
def egress_price(sent_by_an_island: float, prices_of_islands: float) -> float:
    return sent_by_an_island * prices_of_islands


@formula("money", "requests", "/day")
def requests_price(class_a: float, class_b: float) -> float:
    return class_a * CLASS_A_PRICE + class_b * CLASS_B_PRICE


@formula("money", "storage at the end", "GB")
def stored_gb(storage_per_day: float, days_of_growth: float) -> float:
    return storage_per_day * days_of_growth


@formula("money", "storage in all")
def storage_price(storage_per_day: float, days_of_growth: float, days: float) -> float:
    growing = days_of_growth * days_of_growth / 2 + days_of_growth * (days - days_of_growth)
    return storage_per_day * growing * STORAGE_PRICE


@formula("money", "money in all")
def all_money(
    days: float, accelerators_per_h: float, egress: float, mirrors: float, requests: float, storage: float
) -> float:
    return days * (24 * accelerators_per_h + egress + mirrors + requests) + storage


@formula("money", "per hour", "/h")
def money_per_h(money_in_all: float, days: float) -> float:
    return money_in_all / days / 24


def up_gb_per_day(fleet: Fleet, run: RunSettings, model: ModelFacts) -> float:
    """GB a day that one island sends: its delta of every parameter once a round, its moments now and then."""
    return sent_gb_per_day(
        model.parameters, CODEC_BITS[fleet.sync.codec], moment_bytes(run.train.inner), fleet.served_round_s
    )


@formula("money", "sent by an island", "GB/day")
def sent_gb_per_day(parameters: int, delta_bits: float, moment_bytes: float, round_s: float) -> float:
    return parameters * (delta_bits / 8 + moment_bytes) / GB * DAY_S / round_s


def mirrors_per_day(fleet: Fleet, model: ModelFacts) -> tuple[float, float]:
    """GB between the home bucket and the buckets of regions, and their egress price.

    A round carries every fragment's new version once to each region with a bucket of its own, for any number of islands
    there, and every delta of such a region's islands once to the home bucket. Saved moments are not copied. Records are
    small beside both.
    """
    crossings = [kept.crossing for kept in fleet.kept if kept.crossing is not None]
    if not crossings:
        return 0.0, 0.0
    version = versions_gb_per_day(model.parameters, CODEC_BITS[fleet.sync.weights_codec], fleet.served_round_s)
    delta = deltas_gb_per_day(model.parameters, CODEC_BITS[fleet.sync.codec], fleet.served_round_s)
    home_per_gb = {crossing.region: crossing.home_per_gb for crossing in crossings}
    prices = sum(crossing.per_gb for crossing in crossings)
    gigabytes = between_buckets(len(home_per_gb), version, len(crossings), delta)
    return gigabytes, egress_of_mirrors(version, sum(home_per_gb.values()), delta, prices)


@formula("money", "versions to a region", "GB/day")
def versions_gb_per_day(parameters: int, bits: float, round_s: float) -> float:
    return parameters * bits / 8 / GB * DAY_S / round_s


deltas_gb_per_day = versions_gb_per_day.named("deltas of an island")


@formula("money", "between buckets", "GB/day")
def between_buckets(regions: int, versions: float, islands: int, deltas: float) -> float:
    return regions * versions + islands * deltas


@formula("money", "egress of mirrors", "/day")
def egress_of_mirrors(versions: float, home_prices: float, deltas: float, regions_prices: float) -> float:
    return versions * home_prices + deltas * regions_prices


def storage_gb_per_day(fleet: Fleet, run: RunSettings, model: ModelFacts) -> float:
    """A round adds a new state and weights of every parameter, a delta of each island, and now and then moments."""
    up_bits, down_bits = CODEC_BITS[fleet.sync.codec], CODEC_BITS[fleet.sync.weights_codec]
    saved = moment_bytes(run.train.inner)
    state_bytes, round_s = OUTER_OPTIMIZERS[run.outer.name].state_bytes, fleet.served_round_s
    return written_gb_per_day(model.parameters, state_bytes, down_bits, len(fleet.kept), up_bits, saved, round_s)


@formula("money", "storage", "GB/day")
def written_gb_per_day(
    parameters: int,
    state_bytes: int,
    weights_bits: float,
    islands: int,
    delta_bits: float,
    moment_bytes: float,
    round_s: float,
) -> float:
    per_parameter = state_bytes + weights_bits / 8 + islands * (delta_bits / 8 + moment_bytes)
    return parameters * per_parameter / GB * DAY_S / round_s


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
    return kept_objects(commits, islands, fragments, run.sync.staleness_rounds)


@formula("money", "objects kept")
def kept_objects(retained_commits: float, islands: int, fragments: int, staleness_rounds: int) -> float:
    versions = fragments * (1 + staleness_rounds + 2)
    return retained_commits * (2 * islands + 2) + versions + islands * KEPT_MOMENTS


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
    learners, syncers = looks_per_s(slot_s, LEARNERS_LOOKS), looks_per_s(slot_s, SYNCERS_LOOKS)
    reads_back = fleet.kept[0].syncer.reads_back
    return (
        writes_per_day(islands, run.train.inner.save_every, fleet.schedule.fragments, slot_s),
        reads_per_day(islands, learners, syncers, reads_back, watch_every_s(slot_s), requests_every_s(slot_s), slot_s),
    )


@formula("money", "class A requests", "/day")
def writes_per_day(islands: int, save_every: int, fragments: int, slot_s: float) -> float:
    saves = islands / (save_every * fragments)
    a_slot = 2 * islands + 3 + 1 / SNAPSHOT_EVERY + saves
    return (a_slot / slot_s + (islands + 1) / HEARTBEAT_EVERY_S) * DAY_S


@formula("money", "class B requests", "/day")
def reads_per_day(
    islands: int,
    looks_for_commits: float,
    looks_into_a_mailbox: float,
    reads_back: bool,
    watch_s: float,
    requests_s: float,
    slot_s: float,
) -> float:
    learners = islands * (looks_for_commits + 1 / slot_s + 1 / max(FENCE_EVERY_S, watch_s))
    syncer = islands * (looks_into_a_mailbox + 1 / slot_s + 1 / watch_s) + 2 * reads_back / slot_s + 2 / requests_s
    return (learners + syncer) * DAY_S
