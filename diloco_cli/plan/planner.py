"""`make_plan`: the whole of planning as one pure function of (run, inventory, model).
`explain`: every number of a plan with its formula and its inputs; the plan's own functions compute each once more, and
tell it (formulas.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_cli.config.codec import replace
from diloco_cli.config.models import ModelFacts
from diloco_cli.config.settings import Inventory, OuterSettings, RunSettings
from diloco_cli.errors import InfeasibleError, UsageError, suggestion
from diloco_cli.formulas import Explanation, formula, told
from diloco_cli.methods import OUTER_OPTIMIZERS, fitting_outer
from diloco_cli.plan.candidates import (
    Candidate,
    candidate_of,
    candidates,
    not_launched,
    num_devices,
)
from diloco_cli.plan.flow import (
    DAY_S,
    Fleet,
    Flow,
    all_present_probability,
    costs,
    flow_of,
    fragment_offsets,
    probability_at_least,
    quorum_probability,
    run_fleet,
    synchronous_tokens_per_s,
    up_gb_per_day,
)
from diloco_cli.plan.islands import form_islands
from diloco_cli.plan.link import (
    CODEC_BITS,
    MBPS,
    MERGE_PARAMETERS_PER_S,
    downlink_mbps,
    moment_bytes,
    traffic_mbps,
    transfer_s,
    uplink_mbps,
    work_of,
)
from diloco_cli.plan.memory import (
    host_bytes,
    host_memory_gb,
    how_on,
    memory_parts,
    sum_gb,
    syncer_memory_gb,
    with_overlap,
)
from diloco_cli.plan.plan import Excluded, Goal, Money, Plan, PlannedIsland, Prediction, Setting, Stage, SyncerNeeds
from diloco_cli.plan.quality import measured
from diloco_cli.plan.remarks import (
    alternatives,
    assumptions,
    excluded,
    horizon_warnings,
    island_warnings,
    round_warnings,
    schedule_warnings,
    snapshot_warnings,
    syncer_warnings,
    tight,
)
from diloco_cli.plan.search import MAX_WORK, SEARCHED, Search, loss_of, score, search, space_of, with_sync
from diloco_cli.protocol.rules.capacity import most_learners
from diloco_cli.quantities import format_count, format_duration, some_of

AGAIN_WORK = 2_000  # evaluations of one island when a plan is made again with one thing changed


def make_plan(
    run: RunSettings,
    inventory: Inventory,
    model: ModelFacts,
    goal: Goal | None = None,
    origins: Mapping[str, str] | None = None,
) -> Plan:
    """The plan. `origins` names the place of every key that the user gave: other settings are searched; None: the
    settings are taken as they are, and only the islands are chosen.

    Raises InfeasibleError if no island remains, the quorum is out of reach, or nothing meets the goal's limits.
    """
    goal = goal or Goal()
    free = frozenset() if origins is None else frozenset(SEARCHED) - pins_of(origins).keys()
    forming = form_islands(run, inventory, model)
    inventory = _asked_for(goal, forming.inventory)
    plan = _plan(run, inventory, model, goal, free, unused=forming.excluded)
    chosen = frozenset(island.name for island in plan.islands)

    def again(other: RunSettings) -> Plan:
        """With the settings pinned: only the islands may change."""
        return _plan(other, inventory, model, goal, frozenset(), AGAIN_WORK, chosen)

    outer, fitting = _fitting_outer(plan)
    return replace(
        plan,
        run=replace(plan.run, outer=outer),
        settings=_settings(run, plan.run, free, origins) + fitting,
        formed=forming.formed,
        alternatives=alternatives(plan, again),
    )


def outline(
    run: RunSettings,
    inventory: Inventory,
    model: ModelFacts,
    goal: Goal,
    origins: Mapping[str, str],
) -> Plan:
    """A plan after a short search that begins with all islands, without reasons and alternatives: to compare many."""
    formed, free = form_islands(run, inventory, model).inventory, frozenset(SEARCHED) - pins_of(origins).keys()
    formed = _asked_for(goal, formed)
    return _plan(run, formed, model, goal, free, AGAIN_WORK, frozenset(island.name for island in formed.islands))


def rivals(plan: Plan, origins: Mapping[str, str], count: int) -> list[Plan]:
    """Plans that a short search from this one takes for nearly as good: of settings that nobody gave, of islands."""
    run, inventory, model, goal = plan.run, plan.inventory, plan.model, plan.goal
    free = frozenset(SEARCHED) - pins_of(origins).keys()
    attempt = Search(run, inventory, model, space_of(run.sync, free, model), goal, AGAIN_WORK)
    attempt.search(frozenset(island.name for island in plan.islands))
    found = []
    for fleet in attempt.rivals(count + 1):
        other = assemble(fleet, (), replace(run, sync=fleet.sync), inventory, model, goal)
        if (other.islands, other.schedule) != (plan.islands, plan.schedule):
            found.append(other)
    return found[:count]


def _asked_for(goal: Goal, inventory: Inventory) -> Inventory:
    """Without the islands that the goal leaves out. Raises UsageError for names that are none, or for both at once."""
    names = [island.name for island in inventory.islands]
    for name in (*goal.with_islands, *goal.without_islands):
        if name not in names:
            raise UsageError(
                f"no island '{name}' to plan with or without{suggestion(name, names)}",
                hint=f"the islands are {some_of(names)}",
            )
    if both := [name for name in goal.with_islands if name in goal.without_islands]:
        raise UsageError(f"a plan is with {both[0]} or without it", hint="leave out --with, or --without")
    rest = tuple(island for island in inventory.islands if island.name not in goal.without_islands)
    if not rest and goal.without_islands:
        raise UsageError("no island is left to plan with", hint=f"the islands are {some_of(names)}: keep one")
    return replace(inventory, islands=rest)


def _plan(
    run: RunSettings,
    inventory: Inventory,
    model: ModelFacts,
    goal: Goal,
    free: frozenset[str],
    max_work: int = MAX_WORK,
    start: frozenset[str] = frozenset(),
    unused: Sequence[Excluded] = (),
) -> Plan:
    """`start`: this plan is made again with one thing changed; reasons for left-out islands are not needed."""
    _require_facts(run, inventory, goal)
    found = search(run, inventory, model, free, goal, max_work, start)
    found = found or _fastest_within(run, inventory, model, free, goal)
    if found is None:
        raise _infeasible(run, inventory, model, free, goal, unused)
    chosen = replace(run, sync=found.sync)
    missing = [] if start else excluded(candidates(chosen, inventory, model), found, run, model, goal)
    plan = assemble(found, missing, chosen, inventory, model, goal, unused)
    return replace(plan, assumptions=assumptions(run, found.kept, model, inventory, bool(free)))


def _fastest_within(
    run: RunSettings, inventory: Inventory, model: ModelFacts, free: frozenset[str], goal: Goal
) -> Fleet | None:
    """The fastest plan, if it is within the limits: a search of many islands for another goal can miss every plan
    that is."""
    limits = replace(goal, objective="tokens")
    fastest = None if limits == goal.fastest else search(run, inventory, model, free, goal.fastest)
    return fastest if fastest and score(fastest, run, model, limits) is not None else None


def _require_facts(run: RunSettings, inventory: Inventory, goal: Goal) -> None:
    inner, known = run.train.inner.name, sorted({trial.optimizer for trial in measured()})
    if goal.objective == "loss" and inner not in known:
        raise UsageError(
            f"--objective loss needs trials with train.inner.name {inner}; there are some with {' and '.join(known)}",
            hint="--objective tokens or cost; or examples/quality/run.py, which makes trials",
        )
    if goal.objective == "cost" and not any(i.price_per_h or i.egress_per_gb for i in inventory.islands):
        raise UsageError(
            "--objective cost needs prices, and no island has one",
            hint="give islands a price, for example `price: 14.0/h`, and `egress: 0.02/GB`",
        )


def _infeasible(
    run: RunSettings,
    inventory: Inventory,
    model: ModelFacts,
    free: frozenset[str],
    goal: Goal,
    unused: Sequence[Excluded],
) -> InfeasibleError:
    """Why there is no plan: limits, islands that cannot be in it, the quorum, or no island at all; and what to
    change."""
    fastest = search(run, inventory, model, free, goal.fastest)
    if fastest is not None:
        return _beyond_limits(fastest, run, inventory, model, free, goal)
    if goal.with_islands and (without := search(run, inventory, model, free, Goal())):
        return _cannot_be_in_it(without, run, inventory, model, goal)
    without_quorum = search(with_sync(run, quorum=1), inventory, model, free, Goal())
    missing = excluded(candidates(run, inventory, model), without_quorum, run, model, Goal())
    whys = [f"{item.name}: {item.reason}" for item in unused] + [f"{item.name} {item.reason}" for item in missing]
    reasons = "; ".join(whys[:5])
    missing = [*unused, *missing]
    ways = "; ".join(
        f"{island.name}: {' or '.join(island.suggestions[:2])}" for island in missing[:5] if island.suggestions
    )
    because = f": {reasons}" if reasons else ""
    if without_quorum is None:
        return InfeasibleError(f"no island can take part{because}", hint=ways)
    possible = len(without_quorum.kept)
    change = f"--set sync.quorum={possible}"
    return InfeasibleError(
        f"the quorum of {run.sync.quorum} is out of reach, {possible} can take part{because}",
        hint=f"{change}; {ways}" if ways else change,
    )


def _cannot_be_in_it(
    without: Fleet, run: RunSettings, inventory: Inventory, model: ModelFacts, goal: Goal
) -> InfeasibleError:
    """Why the best plan is `without` the islands that the goal wants."""
    missing = excluded(candidates(replace(run, sync=without.sync), inventory, model), without, run, model, Goal())
    wanted = [item for item in missing if item.name in goal.with_islands]
    reasons = "; ".join(f"{item.name}: {item.reason}" for item in wanted) or "not all of them at once"
    ways = "; ".join(f"{item.name}: {' or '.join(item.suggestions[:2])}" for item in wanted if item.suggestions)
    return InfeasibleError(f"no plan with {some_of(goal.with_islands)}: {reasons}", hint=ways or None)


def _beyond_limits(
    fastest: Fleet, run: RunSettings, inventory: Inventory, model: ModelFacts, free: frozenset[str], goal: Goal
) -> InfeasibleError:
    """The limits that would be feasible: the fastest plan's days, or the cheapest one's costs."""
    days = math.ceil(100 * run.train.tokens / fastest.tokens_per_s / DAY_S) / 100
    if goal.deadline_s is not None and days * DAY_S > goal.deadline_s:
        return InfeasibleError(
            f"no plan reaches {run.train.tokens:,} tokens in {format_duration(goal.deadline_s)}: the fastest takes"
            f" {days:g} d",
            hint=f"--deadline '{days:g} d', or a smaller train.tokens",
        )
    limitless = replace(goal, objective="cost", budget_per_h=None, budget_total=None)
    cheapest = costs(search(run, inventory, model, free, limitless) or fastest, run, model)
    within = f" with the deadline of {format_duration(goal.deadline_s)}" if goal.deadline_s is not None else ""
    if goal.budget_per_h is not None:
        cents = math.ceil(100 * cheapest.per_h) / 100
        asked, found, way = f"{goal.budget_per_h:g}/h", f"{cents:.2f}/h", f"{cents:g}/h"
    else:
        asked, found = f"{goal.budget_total:,.0f} in all", f"{cheapest.total:,.0f}"
        way = f"{math.ceil(cheapest.total)}/run, or a smaller train.tokens"
    return InfeasibleError(
        f"no plan costs at most {asked}{within}: the one with the cheapest tokens costs {found}", hint=f"--budget {way}"
    )


def _settings(
    asked: RunSettings, chosen: RunSettings, free: frozenset[str], origins: Mapping[str, str] | None
) -> tuple[Setting, ...]:
    """Each setting with the place that pins it, or marked as searched."""
    found = []
    for key in SEARCHED:
        value = getattr(chosen.sync, key)
        if key in free:
            origin = "searched: the default is best" if value == getattr(asked.sync, key) else "searched"
        else:
            origin = "given" if origins is None else pins_of(origins)[key]
        found.append(Setting(f"sync.{key}", str(value), origin, key not in free))
    return tuple(found)


def _fitting_outer(plan: Plan) -> tuple[OuterSettings, tuple[Setting, ...]]:
    """The outer settings with numbers for `auto`, and what these are."""
    run, outer = plan.run, plan.run.outer
    rounds = rounds_of(run, plan.islands)
    fit = dict(zip(OuterSettings.AUTO, fitting_outer(run.train.inner.name, rounds), strict=True))
    found: dict[str, Any] = {key: value for key, value in fit.items() if getattr(outer, key) == "auto"}
    why = f"auto: {format_count(round(rounds))} rounds of {run.train.inner.name}"
    settings = tuple(Setting(f"outer.{key}", f"{value:g}", why, False) for key, value in found.items())
    return replace(outer, **found), settings


def rounds_of(run: RunSettings, islands: Sequence[PlannedIsland]) -> float:
    """Of the whole run, as planned."""
    return run.train.tokens / sum(island.batch_tokens * island.local_steps for island in islands)


def pins_of(origins: Mapping[str, str]) -> dict[str, str]:
    """Of the keys that are searched otherwise those that the user gave, and where: `run.yaml:12`, so that a plan does
    not depend on the folder of its files."""
    given = {key: origins[f"sync.{key}"] for key in SEARCHED if f"sync.{key}" in origins}
    return {key: place if place.startswith("--") else place.rpartition("/")[2] for key, place in given.items()}


MAX_LISTED = 16  # islands up to which P(at least k) is listed for every k


def assemble(
    fleet: Fleet,
    missing: Sequence[Excluded],
    run: RunSettings,
    inventory: Inventory,
    model: ModelFacts,
    goal: Goal,
    unused: Sequence[Excluded] = (),
) -> Plan:
    """The plan of a fleet, islands in the inventory's order. `missing` islands could have taken part, of the `unused`
    machines none could be formed."""
    order = {island.name: index for index, island in enumerate(inventory.islands)}
    pairs = sorted(zip(fleet.kept, fleet.flows, strict=True), key=lambda pair: order[pair[0].island.name])
    missing = sorted(missing, key=lambda island: order[island.name])
    islands = [planned_island(candidate, flow, fleet, run, inventory, model) for candidate, flow in pairs]
    money, needs = costs(fleet, run, model), syncer_needs(fleet, run.outer.name, model)
    warnings = [f"{island.name} is excluded: {island.reason}" for island in (*missing, *unused)]
    if fleet.schedule.fragments < run.sync.fragments:
        count = fleet.schedule.fragments
        warnings.append(f"the model has too few rows for {run.sync.fragments} fragments: there will be {count}")
    warnings += schedule_warnings(fleet.schedule) + syncer_warnings(needs, fleet)
    warnings += snapshot_warnings(len(islands), fleet.schedule.fragments)
    prediction = predict(fleet, money, run, model)
    warnings += horizon_warnings(run.train.tokens, prediction.days_to_target)
    warnings += round_warnings(run.outer, run.train.inner.name, rounds_of(run, islands))
    warnings += [warning for island in islands for warning in island.warnings]
    offsets = fragment_offsets(run.sync.every, fleet.schedule.fragments)
    return Plan(
        verdict="feasible with warnings" if warnings else "feasible",
        why=_why(islands, missing, unused, warnings) + _not_launched(fleet, inventory),
        goal=goal,
        islands=tuple(islands),
        excluded=(*missing, *unused),
        schedule=replace(fleet.schedule, offsets=offsets),
        prediction=prediction,
        money=money,
        syncer=needs,
        model=model,
        run=run,
        inventory=inventory,
        warnings=tuple(warnings),
    )


def planned_island(
    candidate: Candidate, flow: Flow, fleet: Fleet, run: RunSettings, inventory: Inventory, model: ModelFacts
) -> PlannedIsland:
    island, step_s, schedule, sync = candidate.island, candidate.step_s, fleet.schedule, fleet.sync
    link, own_round_s = candidate.link, flow.local_steps * step_s
    need_round_s = max(schedule.round_s, step_s)
    sent_mbps, received_mbps = traffic_mbps(model, sync, run.train.inner, schedule, step_s, len(fleet.kept))
    up_bits, down_bits = CODEC_BITS[sync.codec], CODEC_BITS[sync.weights_codec]
    sent_gb = up_gb_per_day(model, up_bits, moment_bytes(run.train.inner, model), fleet.served_round_s)
    received_gb = up_gb_per_day(model, down_bits, 0.0, fleet.served_round_s)
    chosen = replace(run, sync=sync)
    on_host = host_bytes(chosen, model)
    fit = with_overlap(candidate.fit, model, how_on(island.accelerators, chosen, inventory, model, schedule.overlap))
    return PlannedIsland(
        name=island.name,
        region=island.region,
        accelerators=f"{island.accelerators.name}:{island.accelerators.count}",
        devices=num_devices(island),
        tokens_per_s=candidate.tokens_per_s,
        step_s=step_s,
        batch_tokens=candidate.batch_tokens,
        local_steps=flow.local_steps,
        round_s=own_round_s,
        idle_percent=idle_percent(flow.local_steps, step_s, schedule.round_s),
        up_mbps_needed=uplink_mbps(model.parameters, up_bits, need_round_s),
        up_mbps_available=link.up_bps and link.up_bps / MBPS,
        down_mbps_needed=downlink_mbps(model.parameters, down_bits, need_round_s),
        down_mbps_available=link.down_bps and link.down_bps / MBPS,
        sent_mbps=sent_mbps,
        transfer_s=flow.transfer_s,
        transfer_window_s=schedule.overlap * schedule.slot_s - schedule.quorum_s - schedule.merge_s,
        memory_gb_needed=fit.needed_gb,
        memory_gb_available=fit.available_gb,
        fits=fit.fits,
        sharding=fit.sharding,
        memory_parts=fit.parts,
        host_memory_gb_needed=host_memory_gb(
            on_host, model.parameters, schedule.overlap, up_bits, down_bits, schedule.fragment_parameters
        ),
        availability=candidate.availability,
        price_per_h=island.price_per_h,
        egress_per_day=sent_gb * candidate.egress_per_gb,
        downloads_per_day=received_gb * candidate.download_per_gb,
        predicted_tokens_per_s=flow.after_failures,
        warnings=(*tight(island.name, fit), *island_warnings(candidate, fleet, run, inventory, model)),
        received_mbps=received_mbps,
        micro_batch_tokens=micro_batch(candidate.fit.sequences, model.sequence),
        nodes=island.nodes,
        ranks=island.num_ranks,
    )


@formula("island", "idle", "%")
def idle_percent(local_steps: int, step_s: float, round_s: float) -> float:
    return 100 * max(0.0, 1 - local_steps * step_s / round_s)


@formula("island", "micro-batch", "tokens")
def micro_batch(sequences: int, sequence: int) -> int:
    return sequences * sequence


def _why(
    islands: Sequence[PlannedIsland], missing: Sequence[Excluded], unused: Sequence[Excluded], warnings: Sequence[str]
) -> str:
    total, absent = len(islands) + len(missing), [*missing, *unused]
    if absent:
        of = f"{len(islands)} of {total} islands" if missing else f"all {total} islands"
        return f"{of} take part; without {some_of([island.name for island in absent])}"
    everyone = "the island takes part" if total == 1 else f"all {total} islands take part"
    if warnings:
        return f"{everyone}; {len(warnings)} to look at"
    known = sum(None not in (island.up_mbps_available, island.down_mbps_available) for island in islands)
    which = "every link" if known == total else "every link that is given"
    return f"{everyone}, {which} carries its round" if known else f"{everyone}; no link is given: taken as fast enough"


def _not_launched(fleet: Fleet, inventory: Inventory) -> str:
    """A plan may predict what `launch` refuses to start."""
    kept = {candidate.island.name for candidate in fleet.kept}
    found = [i.name for i in inventory.islands if i.name in kept and not_launched(i, inventory)]
    return f"; launch cannot run {some_of(found)}" if found else ""


def predict(fleet: Fleet, money: Money, run: RunSettings, model: ModelFacts) -> Prediction:
    availabilities = [candidate.availability for candidate in fleet.kept]
    present = (probability_at_least(k, availabilities) for k in range(1, len(availabilities) + 1))
    flows = fleet.flows
    rates = {
        "ideal": sum(flow.ideal for flow in flows),
        "after idle": sum(flow.after_idle for flow in flows),
        "after link": sum(flow.after_link for flow in flows),
        "after failures": sum_of_islands([flow.after_failures for flow in flows]),
    }
    tokens = run.train.tokens
    stages = tuple(Stage(name, rate, tokens / rate / DAY_S) for name, rate in rates.items())
    ideal, final = stages[0].tokens_per_s, stages[-1].tokens_per_s
    islands = [candidate.island for candidate in fleet.kept]
    batch_tokens = sum(candidate.batch_tokens for candidate in fleet.kept)
    own_rates = [candidate.tokens_per_s for candidate in fleet.kept]
    synchronous = synchronous_tokens_per_s(islands, own_rates, batch_tokens, model)
    return Prediction(
        tokens_per_s_ideal=ideal,
        tokens_per_s=final,
        goodput=goodput_of(final, ideal),
        days_to_target=days_to_target(tokens, final),
        synchronous_tokens_per_s=synchronous,
        synchronous_goodput=synchronous / ideal,
        synchronous_days_to_target=tokens / synchronous / DAY_S,
        price_per_h=money.accelerators_per_h,
        egress_per_day=money.egress_per_day,
        quorum_probability=quorum_probability(fleet.sync.quorum, availabilities),
        all_present_probability=all_present_probability(availabilities),
        present_probabilities=tuple(present) if len(availabilities) <= MAX_LISTED else (),
        waterfall=stages,
        loss_percent=loss_of(fleet, run, model),
    )


@formula("prediction", "tokens/s", "tokens/s")
def sum_of_islands(predicted: Sequence[float]) -> float:
    return sum(predicted)


@formula("prediction", "goodput")
def goodput_of(tokens_per_s: float, ideal: float) -> float:
    return tokens_per_s / ideal


@formula("prediction", "time to the target", "d")
def days_to_target(tokens: int, tokens_per_s: float) -> float:
    return tokens / tokens_per_s / DAY_S


def syncer_needs(fleet: Fleet, outer: str, model: ModelFacts) -> SyncerNeeds:
    """The syncer reads every island's delta once a round, writes state and weights, and may have to read them back."""
    sync, s, islands, spent = fleet.sync, fleet.schedule, len(fleet.kept), fleet.syncer
    up_bits, down_bits, round_s = CODEC_BITS[sync.codec], CODEC_BITS[sync.weights_codec], fleet.served_round_s
    machine = fleet.kept[0].syncer
    state_bytes, largest = OUTER_OPTIMIZERS[outer].state_bytes, s.fragment_parameters
    written_bits = version_bits(model.parameters, state_bytes, down_bits)
    merging = work_of(model.parameters / s.fragments, islands, sync, state_bytes)
    return SyncerNeeds(
        memory_gb=syncer_memory_gb(
            model.parameters, largest, up_bits, down_bits, islands, machine.reads_back, state_bytes
        ),
        down_mbps=read_mbps(islands, model.parameters, up_bits, machine.reads_back, written_bits, round_s),
        up_mbps=written_mbps(written_bits, round_s),
        merge_percent=merge_percent(model.parameters, islands, round_s),
        fastest_slot_s=shortest_slot_s(spent.calls_s, spent.bytes_s, spent.processor_s),
        calls_s=spent.calls_s,
        bytes_s=spent.bytes_s,
        processor_s=spent.processor_s,
        limit=spent.limit,
        busy_percent=busy_percent(spent.seconds, s.slot_s),
        max_islands=most_learners(merging, machine, s.slot_s),
        reads_back=machine.reads_back,
    )


