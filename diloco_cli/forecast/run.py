"""What a run would do: its report, from a history in virtual time; and a plan's run without building its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf

from diloco_cli.config.codec import replace
from diloco_cli.config.models import tensors_of
from diloco_cli.config.settings import Link
from diloco_cli.errors import UsageError
from diloco_cli.faults import Injection
from diloco_cli.forecast.fleet import Hardware, SimulatedFleet, StartUps
from diloco_cli.forecast.stand_ins import Condition, sizes_of
from diloco_cli.layout import make_layout
from diloco_cli.plan.candidates import crossing_of, download_per_gb, egress_per_gb, restart_s
from diloco_cli.plan.link import CODEC_BITS, machine_of, to_store, work_of
from diloco_cli.plan.plan import Plan, plan_digest
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.protocol.rules.capacity import SyncerMachine, merge_time
from diloco_cli.quantities import format_duration
from diloco_cli.virtual.world import World

GB = 1e9
HOUR_S, DAY_S = 3600.0, 86_400.0
ENDLESS = 10**17  # tokens
NOT_CHARGED = ("requests", "storage")  # of a bucket: the plan counts them, a history does not


@dataclass(frozen=True)
class Price:
    """Of one island, in the inventory's currency. `egress_per_gb`: of what it sends, `download_per_gb`: of what it
    reads; 0 to and from a bucket of its region."""

    per_h: float = 0.0
    egress_per_gb: float = 0.0
    download_per_gb: float = 0.0


@dataclass(frozen=True)
class IslandReport:
    """`goodput`: its merged tokens over what it would have processed undisturbed in that time. `stalled_s`: standing at
    the drift bound, waiting at tau, or paused; `down_s`: between a failure and the restart."""

    name: str
    region: str
    goodput: float
    tokens_processed: int
    tokens_merged: int
    merges: int
    offers_refused: int
    incarnations: int
    stalled_s: float
    stalled_percent: float
    down_s: float
    up_bytes: int
    down_bytes: int
    cost: float


@dataclass(frozen=True)
class RunForecast:
    """A whole run, or the first part of it. `plan`: its digest.

    `goodput` = tokens merged / (undisturbed tokens/s of all islands x time);
    `participation` as in `status`; `days_to_target` at the rate seen. Money in the inventory's currency: accelerators
    and egress, without the items in `not_charged`. `faults` as planned; of those that no constraint forbids the first
    `faults_injected` happened; `log` says when, and which had no effect."""

    name: str
    plan: str
    simulated_s: float
    finished: bool
    commits: int
    merges: int
    skips: int
    step: int
    tokens: int
    tokens_target: int
    tokens_per_s: float
    days_to_target: float | None
    goodput: float
    participation: float | None
    offers_applied: int
    offers_refused: int
    epochs: int
    up_bytes: int
    down_bytes: int
    cost: float
    cost_to_target: float | None
    not_charged: tuple[str, ...]
    islands: tuple[IslandReport, ...]
    faults: tuple[Injection, ...]
    faults_injected: int
    log: tuple[str, ...]
    warnings: tuple[str, ...]


def hardware_of_plan(plan: Plan) -> dict[str, Hardware]:
    """Failures and restarts as the inventory states them."""
    return {island.name: Hardware(island.mtbf_s, restart_s(island)) for island in plan.inventory.islands}


def prices_of_plan(plan: Plan) -> dict[str, Price]:
    """As the plan charges them (plan/flow.py)."""
    inventory = plan.inventory
    return {
        island.name: Price(island.price_per_h, egress_per_gb(island, inventory), download_per_gb(island, inventory))
        for island in inventory.islands
    }


def not_charged(plan: Plan) -> tuple[str, ...]:
    """The items of the plan's costs that a history does not charge; mirrors if a region has a bucket of its own."""
    chosen = {island.name for island in plan.islands}
    crossings = [crossing_of(i, plan.inventory) for i in plan.inventory.islands if i.name in chosen]
    return (*NOT_CHARGED, "mirrors") if any(crossings) else NOT_CHARGED


