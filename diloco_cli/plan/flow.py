"""How much a fleet trains under given settings: the one evaluation that search, plan and alternatives share.

The formulas below go from an island's own rate to its predicted one: what idle steps, the link and failures leave.
Where the syncer cannot hold the planned slots, rounds and slots are those that it serves (link.py).

While a quorum is missing nothing is merged, also after a skipped slot: learners step on up to the drift bound and then
stand still. Their steps until then are assumed to be merged later, because a learner's next offer of a fragment holds
all progress since its last adoption (the progress that an adoption by replacement drops is not subtracted).

The costs of a fleet: accelerators, egress, storage, requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log2, prod

from diloco_cli.config.models import FragmentSizes, ModelFacts
from diloco_cli.config.settings import IslandSettings, RunSettings, SyncSettings
from diloco_cli.formulas import formula
from diloco_cli.methods import CODECS, OUTER_OPTIMIZERS
from diloco_cli.plan.candidates import BACKWARD_SHARE, Candidate, availability_of
from diloco_cli.plan.link import (
    BESIDE_MOMENTS,
    CODEC_BITS,
    DOWN_CALLS,
    GUESSED_MACHINE,
    HEARTBEAT_EVERY_S,
    coming_s,
    kept_at_pace,
    moment_bytes,
    moments_share,
    sent_beside_moments,
    spent_a_slot,
    syncer_s,
    transfer_s,
    waiting_s,
)
from diloco_cli.plan.plan import Money, Schedule
from diloco_cli.protocol.actors.collection import FLOORS_APART, KEPT_MOMENTS, LEAST_ROUNDS
from diloco_cli.protocol.log.mending import LOOKS_EVERY_S, records_per_look
from diloco_cli.protocol.rules.capacity import SlotTime, SyncerMachine
from diloco_cli.protocol.rules.pacing import DENSE, DENSE_BOUNDS_S, SHORT_SLOT_S, requests_every_s, watch_every_s
from diloco_cli.protocol.rules.quorum import covering_slots, grace_seconds

GRADIENT_BITS = 16.0
MAX_TERMS = 2_000_000  # of the probabilities that enough other islands are present, summed island by island


CATCHING_UP = 0.6  # in virtual time .6, 1.4, 2.4, 5.4 and 10 rounds, with downlinks .5, .7, .8, .9 and .95 busy
MOST_COMING = 0.98  # of a downlink's time


@formula("island", "kept when it fails")
def share_of_work(mtbf_s: float, at_risk_s: float, catching_up_s: float) -> float:
    """That failures do not lose: each failure loses the work that was not merged yet, and what is trained until the new
    process has the newest versions."""
    return mtbf_s / (mtbf_s + at_risk_s + catching_up_s)


@formula("island", "catching up", "s")
def catching_up_s(downlink_busy: float, round_s: float) -> float:
    """Work that a new process loses: while it downloads the model, and what is new meanwhile, its offers are based on
    versions that are too old."""
    return CATCHING_UP * downlink_busy / (1 - downlink_busy) * round_s


def probability_at_least(quorum: int, availabilities: Sequence[float]) -> float:
    """Poisson-binomial: P(at least `quorum` islands are there), the islands failing independently."""
    if quorum <= 0:
        return 1.0
    few = [1.0] + [0.0] * (quorum - 1)  # few[k] = P(exactly k of those seen so far are there), k below the quorum
    for p in availabilities:
        shifted = [0.0, *few[:-1]]
        few = [stay * (1 - p) + come * p for stay, come in zip(few, shifted, strict=True)]
    return 1.0 - sum(few)


@formula("prediction", "P(quorum)", text="at least {quorum} of islands with {availabilities} (Poisson-binomial)")
def quorum_probability(quorum: int, availabilities: Sequence[float]) -> float:
    return probability_at_least(quorum, availabilities)


@formula("prediction", "P(all)")
def all_present_probability(availabilities: Sequence[float]) -> float:
    return prod(availabilities)


@dataclass(frozen=True)
class Waiting:
    """The cost of a missing quorum. `moving[i]`: the share of its own time in which island i need not stand still;
    `still`: the share of the time without a quorum in which learners stand still."""

    moving: tuple[float, ...]
    still: float = 0.0


def waiting(quorum: int, availabilities: Sequence[float], failures_per_s: Sequence[float], drift_s: float) -> Waiting:
    """A present island misses the quorum if fewer than K - 1 of the others are present; then it steps on for `drift_s`
    and stands still for the rest.

    Absences of the quorum are assumed to be exponential, P(missing) / rate long on average, where rate = the sum over
    islands of availability x failures per second x P(exactly K - 1 of the others are present).
    """
    missing = 0.0 if quorum == 1 else 1.0 - probability_at_least(quorum, availabilities)
    if missing <= 0:  # at K = 1 any present island is enough
        return Waiting((1.0,) * len(availabilities))
    same = {p: p for p in availabilities}
    if len(same) * len(availabilities) * quorum > MAX_TERMS:  # then a single island makes little difference
        same = dict.fromkeys(availabilities, sorted(availabilities)[len(availabilities) // 2])
    enough, without = {}, {}  # P(K - 1 of the others, or K of them), by an island's own availability
    for p in set(same.values()):
        others = list(availabilities)
        others.remove(p)
        enough[p], without[p] = probability_at_least(quorum - 1, others), probability_at_least(quorum, others)
    lost_per_s = sum(
        p * rate * (enough[same[p]] - without[same[p]]) for p, rate in zip(availabilities, failures_per_s, strict=True)
    )
    still = math.exp(-drift_s * max(0.0, lost_per_s) / missing)
    return Waiting(tuple(1.0 - (1.0 - enough[same[p]]) * still for p in availabilities), still)


def synchronous_tokens_per_s(
    islands: Sequence[IslandSettings], rates: Sequence[float], batch_tokens: int, model: ModelFacts
) -> float:
    """Data-parallel on the same islands: balanced batches, bf16 gradients in a ring all-reduce.

    A step is the compute plus the part of the all-reduce that the backward pass cannot hide; any absent island
    stops all of them. `batch_tokens` is the batch of all islands together. 2 (M - 1) / M of the gradients pass through
    every link, both ways; the slowest decides.
    """
    known = [bps for island in islands for bps in (island.link.up_bps, island.link.down_bps) if bps is not None]
    exchange_s = all_reduce_s(len(islands), model.parameters, min(known)) if len(islands) > 1 and known else 0.0
    together = all_present_probability([availability_of(island) for island in islands])
    return synchronous_rate(batch_tokens, synchronous_step_s(batch_tokens, sum(rates), exchange_s), together)


@formula("prediction", "synchronous", "tokens/s")
def synchronous_rate(batch_tokens: int, step_s: float, all_present: float) -> float:
    return batch_tokens / step_s * all_present


@formula("prediction", "synchronous step", "s")
def synchronous_step_s(batch_tokens: int, tokens_per_s: float, all_reduce_s: float) -> float:
    compute_s = batch_tokens / tokens_per_s
    return compute_s + max(0.0, all_reduce_s - BACKWARD_SHARE * compute_s)


@formula("prediction", "all-reduce", "s")
def all_reduce_s(islands: int, parameters: int, slowest_bps: float) -> float:
    return 2 * (islands - 1) / islands * parameters * GRADIENT_BITS / slowest_bps


@formula("island", "H_i", "steps")
def local_steps(round_s: float, step_s: float) -> int:
    """H_i = max(1, round(T / t_i)): every island ends its round when the fastest does."""
    return max(1, round(round_s / step_s))


def make_schedule(
    sync: SyncSettings,
    fragments: FragmentSizes,
    step_s: Sequence[float],
    transfer_s: Sequence[float],
    machine: SyncerMachine = GUESSED_MACHINE,
) -> Schedule:
    """`step_s` and `transfer_s` per island taking part.

    xi_slack = tau x slot - exchange and grace <= gamma x xi_slack, at most one slot (arXiv 2604.21428,
    adaptive grace window; through a bucket its inner step is one slot). `auto` adds one slot to the smallest
    overlap that hides the exchange: without it the slack, and so the grace window, would be close to 0.
    """
    round_s = round_of(sync.every, min(step_s))
    slot_s = slot_of(round_s, fragments.count)
    merging_s = syncer_s(fragments.largest, len(step_s), sync, machine)
    waiting_s = quorum_s(sync.quorum, step_s)
    exchange_s = slowest_exchange_s(max(transfer_s), waiting_s, merging_s)
    if sync.overlap == "auto":
        overlap = hiding_overlap(covering_slots(exchange_s, slot_s), fragments.count)
    else:
        overlap = sync.overlap
    slack_s = slack_of(overlap, slot_s, exchange_s)
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


@formula("schedule", "round T", "s")
def round_of(every: int, fastest_step_s: float) -> float:
    return every * fastest_step_s


@formula("schedule", "slot", "s")
def slot_of(round_s: float, fragments: int) -> float:
    return round_s / fragments


@formula("schedule", "exchange", "s")
def slowest_exchange_s(slowest_transfer_s: float, quorum_s: float, merging_s: float) -> float:
    return slowest_transfer_s + quorum_s + merging_s


@formula("schedule", "overlap", "slots")
def hiding_overlap(covering_the_exchange: int, fragments: int) -> int:
    """A fragment must be back before it is sent again."""
    return min(covering_the_exchange, max(1, fragments - 1))


@formula("schedule", "slack", "s")
def slack_of(overlap: int, slot_s: float, exchange_s: float) -> float:
    return overlap * slot_s - exchange_s


def fragment_offsets(every: int, num_fragments: int) -> tuple[int, ...]:
    """t_p: the step of a round, counted from 1 at the fastest island, after which fragment p is due."""
    return tuple(max(1, round((index + 1) * every / num_fragments)) for index in range(num_fragments))


def max_overlap(num_fragments: int) -> int:
    """A fragment must be back before it is sent again, one round of slots later."""
    return max(1, num_fragments - 1)


def quorum_s(quorum: int, step_s: Sequence[float]) -> float:
    """Offers appear at the ends of steps: the K-th may come one step of its island after the first."""
    return 0.0 if quorum == 1 else sorted(step_s)[quorum - 1]


MAX_IN_FLIGHT = 0.75  # of a round
OF_A_STEP = 0.75  # 0.4 to 1.1 in virtual time

# The cost of coarser exchanges in quality: guesses from published comparisons, used by the search alone.
FREE_STEPS = 50  # H up to which longer rounds cost nothing
PER_DOUBLING = 0.05  # H = 1000 against 50: perplexity +2.9 % (arXiv 2311.08105), about 5 % of the tokens a doubling
NO_WINDOW = 0.25  # K = 1 without a grace window merges single learners (arXiv 2604.21428: accuracy falls)
LEAST_QUALITY = 0.1
MAX_EVERY = 1000  # no longer round has been published


@dataclass(frozen=True, slots=True)
class Flow:
    """One island. Rates are tokens per second, each including what the ones before it cost."""

    local_steps: int
    transfer_s: float
    in_flight_s: float
    ideal: float
    after_idle: float
    after_link: float
    after_failures: float
    quality: float
    moving: float  # share of its time there in which no missing quorum makes it stand still


@dataclass(frozen=True)
class AtSyncer:
    """How long the mean fragment is at the syncer, its waiting included; the syncer's time for a slot, in slots."""

    seconds: float
    load: float