@formula("syncer", "a version", "bits")
def version_bits(parameters: int, state_bytes: int, weights_bits: float) -> float:
    return parameters * 8 * state_bytes + parameters * weights_bits


@formula("syncer", "down", "Mbps")
def read_mbps(
    islands: int, parameters: int, delta_bits: float, reads_back: bool, version_bits: float, round_s: float
) -> float:
    return (islands * (parameters * delta_bits) + reads_back * version_bits) / round_s / MBPS


@formula("syncer", "up", "Mbps")
def written_mbps(version_bits: float, round_s: float) -> float:
    return version_bits / round_s / MBPS


@formula("syncer", "merging", "%")
def merge_percent(parameters: int, islands: int, round_s: float) -> float:
    return 100 * (parameters * islands / MERGE_PARAMETERS_PER_S / round_s)


@formula("syncer", "shortest slot", "s")
def shortest_slot_s(calls_s: float, bytes_s: float, processor_s: float) -> float:
    return calls_s + bytes_s + processor_s


@formula("syncer", "busy", "%")
def busy_percent(shortest_slot_s: float, slot_s: float) -> float:
    return 100 * (shortest_slot_s / slot_s)


def explain(plan: Plan) -> tuple[Explanation, ...]:
    """The model, the schedule, then the islands, the prediction, the syncer, the money."""
    run, model = plan.run, plan.model
    by_name = {c.island.name: c for c in candidates(run, plan.inventory, model)}
    kept = sorted((by_name[i.name] for i in plan.islands), key=lambda c: (c.step_s, c.island.name))
    fleet = run_fleet(kept, run.sync, model)
    found = told("model", lambda: (model.flops_per_token, model.fragments(run.sync.fragments)))
    found += told("schedule", lambda: run_fleet(kept, run.sync, model))
    for island in plan.islands:
        found += _island(plan, fleet, by_name[island.name])
    found += told("prediction", lambda: predict(fleet, plan.money, run, model))
    found += told("syncer", lambda: syncer_needs(fleet, run.outer.name, model))
    found += told("money", lambda: costs(fleet, run, model))
    return tuple(found)


def _island(plan: Plan, fleet: Fleet, candidate: Candidate) -> list[Explanation]:
    island, run, inventory, model = candidate.island, plan.run, plan.inventory, plan.model
    sync, schedule, fit = run.sync, plan.schedule, candidate.fit

    def compute() -> None:
        candidate_of(island, run, inventory, model, candidate.share, lambda *_: fit)
        transfer_s(candidate.link, candidate.rtt_s, schedule.fragment_parameters, sync.codec, sync.weights_codec)
        flow = fleet.flows[fleet.kept.index(candidate)]
        mean = model.fragments(sync.fragments).mean
        flow_of(candidate, flow.transfer_s, schedule, sync, fleet.at_syncer, mean, len(fleet.kept), flow.moving)
        sharded_over = fit.ranks if fit.sharding == "fsdp" else 1
        how = how_on(island.accelerators, run, inventory, model, schedule.overlap)
        sum_gb([part.gb for part in memory_parts(model, how, sharded_over, fit.sequences)])
        planned_island(candidate, flow, fleet, run, inventory, model)

    return told("island", compute, island.name)