def run_of_plan(plan: Plan, run_id: str, software: str) -> RunFormat:
    """A run as `launch` would create it, with tensors that stand for the model's. Good for a history."""
    inventory = {island.name: island for island in plan.inventory.islands}
    islands = tuple(
        Island(
            name=island.name,
            region=island.region,
            batch_tokens=island.batch_tokens,
            local_steps=island.local_steps,
            tokens_per_s=island.tokens_per_s,
            step_s=island.step_s,
            link=to_store(inventory[island.name].link, plan.inventory.store.url),
        )
        for island in sorted(plan.islands, key=lambda i: i.name)
    )
    layout = make_layout(tensors_of(plan.model), plan.run.sync)
    made_at, digest = "2000-01-01T00:00:00.000Z", plan_digest(plan)
    return RunFormat(run_id, plan.run.name, made_at, plan.run, islands, layout, software, plan=digest)


def with_links(run: RunFormat, url: str) -> RunFormat:
    """An existing run, with what its islands' processes have of their links to this store."""
    return replace(run, islands=tuple(replace(i, link=to_store(i.link, url)) for i in run.islands))


def simulated(
    run: RunFormat,
    hardware: dict[str, Hardware],
    faults: Sequence[Injection],
    seed: int,
    within_s: float,
    machine: SyncerMachine,
    on_start: Callable[[SimulatedFleet], object] = lambda fleet: None,
    starts: StartUps = StartUps(),
) -> SimulatedFleet:
    """Simulate a run for `within_s` of virtual time, or to its end. `machine`: the syncer's. `on_start` gets the fleet,
    and can see how far it is. `starts`: how long units' processes take to start."""
    mean_fragment = run.layout.num_parameters / run.num_fragments
    work = work_of(mean_fragment, len(run.islands), run.settings.sync)
    fleet = SimulatedFleet(
        run=run,
        sizes=sizes_of(run, CODEC_BITS),
        hardware=hardware,
        faults=tuple(faults),
        seed=seed,
        merge_s=merge_time(work, machine).processor_s,
        latency_s=machine.call_s,
        syncer_link=Link(machine.up_bps, machine.down_bps),
        starts=starts,
        world=World(checks_uploads=not machine.reads_back, connections=machine.connections),
    )
    on_start(fleet)
    fleet.run_for(within_s)
    return fleet


WARM_ROUNDS = 4  # until a run has its pace
MOST_BEFOREHAND = 5_000  # before a storm: some 10 s


@dataclass(frozen=True)
class SimulatedSpan:
    """What of a run is played to confirm its plan. `warm_rounds`: until it has its pace; `least_slots`: over which
    merges are counted; `saving_offers`: from one save of the moments to the next, at least a round; `most_offers`: that
    are waited for."""

    warm_rounds: float
    least_slots: int
    saving_offers: int
    most_offers: int


LONG, BRIEF = SimulatedSpan(WARM_ROUNDS, 72, 1_500, 20_000), SimulatedSpan(2.75, 48, 0, 2_200)


@dataclass(frozen=True)
class Confirmed:
    """What a plan's own syncer and learners merge in virtual time, without failures and once the first rounds are over,
    beside what the plan says of the same. `off_percent`: by how much the plan says more."""

    tokens_per_s: float
    planned_tokens_per_s: float
    off_percent: float
    simulated_s: float


def offers_to_confirm(plan: Plan, span: SimulatedSpan = LONG) -> float:
    """That the islands make meanwhile: what takes the time."""
    warm_s, counted_s, _ = _times_s(plan, span)
    return len(plan.islands) * (warm_s + counted_s) / _slot_s(plan)


def _slot_s(plan: Plan) -> float:
    return max(plan.schedule.slot_s, plan.syncer.fastest_slot_s)