@dataclass(frozen=True)
class Fleet:
    """Islands that take part, fastest step first, under `sync`. `flows[i]` belongs to `kept[i]`. `syncer`: what a slot
    takes the syncer, at the least."""

    kept: tuple[Candidate, ...]
    sync: SyncSettings
    schedule: Schedule
    flows: tuple[Flow, ...]
    syncer: SlotTime
    at_syncer: AtSyncer
    tokens_per_s: float = field(init=False)
    effective_tokens_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        total = sum(flow.after_failures for flow in self.flows)
        valued = sum(flow.after_failures * flow.quality for flow in self.flows)
        object.__setattr__(self, "tokens_per_s", total)
        object.__setattr__(self, "effective_tokens_per_s", valued)

    @property
    def syncer_load(self) -> float:
        """Beyond 1 merges come so many times as slowly as planned."""
        return self.syncer.seconds / self.schedule.slot_s

    @property
    def has_room(self) -> bool:
        """Whether each rank's memory holds all that may be on its way at once."""
        return all(self.schedule.overlap <= candidate.fit.most_overlap for candidate in self.kept)

    @property
    def tokens_a_round(self) -> int:
        return sum(c.batch_tokens * flow.local_steps for c, flow in zip(self.kept, self.flows, strict=True))

    @property
    def served_slot_s(self) -> float:
        """From merge to merge: as planned, or as the syncer can."""
        return max(self.schedule.slot_s, self.syncer.seconds)

    @property
    def served_round_s(self) -> float:
        return self.served_slot_s * self.schedule.fragments


