"""Every number of a plan with its formula and its inputs: `diloco plan --explain`.

The plan's own functions compute each number once more, and tell it (formulas.py).
"""

from __future__ import annotations

from diloco_cli.formulas import Explanation, told
from diloco_cli.plan import speed
from diloco_cli.plan.candidates import Candidate, candidate_of, candidates
from diloco_cli.plan.flow import Fleet, flow_of, run_fleet
from diloco_cli.plan.link import fragments_of, transfer_s
from diloco_cli.plan.memory import how_on, memory_parts, sum_gb
from diloco_cli.plan.money import costs
from diloco_cli.plan.plan import Plan
from diloco_cli.plan.planner import planned_island, predict, syncer_needs


def explain(plan: Plan) -> tuple[Explanation, ...]:
    """The model, the schedule, then the islands, the prediction, the syncer, the money."""
    run, model = plan.run, plan.model
    by_name = {c.island.name: c for c in candidates(run, plan.inventory, model)}
    kept = sorted((by_name[i.name] for i in plan.islands), key=lambda c: (c.step_s, c.island.name))
    fleet = run_fleet(kept, run.sync, model)
    found = told("model", lambda: (model.flops_per_token, fragments_of(run.sync, model)))
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
        if inventory.local is not None and speed.shares_cores(island, None):
            here = [other for other in inventory.islands if speed.shares_cores(other, None)]
            speed.mean_share(tuple(speed.states_of(island, here, inventory.local, speed.SERVICE_CORES)))
        candidate_of(island, run, inventory, model, candidate.share, lambda *_: fit)
        transfer_s(candidate.link, candidate.rtt_s, schedule.fragment_parameters, sync.codec, sync.weights_codec)
        flow = fleet.flows[fleet.kept.index(candidate)]
        mean = fragments_of(sync, model).mean
        flow_of(candidate, flow.transfer_s, schedule, sync, fleet.at_syncer, mean, len(fleet.kept), flow.moving)
        sharded_over = fit.ranks if fit.sharding == "fsdp" else 1
        how = how_on(island.accelerators, run, inventory, model, schedule.overlap)
        sum_gb([part.gb for part in memory_parts(model, how, sharded_over, 1, fit.sequences)])
        planned_island(candidate, flow, fleet, run, inventory, model)

    return told("island", compute, island.name)