def _times_s(plan: Plan, span: SimulatedSpan) -> tuple[float, float, int]:
    """Until merges are counted, and for how long; the rounds from one save of the moments to the next, 0: no link is
    known that they would fill."""
    slot_s, slowest_s = _slot_s(plan), max(island.step_s for island in plan.islands)
    round_s, saved = plan.schedule.fragments * slot_s, 0
    if any(island.up_mbps_available for island in plan.islands):
        rounds = int(span.saving_offers / (2 * len(plan.islands) * plan.schedule.fragments))
        saved = min(plan.run.train.inner.save_every, max(1, rounds))
    warm_s = max(span.warm_rounds * round_s, 3 * slowest_s, saved * round_s)
    counted_s = max(span.least_slots * slot_s, min(round_s, 20 * slowest_s), 4 * slowest_s)
    if saved:
        counted_s = max(1, ceil(counted_s / (saved * round_s))) * saved * round_s
    return warm_s, counted_s, saved


def confirmed(
    plan: Plan,
    on_start: Callable[[SimulatedFleet, float], object] = lambda fleet, for_s: None,
    span: SimulatedSpan = LONG,
) -> Confirmed:
    """Raises UsageError for more islands and fragments than `span` waits for."""
    offers = offers_to_confirm(plan, span)
    if offers > span.most_offers:
        raise UsageError(
            f"to confirm this plan takes {offers:,.0f} simulated offers, more than {span.most_offers:,}",
            hint="diloco plan --fast; or a part of it: diloco simulate run RUN --for '1 h'",
        )
    (warm_s, counted_s, saved), inner = _times_s(plan, span), plan.run.train.inner
    often = replace(inner, save_every=saved or inner.save_every)
    endless = replace(plan.run, train=replace(plan.run.train, tokens=ENDLESS, inner=often))
    made, before = run_of_plan(replace(plan, run=endless), "confirmed", ""), list[int]()

    def watch(fleet: SimulatedFleet) -> None:
        for condition in fleet.conditions.values():
            sizes = condition.sizes
            condition.sizes = replace(sizes, moments=sizes.moments * often.save_every / inner.save_every)
        on_start(fleet, warm_s + counted_s)
        fleet.world.call_at(warm_s, lambda: before.append(fleet.state.tokens(made.layout)))

    fleet = simulated(made, {}, (), 0, warm_s + counted_s, machine_of(plan.inventory.store), watch)
    rate = (fleet.state.tokens(made.layout) - before[0]) / counted_s
    planned = plan.prediction.waterfall[-2].tokens_per_s
    return Confirmed(rate, planned, 100 * (planned / rate - 1) if rate else inf, fleet.world.now_s)


def report(
    fleet: SimulatedFleet, prices: dict[str, Price], without: tuple[str, ...] = (), warnings: tuple[str, ...] = ()
) -> RunForecast:
    """The report of a history; `without`: items not charged; `warnings`: those from before the simulation."""
    run, state, seconds = fleet.run, fleet.state, fleet.world.now_s
    tokens, target = state.tokens(run.layout), run.settings.train.tokens
    rate = tokens / seconds
    islands = tuple(
        _island_report(condition, state, run, prices.get(name, Price()), seconds)
        for name, condition in sorted(fleet.conditions.items())
    )
    cost = sum(island.cost for island in islands)
    return RunForecast(
        name=run.name,
        plan=run.plan,
        simulated_s=seconds,
        finished=state.phase == RunPhase.FINISHED,
        commits=state.n + 1,
        merges=state.merges,
        skips=state.metrics.skips,
        step=state.slot,
        tokens=tokens,
        tokens_target=target,
        tokens_per_s=rate,
        days_to_target=target / rate / DAY_S if rate else None,
        goodput=rate / sum(island.batch_tokens / island.step_s for island in run.islands),
        participation=state.participation,
        offers_applied=state.metrics.offers_applied,
        offers_refused=state.metrics.offers_refused,
        epochs=state.epoch,
        up_bytes=sum(island.up_bytes for island in islands),
        down_bytes=sum(island.down_bytes for island in islands),
        cost=cost,
        cost_to_target=cost * target / tokens if tokens else None,
        not_charged=without,
        islands=islands,
        faults=fleet.faults,
        faults_injected=fleet.injected,
        log=tuple(fleet.log),
        warnings=(*warnings, *_fault_warnings(fleet)),
    )