def run_fleet(kept: Sequence[Candidate], sync: SyncSettings, model: ModelFacts) -> Fleet:
    """Evaluate these islands (fastest step first) under these settings."""
    fragments = model.fragments(sync.fragments)
    transfers = [transfer_s(c.link, c.rtt_s, fragments.largest, sync.codec, sync.weights_codec) for c in kept]
    machine = kept[0].syncer
    schedule = make_schedule(sync, fragments, [c.step_s for c in kept], transfers, machine)
    spent = spent_a_slot(model.parameters, fragments.count, len(kept), sync, machine, schedule.slot_s)
    for_its_slot_s = waiting_s(schedule.slot_s, spent.seconds)
    mean_merging_s = syncer_s(fragments.mean, len(kept), sync, machine)
    at_syncer = AtSyncer(for_its_slot_s + mean_merging_s, spent.seconds / schedule.slot_s)
    availabilities = [c.availability for c in kept]
    rates = [0.0 if c.island.mtbf_s is None else 1.0 / c.island.mtbf_s for c in kept]
    moving = waiting(sync.quorum, availabilities, rates, drift_s(sync, schedule)).moving
    flows = tuple(
        flow_of(c, transfer, schedule, sync, at_syncer, fragments.mean, len(kept), share)
        for c, transfer, share in zip(kept, transfers, moving, strict=True)
    )
    return Fleet(tuple(kept), sync, schedule, flows, spent, at_syncer)


