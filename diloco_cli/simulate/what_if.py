"""What a run would do: its report, from a history in virtual time; and a plan's run without building its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_cli.faults.timetable import Injection
from diloco_cli.layout import ParameterFact, make_layout
from diloco_cli.plan.goodput import restart_s
from diloco_cli.plan.link import CODEC_BITS
from diloco_cli.plan.plan import Plan
from diloco_cli.protocol.records import Island, RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.simulate.fleet import Hardware, SimulatedFleet
from diloco_cli.simulate.island import Condition, sizes_of
from diloco_cli.simulate.world import World

GB = 1e9
HOUR_S, DAY_S = 3600.0, 86_400.0
MERGE_PARAMETERS_PER_S = 1e8  # guessed: parameters of one learner that one syncer core merges in a second


@dataclass(frozen=True)
class Price:
    """Of one island, in the inventory's currency."""

    per_h: float = 0.0
    egress_per_gb: float = 0.0


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
    bytes_up: int
    bytes_down: int
    cost: float


@dataclass(frozen=True)
class WhatIf:
    """A whole run, or the first part of it. `goodput` = tokens merged / (undisturbed tokens/s of all islands x time);
    `participation` as in `status`; `days_to_target` at the rate seen. Money in the inventory's currency."""

    name: str
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
    bytes_up: int
    bytes_down: int
    cost: float
    cost_to_target: float | None
    islands: tuple[IslandReport, ...]
    faults: tuple[Injection, ...]
    log: tuple[str, ...]


def hardware_of_plan(plan: Plan) -> dict[str, Hardware]:
    """Failures and restarts as the inventory states them."""
    return {
        island.name: Hardware(island.mtbf_s, restart_s(island))
        for island in plan.inventory.islands
    }  # fmt: skip


def prices_of_plan(plan: Plan) -> dict[str, Price]:
    return {island.name: Price(island.price_per_h, island.egress_per_gb) for island in plan.inventory.islands}


def run_of_plan(plan: Plan, run_id: str, software: str) -> RunFormat:
    """A run as `launch` would create it, with tensors that stand for the model's: the embedding, and as many equal ones
    as there are other fragments. Good for a history; a tape to train with needs the real ones."""
    facts, fragments = plan.model, plan.schedule.fragments
    others = max(1, fragments - (facts.embedding_parameters > 0)) if fragments > 1 else 1
    each = max(1, (facts.parameters - facts.embedding_parameters) // others)
    tensors = [ParameterFact(f"block.{index}.weight", (each,), False) for index in range(others)]
    if facts.embedding_parameters > 0:
        tensors.insert(0, ParameterFact("embedding.weight", (facts.embedding_parameters,), True))
    inventory = {island.name: island for island in plan.inventory.islands}
    islands = tuple(
        Island(
            name=island.name,
            region=island.region,
            batch_tokens=island.batch_tokens,
            local_steps=island.local_steps,
            tokens_per_s=island.tokens_per_s,
            step_s=island.step_s,
            link=inventory[island.name].link,
        )
        for island in sorted(plan.islands, key=lambda i: i.name)
    )
    layout = make_layout(tensors, plan.run.sync)
    return RunFormat(run_id, plan.run.name, "2000-01-01T00:00:00.000Z", plan.run, islands, layout, software)


def simulated(
    run: RunFormat, hardware: dict[str, Hardware], faults: Sequence[Injection], seed: int, within_s: float
) -> SimulatedFleet:
    """Play a run for so much virtual time, or to its end."""
    mean_fragment = run.layout.num_parameters / run.num_fragments
    fleet = SimulatedFleet(
        run=run,
        sizes=sizes_of(run, CODEC_BITS),
        hardware=hardware,
        faults=tuple(faults),
        seed=seed,
        merge_s=mean_fragment * len(run.islands) / MERGE_PARAMETERS_PER_S,
        world=World(),
    )
    fleet.run_for(within_s)
    return fleet


def report(fleet: SimulatedFleet, prices: dict[str, Price]) -> WhatIf:
    """What the history amounts to."""
    run, state, seconds = fleet.run, fleet.state, fleet.world.now_s
    tokens, target = state.tokens(run.layout), run.settings.train.tokens
    rate = tokens / seconds
    islands = tuple(
        _island_report(condition, state, run, prices.get(name, Price()), seconds)
        for name, condition in sorted(fleet.conditions.items())
    )
    cost = sum(island.cost for island in islands)
    return WhatIf(
        name=run.name,
        simulated_s=seconds,
        finished=state.phase == "FINISHED",
        commits=state.n + 1,
        merges=state.merges,
        skips=state.skips,
        step=state.slot,
        tokens=tokens,
        tokens_target=target,
        tokens_per_s=rate,
        days_to_target=target / rate / DAY_S if rate else None,
        goodput=rate / sum(island.batch_tokens / island.step_s for island in run.islands),
        participation=state.participation,
        offers_applied=state.offers_applied,
        offers_refused=state.offers_refused,
        epochs=state.epoch,
        bytes_up=sum(island.bytes_up for island in islands),
        bytes_down=sum(island.bytes_down for island in islands),
        cost=cost,
        cost_to_target=cost * target / tokens if tokens else None,
        islands=islands,
        faults=fleet.faults,
        log=tuple(fleet.log),
    )


def _island_report(condition: Condition, state: RunState, run: RunFormat, price: Price, seconds: float) -> IslandReport:
    island, known = condition.island, state.learner(condition.island.name)
    merged = known.token_parameters // run.layout.num_parameters
    return IslandReport(
        name=island.name,
        region=island.region,
        goodput=merged / (island.batch_tokens / island.step_s * seconds),
        tokens_processed=condition.steps * island.batch_tokens,
        tokens_merged=merged,
        merges=known.merges,
        offers_refused=known.refused,
        incarnations=condition.incarnations,
        stalled_s=condition.stalled_s,
        stalled_percent=100 * condition.stalled_s / seconds,
        down_s=condition.down_s,
        bytes_up=round(condition.bytes_up),
        bytes_down=round(condition.bytes_down),
        cost=price.per_h * seconds / HOUR_S + price.egress_per_gb * condition.bytes_up / GB,
    )
