"""`make_plan`: the whole of planning as one pure function of (run, inventory, model)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.plan.assumptions import assumptions
from diloco_cli.plan.candidates import Candidate, candidates
from diloco_cli.plan.excluded import excluded
from diloco_cli.plan.fleet_plan import assemble
from diloco_cli.plan.flow import Fleet
from diloco_cli.plan.islands import form_islands
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.money import costs
from diloco_cli.plan.plan import Excluded, Goal, Plan, Setting
from diloco_cli.plan.search import MAX_WORK, SEARCHED, score, search
from diloco_cli.plan.variations import alternatives, sensitivities
from diloco_cli.units import format_duration

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
    free = frozenset() if origins is None else frozenset(k for k in SEARCHED if f"sync.{k}" not in origins)
    forming = form_islands(run, inventory, model)
    inventory = forming.inventory
    plan = _plan(run, inventory, model, goal, free, unused=forming.excluded)
    chosen = frozenset(island.name for island in plan.islands)

    def again(other_run: RunSettings, other_inventory: Inventory) -> Plan:
        """With the settings pinned: only the islands may change."""
        return _plan(other_run, other_inventory, model, goal, frozenset(), AGAIN_WORK, chosen)

    return dataclasses.replace(
        plan,
        settings=_settings(run, plan.run, free, origins),
        formed=forming.formed,
        alternatives=alternatives(plan, again),
        sensitivity=sensitivities(plan, again),
    )


def _plan(
    run: RunSettings, inventory: Inventory, model: ModelFacts, goal: Goal, free: frozenset[str],
    max_work: int = MAX_WORK, start: frozenset[str] = frozenset(), unused: Sequence[Excluded] = (),
) -> Plan:  # fmt: skip
    """`start`: this plan is made again with one thing changed; reasons for left-out islands are not needed."""
    everyone = candidates(run, inventory, model)
    _require_prices(everyone, goal)
    found = search(everyone, run, model, free, goal, max_work, start)
    found = found or _fastest_within(everyone, run, model, free, goal)
    if found is None:
        raise _infeasible(everyone, run, model, free, goal)
    missing = [] if start else excluded(everyone, found, run, model, goal)
    chosen = dataclasses.replace(run, sync=found.sync)
    plan = assemble(found, missing, chosen, inventory, model, goal, unused)
    return dataclasses.replace(plan, assumptions=assumptions(run, found.kept, model, inventory, bool(free)))


def _fastest_within(
    everyone: Sequence[Candidate], run: RunSettings, model: ModelFacts, free: frozenset[str], goal: Goal
) -> Fleet | None:
    """The fastest plan, if it is within the limits: a search of many islands for another goal can miss every plan
    that is."""
    limits = dataclasses.replace(goal, objective="tokens")
    fastest = None if limits == Goal() else search(everyone, run, model, free, Goal())
    return fastest if fastest and score(fastest, run, model, limits) is not None else None


def _require_prices(everyone: Sequence[Candidate], goal: Goal) -> None:
    if goal.objective == "cost" and not any(c.island.price_per_h or c.island.egress_per_gb for c in everyone):
        raise UsageError(
            "--objective cost needs prices, and no island has one",
            hint="give islands a price, for example `price: 14.0/h`, and `egress: 0.02/GB`",
        )


def _infeasible(
    everyone: Sequence[Candidate], run: RunSettings, model: ModelFacts, free: frozenset[str], goal: Goal
) -> InfeasibleError:
    """Why there is no plan: limits, the quorum, or no island at all; and what to change."""
    fastest = search(everyone, run, model, free, Goal())
    if fastest is not None:
        return _beyond_limits(everyone, fastest, run, model, free, goal)
    alone = dataclasses.replace(run, sync=dataclasses.replace(run.sync, quorum=1))
    without_quorum = search(everyone, alone, model, free, Goal())
    missing = excluded(everyone, without_quorum, run, model, Goal())
    reasons = "; ".join(f"{island.name} {island.reason}" for island in missing[:5])
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


def _beyond_limits(
    everyone: Sequence[Candidate], fastest: Fleet, run: RunSettings, model: ModelFacts, free: frozenset[str], goal: Goal
) -> InfeasibleError:
    """The limits that would be feasible: the fastest plan's days, or the cheapest one's costs."""
    days = math.ceil(100 * run.train.tokens / fastest.tokens_per_s / 86_400) / 100
    if goal.deadline_s is not None and days * 86_400 > goal.deadline_s:
        return InfeasibleError(
            f"no plan reaches {run.train.tokens:,} tokens in {format_duration(goal.deadline_s)}: the fastest takes"
            f" {days:g} d",
            hint=f"--deadline '{days:g} d', or a smaller train.tokens",
        )
    limitless = dataclasses.replace(goal, objective="cost", budget_per_h=None, budget_total=None)
    within = f" with the deadline of {format_duration(goal.deadline_s)}" if goal.deadline_s is not None else ""
    if goal.budget_per_h is not None:
        alone = [search([c], run, model, free, dataclasses.replace(limitless, objective="tokens")) for c in everyone]
        least = min((costs(f, run, model).per_h for f in [*alone, fastest] if f), default=0.0)
        return InfeasibleError(
            f"no plan costs at most {goal.budget_per_h:g}/h{within}: the cheapest costs {least:.2f}/h",
            hint=f"--budget {math.ceil(100 * least) / 100:g}/h",
        )
    cheapest = search(everyone, run, model, free, limitless) or fastest
    total = costs(cheapest, run, model).total
    return InfeasibleError(
        f"no plan costs at most {goal.budget_total:,.0f} in all{within}: the cheapest costs {total:,.0f}",
        hint=f"--budget {math.ceil(total)}/run, or a smaller train.tokens",
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
            origin = "given" if origins is None else _place(origins[f"sync.{key}"])
        found.append(Setting(f"sync.{key}", str(value), origin, key not in free))
    return tuple(found)


def _place(origin: str) -> str:
    """`run.yaml:12` of `/somewhere/run.yaml:12`, so that a plan does not depend on the folder of its files."""
    return origin if origin.startswith("--") else origin.rpartition("/")[2]