def drift_s(sync: SyncSettings, schedule: Schedule) -> float:
    """How long learners step on while nothing is merged: up to the drift bound."""
    return sync.drift_rounds * schedule.round_s


def flow_of(
    candidate: Candidate,
    transfer: float,
    schedule: Schedule,
    sync: SyncSettings,
    at_syncer: AtSyncer,
    mean: float,
    num_islands: int,
    moving: float,
) -> Flow:
    step_s = candidate.step_s
    late = max(1.0, at_syncer.load)
    served_s = late * schedule.slot_s
    hidden_s = schedule.overlap * served_s
    steps = local_steps(schedule.round_s, step_s)
    exchange_s = transfer + schedule.quorum_s + schedule.merge_s
    mean_s = transfer_s(candidate.link, candidate.rtt_s, mean, sync.codec, sync.weights_codec)
    up_s, moments_s = (candidate.up_s(mean * bits) for bits in (CODEC_BITS[sync.codec], 8 * candidate.moment_bytes))
    up_share = up_s / max(served_s, step_s / schedule.fragments)
    saving = moments_share(moments_s / (steps * step_s / schedule.fragments), up_share)
    mean_s += saving * (1 / BESIDE_MOMENTS - 1) * up_s
    in_flight_s = in_flight(mean_s, schedule.quorum_s, at_syncer.seconds)
    dropped = 0.0 if sync.keeps_progress else dropped_share(in_flight_s, step_s, late * schedule.round_s)
    after_idle = rate_after_idle(candidate.tokens_per_s, steps, step_s, schedule.round_s)
    busy = busy_share(served_s, hidden_s, exchange_s)
    sent = 1.0 if num_islands == 1 or sync.keeps_progress else sent_beside_moments(saving, up_share)
    after_link = rate_after_link(after_idle, busy, kept_in_flight(dropped), kept_at_pace(sync, late), sent)
    mtbf_s, kept = candidate.island.mtbf_s, 1.0
    if mtbf_s is not None:
        down_s = coming_s(mean * CODEC_BITS[sync.weights_codec], DOWN_CALLS, candidate.link)
        down_share = min(MOST_COMING, down_s / max(served_s, step_s / schedule.fragments))
        at_risk_s = late * schedule.round_s / 2 + hidden_s
        kept = share_of_work(mtbf_s, at_risk_s, catching_up_s(down_share, late * schedule.round_s))
    return Flow(
        local_steps=steps,
        transfer_s=transfer,
        in_flight_s=in_flight_s,
        ideal=candidate.tokens_per_s,
        after_idle=after_idle,
        after_link=after_link,
        after_failures=rate_after_failures(after_link, candidate.availability, kept, moving),
        quality=quality_share(sync, steps * late, schedule.grace_s, num_islands) / late,
        moving=moving,
    )