def _fault_warnings(fleet: SimulatedFleet) -> Iterator[str]:
    """Warnings about faults that did not happen or had no effect, so that they are not taken for survived faults."""
    planned = [fault for fault in fleet.faults if not fault.skipped]
    missed = planned[fleet.injected :]
    if missed:
        end, how = (
            format_duration(fleet.world.now_s),
            "run" if fleet.state.phase == RunPhase.FINISHED else "simulated time",
        )
        yield (
            f"{fleet.injected} of {len(planned)} planned faults happened: the {how} ended after {end}, and the next, "
            f"{missed[0].kind} {', '.join(missed[0].targets)}, was due at {format_duration(missed[0].at_s)}"
        )
    if fleet.faults and not planned:
        yield f"0 of {len(fleet.faults)} faults happened: the scenario's constraints forbid them all"
    if fleet.without_effect:
        more = len(fleet.without_effect) - 1
        yield f"without effect: {fleet.without_effect[0]}" + (f"; and {more} more" if more else "")
    for name, condition in sorted(fleet.conditions.items()):
        if condition.corrupt or condition.poison:
            yield f"without effect: a corrupt or poison of {name}, which sent no delta after it"


def _island_report(condition: Condition, state: RunState, run: RunFormat, price: Price, seconds: float) -> IslandReport:
    island, known = condition.island, state.learner(condition.island.name)
    merged = known.token_parameters // run.layout.num_parameters
    return IslandReport(
        name=island.name,
        region=island.region,
        goodput=merged / (island.batch_tokens / island.step_s * seconds),
        tokens_processed=condition.tokens,
        tokens_merged=merged,
        merges=known.merges,
        offers_refused=known.refused,
        incarnations=condition.incarnations,
        stalled_s=condition.stalled_s,
        stalled_percent=100 * condition.stalled_s / seconds,
        down_s=condition.down_s,
        up_bytes=round(condition.up_bytes),
        down_bytes=round(condition.down_bytes),
        cost=price.per_h * seconds / HOUR_S
        + (price.egress_per_gb * condition.up_bytes + price.download_per_gb * condition.down_bytes) / GB,
    )


def goodput_under(
    run: RunFormat,
    faults: Sequence[Injection],
    seed: int,
    duration_s: float,
    machine: SyncerMachine,
    starts: StartUps = StartUps(),
) -> float | None:
    """Tokens merged per second from the first of these faults to `duration_s`, over those before it; None if that takes
    long to simulate."""
    slot_s = min(island.local_steps * island.step_s for island in run.islands) / run.num_fragments
    warm_s = WARM_ROUNDS * slot_s * run.num_fragments  # then as long again undisturbed, at least
    from_s, to_s = 2 * warm_s + min((fault.at_s for fault in faults), default=0.0), 2 * warm_s + duration_s
    if len(run.islands) * to_s / slot_s > MOST_BEFOREHAND:
        return None
    settings, tokens = run.settings, list[int]()
    endless = replace(run, settings=replace(settings, train=replace(settings.train, tokens=ENDLESS)))

    def watch(fleet: SimulatedFleet) -> None:
        for at_s in (warm_s, from_s):
            fleet.world.call_at(at_s, lambda: tokens.append(fleet.state.tokens(run.layout)))

    later = [replace(fault, at_s=fault.at_s + 2 * warm_s) for fault in faults]
    fleet = simulated(endless, {}, later, seed, to_s, machine, watch, starts)
    before = (tokens[1] - tokens[0]) / (from_s - warm_s)
    return (fleet.state.tokens(run.layout) - tokens[1]) / (to_s - from_s) / before if before else None
