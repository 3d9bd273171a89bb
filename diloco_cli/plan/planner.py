"""`make_plan`: the whole of planning as one pure function of (run, inventory, model)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.errors import InfeasibleError
from diloco_cli.plan import goodput
from diloco_cli.plan.alternatives import alternatives
from diloco_cli.plan.assumptions import assumptions
from diloco_cli.plan.candidates import Candidate, candidates, select
from diloco_cli.plan.link import MBPS, link_warnings, need_of_round, transfer_s
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import LeftOut, Plan, PlannedIsland, Schedule
from diloco_cli.plan.prediction import SECONDS_PER_DAY, predict
from diloco_cli.plan.schedule import local_steps, make_schedule, schedule_warnings
from diloco_cli.plan.speed import num_devices

GB = 1e9
LATE_STEP = 1.5  # a step longer than this many rounds makes its island miss merges


def make_plan(run: RunSettings, inventory: Inventory, model: ModelFacts) -> Plan:
    """The plan. Raises InfeasibleError if no island remains or the quorum is out of reach."""
    plan = _plan(run, inventory, model)
    others = alternatives(plan, lambda other: _plan(other, inventory, model))
    return dataclasses.replace(plan, alternatives=others)


def _plan(run: RunSettings, inventory: Inventory, model: ModelFacts) -> Plan:
    kept, left_out = select(candidates(run, inventory, model), run, model)
    _require_quorum(run, kept, left_out)
    order = {island.name: index for index, island in enumerate(inventory.islands)}
    kept.sort(key=lambda candidate: order[candidate.island.name])
    left_out.sort(key=lambda island: order[island.name])
    num_fragments = min(run.sync.fragments, model.num_tensors)
    transfers = [transfer_s(c.island.link, model, run.sync, num_fragments) for c in kept]
    schedule = make_schedule(run.sync, model, num_fragments, [c.step_s for c in kept], transfers)
    islands = [_planned(c, t, run, model, schedule) for c, t in zip(kept, transfers, strict=True)]
    warnings = _warnings(run, islands, left_out, schedule)
    return Plan(
        verdict="feasible with warnings" if warnings else "feasible",
        why=_why(islands, left_out, warnings),
        islands=tuple(islands),
        left_out=tuple(left_out),
        schedule=schedule,
        prediction=predict(run, kept, islands, schedule, model),
        model=model,
        run=run,
        inventory=inventory,
        assumptions=assumptions(run, kept, model),
        warnings=tuple(warnings),
    )


def _require_quorum(run: RunSettings, kept: Sequence[Candidate], left_out: Sequence[LeftOut]) -> None:
    if len(kept) >= max(1, run.sync.quorum):
        return
    reasons = "; ".join(f"{island.name} {island.reason}" for island in left_out)
    ways = "; ".join(f"{island.name}: {' or '.join(island.ways_out[:2])}" for island in left_out)
    because = f": {reasons}" if reasons else ""
    if not kept:
        raise InfeasibleError(f"no island can take part{because}", hint=ways)
    possible = f"--set sync.quorum={len(kept)}"
    raise InfeasibleError(
        f"the quorum of {run.sync.quorum} is out of reach, {len(kept)} can take part{because}",
        hint=f"{possible}; {ways}" if ways else possible,
    )


def _planned(
    candidate: Candidate, transfer: float, run: RunSettings, model: ModelFacts, schedule: Schedule
) -> PlannedIsland:
    island, step_s = candidate.island, candidate.step_s
    steps = local_steps(schedule.round_s, step_s)
    own_round_s = steps * step_s
    need = need_of_round(model, run.sync.codec, run.sync.broadcast)
    need_round_s = max(schedule.round_s, step_s)
    warnings = link_warnings(island, need, need_round_s)
    if step_s > LATE_STEP * schedule.round_s:
        rounds = step_s / schedule.round_s
        warnings.append(
            f"{island.name}: one step takes {rounds:.1f} rounds; lower its batch_tokens or raise sync.every"
        )
    up_bytes_per_day = need.up_bps(need_round_s) / 8 * SECONDS_PER_DAY
    return PlannedIsland(
        name=island.name,
        region=island.region,
        accelerators=f"{island.accelerators.name}:{island.accelerators.count}",
        devices=num_devices(island),
        tokens_per_s=candidate.speed.tokens_per_s,
        step_s=step_s,
        batch_tokens=candidate.batch_tokens,
        local_steps=steps,
        round_s=own_round_s,
        idle_percent=100 * max(0.0, 1 - own_round_s / schedule.round_s),
        up_mbps_needed=need.up_bps(need_round_s) / MBPS,
        up_mbps_available=_mbps(island.link.up_bps),
        down_mbps_needed=need.down_bps(need_round_s) / MBPS,
        down_mbps_available=_mbps(island.link.down_bps),
        transfer_s=transfer,
        memory_gb_needed=candidate.fit.needed_gb,
        memory_gb_available=candidate.fit.available_gb,
        fits=candidate.fit.fits,
        sharding=candidate.fit.sharding,
        availability=goodput.availability(island),
        price_per_h=island.price_per_h,
        egress_per_day=up_bytes_per_day / GB * island.egress_per_gb,
        warnings=tuple(warnings),
    )


def _mbps(bps: float | None) -> float | None:
    return None if bps is None else bps / MBPS


def _warnings(
    run: RunSettings, islands: Sequence[PlannedIsland], left_out: Sequence[LeftOut], schedule: Schedule
) -> list[str]:
    warnings = [f"{island.name} is left out: {island.reason}" for island in left_out]
    if schedule.fragments < run.sync.fragments:
        warnings.append(f"the model has only {schedule.fragments} tensors, so {schedule.fragments} fragments")
    warnings += schedule_warnings(schedule)
    return warnings + [warning for island in islands for warning in island.warnings]


def _why(islands: Sequence[PlannedIsland], left_out: Sequence[LeftOut], warnings: Sequence[str]) -> str:
    total = len(islands) + len(left_out)
    if left_out:
        return f"{len(islands)} of {total} islands take part; without {', '.join(i.name for i in left_out)}"
    everyone = "the island takes part" if total == 1 else f"all {total} islands take part"
    return f"{everyone}; {len(warnings)} to look at" if warnings else f"{everyone}, every link carries its round"