@formula("island", "in flight", "s")
def in_flight(transfer_of_the_mean_fragment_s: float, quorum_s: float, at_the_syncer_s: float) -> float:
    return transfer_of_the_mean_fragment_s + quorum_s + at_the_syncer_s


@formula("island", "dropped")
def dropped_share(in_flight_s: float, step_s: float, round_s: float) -> float:
    """Of a round, under replacement: what is learned in flight; offers and adoptions come at the ends of steps, so that
    it is a step at the least."""
    return max(step_s, in_flight_s + OF_A_STEP * step_s) / round_s


@formula("island", "after idle", "tokens/s")
def rate_after_idle(tokens_per_s: float, local_steps: int, step_s: float, round_s: float) -> float:
    return tokens_per_s * min(1.0, local_steps * step_s / round_s)


@formula("island", "after link", "tokens/s")
def rate_after_link(
    after_idle: float, busy: float, not_in_flight: float, merged_at_the_syncers_pace: float, sent_beside_moments: float
) -> float:
    return after_idle * busy * not_in_flight * merged_at_the_syncers_pace * sent_beside_moments


@formula("island", "predicted", "tokens/s")
def rate_after_failures(after_link: float, availability: float, kept: float, moving: float) -> float:
    return after_link * availability * kept * moving


@formula("island", "busy")
def busy_share(slot_s: float, hidden_s: float, exchange_s: float) -> float:
    """Compute utilisation: once a slot a learner waits for the part of the exchange that the overlap does not hide
    (in fact it adopts late instead). Gives the bandwidths of arXiv 2604.21428, table 13."""
    return slot_s / (slot_s + max(0.0, exchange_s - hidden_s))


@formula("island", "not in flight")
def kept_in_flight(share: float) -> float:
    """The share of a round that is left if the progress during `share` of it is dropped; beyond 3/4 of a round, where
    exchanges begin to overtake each other, it falls like 1 / share."""
    return 1 - share if share <= MAX_IN_FLIGHT else (1 - MAX_IN_FLIGHT) * MAX_IN_FLIGHT / share


