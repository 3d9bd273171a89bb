"""Makes a plan from an evaluated fleet: islands, prediction, the syncer's needs, warnings, verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.plan import goodput
from diloco_cli.plan.candidates import Candidate
from diloco_cli.plan.flow import Fleet, Flow
from diloco_cli.plan.link import MBPS, link_warnings, load_of_round, need_of_round, traffic_mbps
from diloco_cli.plan.memory import Fit, host_memory_gb, how_on, with_overlap
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.money import costs, up_gb_per_day
from diloco_cli.plan.plan import Excluded, Goal, Money, Plan, PlannedIsland, Prediction, Stage
from diloco_cli.plan.practical import horizon_warnings, step_warnings
from diloco_cli.plan.runnable import not_launched
from diloco_cli.plan.schedule import fragment_offsets, schedule_warnings
from diloco_cli.plan.speed import num_devices, speed_warnings
from diloco_cli.plan.syncer_needs import syncer_needs, syncer_warnings

LATE_STEP = 1.5  # a step longer than this many rounds makes its island miss merges
IDLE_ACCELERATORS = 0.9  # a batch that keeps a smaller share of them busy gets a warning
MAX_LISTED = 16  # islands up to which P(at least k) is listed for every k
DAY_S = 86_400.0


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
    islands = [_planned(candidate, flow, fleet, run, inventory, model) for candidate, flow in pairs]
    money, needs = costs(fleet, run, model), syncer_needs(fleet, model)
    warnings = [f"{island.name} is excluded: {island.reason}" for island in (*missing, *unused)]
    if fleet.schedule.fragments < run.sync.fragments:
        unit, count = "layers" if run.sync.layout == "layers" else "tensors", fleet.schedule.fragments
        warnings.append(f"the model has too few {unit} for {run.sync.fragments} fragments: there will be {count}")
    warnings += schedule_warnings(fleet.schedule) + syncer_warnings(needs, fleet, model)
    warnings += _cold_start_warnings(fleet, run, model)
    prediction = predict(fleet, money, run, model)
    warnings += horizon_warnings(run.train.tokens, prediction.days_to_target)
    warnings += [warning for island in islands for warning in island.warnings]
    offsets = fragment_offsets(run.sync.every, fleet.schedule.fragments)
    return Plan(
        verdict="feasible with warnings" if warnings else "feasible",
        why=_why(islands, missing, unused, warnings) + _not_launched(fleet, inventory),
        goal=goal,
        islands=tuple(islands),
        excluded=(*missing, *unused),
        schedule=dataclasses.replace(fleet.schedule, offsets=offsets),
        prediction=prediction,
        money=money,
        syncer=needs,
        model=model,
        run=run,
        inventory=inventory,
        warnings=tuple(warnings),
    )


def _cold_start_warnings(fleet: Fleet, run: RunSettings, model: ModelFacts) -> list[str]:
    """Warnings about the first rounds: islands that stand idle, links that carry the same bytes in less time."""
    cold, sync, warnings = run.cold_start, run.sync, []
    kept = [c.island.name for c in sorted(fleet.kept, key=lambda c: (-c.tokens_per_s, c.island.name))]
    if cold.rounds and cold.learners is not None and cold.learners < len(kept):
        first, idle = ", ".join(kept[: cold.learners]), len(kept) - cold.learners
        warnings.append(f"cold start: {first} alone for {cold.rounds} rounds; {idle} of {len(kept)} islands stand idle")
    if cold.rounds and cold.every is not None:
        share = cold.every / sync.every
        load = load_of_round(model, fleet.sync.codec, fleet.sync.weights_codec, run.train.inner)
        slow = [c.island.name for c in fleet.kept if not c.carries(load, share * fleet.schedule.round_s)]
        of_these = f"; not in that time: {', '.join(sorted(slow))}" if slow else ""
        warnings.append(f"cold start: the first {cold.rounds} rounds exchange {1 / share:g} times as often{of_these}")
    return warnings


def _planned(
    candidate: Candidate, flow: Flow, fleet: Fleet, run: RunSettings, inventory: Inventory, model: ModelFacts
) -> PlannedIsland:
    island, step_s, schedule, sync = candidate.island, candidate.step_s, fleet.schedule, fleet.sync
    link, own_round_s = candidate.link, flow.local_steps * step_s
    need = need_of_round(model, sync.codec, sync.weights_codec)
    need_round_s = max(schedule.round_s, step_s)
    sent_mbps, received_mbps = traffic_mbps(model, sync, run.train.inner, schedule, step_s, len(fleet.kept))
    saved = run.train.inner.name == "adamw"
    chosen = dataclasses.replace(run, sync=sync)
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
        idle_percent=100 * max(0.0, 1 - own_round_s / schedule.round_s),
        up_mbps_needed=need.up_bps(need_round_s) / MBPS,
        up_mbps_available=link.up_bps and link.up_bps / MBPS,
        down_mbps_needed=need.down_bps(need_round_s) / MBPS,
        down_mbps_available=link.down_bps and link.down_bps / MBPS,
        sent_mbps=sent_mbps,
        transfer_s=flow.transfer_s,
        transfer_window_s=schedule.overlap * schedule.slot_s - schedule.quorum_s - schedule.merge_s,
        memory_gb_needed=fit.needed_gb,
        memory_gb_available=fit.available_gb,
        fits=fit.fits,
        sharding=fit.sharding,
        memory_parts=fit.parts,
        host_memory_gb_needed=host_memory_gb(model, sync, schedule.fragment_parameters, schedule.overlap, saved),
        availability=candidate.availability,
        price_per_h=island.price_per_h,
        egress_per_day=up_gb_per_day(fleet, run, model) * candidate.egress_per_gb,
        predicted_tokens_per_s=flow.after_failures,
        warnings=(*_tight(island.name, fit), *_island_warnings(candidate, fleet, run, inventory, model)),
        received_mbps=received_mbps,
        micro_batch_tokens=candidate.fit.sequences * model.sequence,
        nodes=island.nodes,
        ranks=island.num_ranks,
    )


def _tight(name: str, fit: Fit) -> list[str]:
    """Whether it fits only with fewer fragments on their way than the schedule has. No reason to leave the island out:
    all of them are on their way at once only where its link is slow or merges are late."""
    if fit.fits:
        return []
    need, have = f"{fit.needed_gb:.3g} GB", f"{fit.usable_gb:.3g} GB"
    smaller = ", or train.micro_batch_tokens" if fit.sequences > 1 else ""
    return [f"{name}: with all that may be on its way it needs {need} of {have}: lower sync.overlap{smaller}"]


def _island_warnings(
    candidate: Candidate, fleet: Fleet, run: RunSettings, inventory: Inventory, model: ModelFacts
) -> list[str]:
    name, step_s, schedule = candidate.island.name, candidate.step_s, fleet.schedule
    load = load_of_round(model, fleet.sync.codec, fleet.sync.weights_codec, run.train.inner)
    warnings = link_warnings(candidate.island.name, candidate.link, load, max(schedule.round_s, step_s))
    unfit = not_launched(candidate.island, inventory)
    warnings += [] if unfit is None else [f"{name}: launch cannot run it: {unfit[0]}; {unfit[1]}"]
    warnings += speed_warnings(candidate.island, inventory, model, run.train.precision)
    if step_s > LATE_STEP * schedule.round_s:
        rounds = step_s / schedule.round_s
        warnings.append(f"{name}: one step takes {rounds:.1f} rounds; lower its batch_tokens or raise sync.every")
    warnings += step_warnings(name, step_s, candidate.batch_tokens, model.sequence)
    if run.train.sharding == "fsdp" and not model.divides and candidate.island.num_ranks > 1:
        warnings.append(
            f"{name}: the model has no blocks that could be sharded (an nn.ModuleList): a copy on each rank"
        )
    if candidate.busy < IDLE_ACCELERATORS:
        sequences, count = candidate.batch_tokens // model.sequence, num_devices(candidate.island)
        better = count * max(1, round(sequences / count)) * model.sequence
        warnings.append(
            f"{name}: {sequences} sequences a step keep {100 * candidate.busy:.0f} % of {count} accelerators busy;"
            f" batch_tokens: {better} keeps all"
        )
    return warnings


def _why(
    islands: Sequence[PlannedIsland], missing: Sequence[Excluded], unused: Sequence[Excluded], warnings: Sequence[str]
) -> str:
    total, absent = len(islands) + len(missing), [*missing, *unused]
    if absent:
        of = f"{len(islands)} of {total} islands" if missing else f"all {total} islands"
        return f"{of} take part; without {_names([island.name for island in absent])}"
    everyone = "the island takes part" if total == 1 else f"all {total} islands take part"
    return f"{everyone}; {len(warnings)} to look at" if warnings else f"{everyone}, every link carries its round"


def _not_launched(fleet: Fleet, inventory: Inventory) -> str:
    """A plan may predict what `launch` refuses to start."""
    kept = {candidate.island.name for candidate in fleet.kept}
    found = [i.name for i in inventory.islands if i.name in kept and not_launched(i, inventory)]
    return f"; launch cannot run {_names(found)}" if found else ""


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def predict(fleet: Fleet, money: Money, run: RunSettings, model: ModelFacts) -> Prediction:
    availabilities = [candidate.availability for candidate in fleet.kept]
    present = (goodput.probability_at_least(k, availabilities) for k in range(1, len(availabilities) + 1))
    flows = fleet.flows
    rates = {
        "ideal": sum(flow.ideal for flow in flows),
        "after idle": sum(flow.after_idle for flow in flows),
        "after link": sum(flow.after_link for flow in flows),
        "after failures": fleet.tokens_per_s,
    }
    tokens = run.train.tokens
    stages = tuple(Stage(name, rate, tokens / rate / DAY_S) for name, rate in rates.items())
    ideal, final = stages[0].tokens_per_s, stages[-1].tokens_per_s
    islands = [candidate.island for candidate in fleet.kept]
    batch_tokens = sum(candidate.batch_tokens for candidate in fleet.kept)
    own_rates = [candidate.tokens_per_s for candidate in fleet.kept]
    synchronous = goodput.synchronous_tokens_per_s(islands, own_rates, batch_tokens, model)
    return Prediction(
        tokens_per_s_ideal=ideal,
        tokens_per_s=final,
        goodput=final / ideal,
        days_to_target=tokens / final / DAY_S,
        synchronous_tokens_per_s=synchronous,
        synchronous_goodput=synchronous / ideal,
        synchronous_days_to_target=tokens / synchronous / DAY_S,
        price_per_h=money.accelerators_per_h,
        egress_per_day=money.egress_per_day,
        quorum_probability=fleet.quorum_probability,
        all_present_probability=math.prod(availabilities),
        present_probabilities=tuple(present) if len(availabilities) <= MAX_LISTED else (),
        waterfall=stages,
    )