def quality_share(sync: SyncSettings, local_steps: float, grace_s: float, num_islands: int) -> float:
    """The worth of a token in (0, 1], relative to short rounds in bf16. Without this factor the search would always
    choose the coarsest codec and the longest round; predictions do not include it. `local_steps`: between two merges of
    a fragment; more than planned if the syncer cannot keep up. (Then the search takes tokens to be worth less still:
    windows, overlap and memory are planned for slots that the syncer does not hold.)"""
    doublings = max(0.0, log2(local_steps / FREE_STEPS))
    cost = PER_DOUBLING * doublings + CODECS[sync.codec].quality_cost + CODECS[sync.weights_codec].quality_cost
    if num_islands > 1 and sync.quorum < num_islands and grace_s <= 0:
        cost += NO_WINDOW * (num_islands - sync.quorum) / (num_islands - 1)
    return max(LEAST_QUALITY, 1.0 - cost)


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
    moments = moment_bytes(run.train.inner, model)
    sent_gb = up_gb_per_day(model, CODEC_BITS[fleet.sync.codec], moments, fleet.served_round_s)
    egress = sent_gb * sum(candidate.egress_per_gb for candidate in fleet.kept)
    class_a, class_b = requests_per_day(fleet, run)
    requests = class_a * CLASS_A_PRICE + class_b * CLASS_B_PRICE
    growth = storage_gb_per_day(fleet, run, model)
    growing = min(days, retained_commits(slot_s, fragments, run) * slot_s / DAY_S)
    storage = storage_price(growth, growing, days)
    slots = days * DAY_S / slot_s
    kept = objects_kept(min(slots, growing * DAY_S / slot_s), islands, fragments, run.sync.staleness_rounds)
    mirrors_gb, mirrors = mirrors_per_day(fleet, model)
    prices = [candidate.download_per_gb for candidate in fleet.kept if candidate.download_per_gb]
    version_gb = up_gb_per_day(model, CODEC_BITS[fleet.sync.weights_codec], 0.0, fleet.served_round_s)
    downloads = egress_of_downloads(version_gb, sum(prices))
    total = all_money(days, accelerators, egress, downloads, mirrors, requests, storage)
    return Money(
        accelerators_per_h=accelerators,
        egress_per_day=egress,
        egress_gb_per_day=islands * sent_gb,
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
        downloads_gb_per_day=len(prices) * version_gb,
        downloads_per_day=downloads,
    )


@formula("money", "storage in all")
def storage_price(storage_per_day: float, days_of_growth: float, days: float) -> float:
    growing = days_of_growth * days_of_growth / 2 + days_of_growth * (days - days_of_growth)
    return storage_per_day * growing * STORAGE_PRICE


@formula("money", "money in all")
def all_money(
    days: float,
    accelerators_per_h: float,
    egress: float,
    downloads: float,
    mirrors: float,
    requests: float,
    storage: float,
) -> float:
    return days * (24 * accelerators_per_h + egress + downloads + mirrors + requests) + storage


@formula("money", "egress of downloads", "/day")
def egress_of_downloads(versions_gb: float, prices: float) -> float:
    """Each island of another region reads each fragment's new version once a round."""
    return versions_gb * prices


@formula("money", "sent by an island", "GB/day")
def up_gb_per_day(model: ModelFacts, delta_bits: float, moment_bytes: float, round_s: float) -> float:
    """Its delta of every parameter once a round, its moments now and then."""
    return model.parameters * (delta_bits / 8 + moment_bytes) / GB * DAY_S / round_s


def mirrors_per_day(fleet: Fleet, model: ModelFacts) -> tuple[float, float]:
    """GB between the home bucket and the buckets of regions, and their egress price.

    A round carries every fragment's new version once to each region with a bucket of its own, for any number of islands
    there, and every delta of such a region's islands once to the home bucket. Saved moments are not copied. Records are
    small beside both.
    """
    crossings = [kept.crossing for kept in fleet.kept if kept.crossing is not None]
    if not crossings:
        return 0.0, 0.0
    a_bit = model.parameters / 8 / GB * DAY_S / fleet.served_round_s
    version, delta = a_bit * CODEC_BITS[fleet.sync.weights_codec], a_bit * CODEC_BITS[fleet.sync.codec]
    home_per_gb = {crossing.region: crossing.home_per_gb for crossing in crossings}
    prices = sum(crossing.per_gb for crossing in crossings)
    gigabytes = len(home_per_gb) * version + len(crossings) * delta
    return gigabytes, egress_of_mirrors(version, sum(home_per_gb.values()), delta, prices)


@formula("money", "egress of mirrors", "/day")
def egress_of_mirrors(versions: float, home_prices: float, deltas: float, regions_prices: float) -> float:
    return versions * home_prices + deltas * regions_prices


def storage_gb_per_day(fleet: Fleet, run: RunSettings, model: ModelFacts) -> float:
    up_bits, down_bits = CODEC_BITS[fleet.sync.codec], CODEC_BITS[fleet.sync.weights_codec]
    state_bytes, moments = OUTER_OPTIMIZERS[run.outer.name].state_bytes, moment_bytes(run.train.inner, model)
    return written_gb_per_day(model, state_bytes, down_bits, len(fleet.kept), up_bits, moments, fleet.served_round_s)


@formula("money", "storage", "GB/day")
def written_gb_per_day(
    model: ModelFacts,
    state_bytes: int,
    weights_bits: float,
    islands: int,
    delta_bits: float,
    moment_bytes: float,
    round_s: float,
) -> float:
    """A round adds a new state and weights of every parameter, a delta of each island, and now and then moments."""
    per_parameter = state_bytes + weights_bits / 8 + islands * (delta_bits / 8 + moment_bytes)
    return model.parameters * per_parameter / GB * DAY_S / round_s


def retained_commits(slot_s: float, fragments: int, run: RunSettings) -> float:
    """So many commits at most have their objects in the bucket (protocol/actors/collection.py): those that are kept, a
    quarter more before the floor moves, and those of the readers' grace."""
    if run.retention.rounds == "all":
        return inf
    kept = max(LEAST_ROUNDS, run.retention.rounds) * fragments
    return kept + max(FLOORS_APART, kept // 4) + run.retention.grace_s / slot_s


@formula("money", "objects kept")
def objects_kept(retained_commits: float, islands: int, fragments: int, staleness_rounds: int) -> float:
    """The objects of so many commits beside the log's records: deltas and offers, states and weights; each fragment's
    current state, its weights that a delta may still be based on, and learners' newest moments."""
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
        reads_per_day(
            islands,
            learners,
            syncers,
            reads_back,
            watch_every_s(slot_s),
            requests_every_s(slot_s),
            records_per_look(slot_s) / LOOKS_EVERY_S,
            slot_s,
        ),
    )


@formula("money", "class A requests", "/day")
def writes_per_day(islands: int, save_every: int, fragments: int, slot_s: float) -> float:
    """A slot: of an island delta and offer, now and then its moments; of the syncer state, weights, commit and now and
    then a snapshot. Beside it, heartbeats."""
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
    records_per_s: float,
    slot_s: float,
) -> float:
    """An island's looks for the next commit, the new weights, now and then a fence; of the syncer its looks into the
    mailboxes, the deltas, what it reads back, incarnations, the log and requests."""
    learners = islands * (looks_for_commits + 1 / slot_s + 1 / max(FENCE_EVERY_S, watch_s) + 1 / LOOKS_EVERY_S)
    syncer = islands * (looks_into_a_mailbox + 1 / slot_s + 1 / watch_s) + 2 * reads_back / slot_s + 2 / requests_s
    return (learners + syncer + records_per_s) * DAY_S
