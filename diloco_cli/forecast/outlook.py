"""What a plan's run will do, and how far that may move: its own syncer and learners in virtual time, then failures.

The fleet plays some rounds without failures. These are rarer than rounds: they leave a share of the work, by histories
as long as the run (goodput.py). Where all links and speeds are lower by some share, all takes as much longer, but
for what does not depend on them: at least the other share is merged. Where all are higher it is at most as much more,
and no more than the syncer holds. What is merged grows with each of them, so that the rest lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco_cli.forecast.fleet import SimulatedFleet
from diloco_cli.forecast.run import BRIEF, SimulatedSpan, confirmed, offers_to_confirm
from diloco_cli.plan.plan import Plan

OFF_PERCENT = 20.0  # of links and speeds
SEEDS = tuple(range(8))  # of histories
LEAST_DAYS, MOST_DAYS = 0.05, 30.0  # of one


OnStart = Callable[[SimulatedFleet, float], object]


@dataclass(frozen=True)
class Outlook:
    """`least` and `most`: with links and speeds `off_percent` lower or higher, by the history that failures leave
    least, or most, of. `planned_tokens_per_s`: the closed form's, which says more by `plan_off_percent`; None: nothing
    was merged. `failures_percent`: what failures leave over all `histories`; 0 of them where no island fails."""

    tokens_per_s: float
    least_tokens_per_s: float
    most_tokens_per_s: float
    planned_tokens_per_s: float
    plan_off_percent: float | None
    off_percent: float
    histories: int
    failures_percent: float
    simulated_s: float


def outlook(plan: Plan, span: SimulatedSpan = BRIEF, on_start: OnStart = lambda fleet, for_s: None) -> Outlook:
    """`on_start` gets the fleet, and for how long it plays. Raises UsageError for more islands and fragments than
    `span` waits for."""
    found, shares = confirmed(plan, on_start, span), _left_by_failures(plan)
    mean, planned, off = sum(shares) / len(shares), plan.prediction.tokens_per_s, OFF_PERCENT / 100
    rate, held = found.tokens_per_s * mean, max(1.0, 100 / max(1.0, plan.syncer.busy_percent))
    return Outlook(
        tokens_per_s=rate,
        least_tokens_per_s=(1 - off) * found.tokens_per_s * min(shares),
        most_tokens_per_s=min(1 + off, held) * found.tokens_per_s * max(shares),
        planned_tokens_per_s=planned,
        plan_off_percent=100 * (planned / rate - 1) if rate else None,
        off_percent=OFF_PERCENT,
        histories=len(shares) if len(shares) > 1 else 0,
        failures_percent=100 * mean,
        simulated_s=found.simulated_s,
    )


def _left_by_failures(plan: Plan) -> list[float]:
    """The share of the work, by history."""
    fails = {island.name for island in plan.inventory.islands if island.mtbf_s is not None}
    if fails.isdisjoint(island.name for island in plan.islands):
        return [1.0]
    from diloco_cli.forecast.goodput import histories_of_plan, presence_of_plan

    days = min(MOST_DAYS, max(LEAST_DAYS, plan.prediction.days_to_target))
    return [presence_of_plan(plan, history).goodput for history in histories_of_plan(plan, days, SEEDS)]


@dataclass(frozen=True)
class Rival:
    """Another plan, and what it merges. `better_percent`: than the plan that was chosen, by the goal's objective."""

    plan: Plan
    tokens_per_s: float
    better_percent: float


def rivalry(
    plan: Plan,
    found: Outlook,
    rivals: Sequence[Plan],
    span: SimulatedSpan,
    on_start: OnStart = lambda fleet, for_s: None,
) -> list[Rival]:
    """The best first; as many as `span` waits for in all; none where the plan itself merged nothing."""
    if not found.tokens_per_s:
        return []
    played, offers = list[Rival](), offers_to_confirm(plan, span)
    for other in rivals:
        offers += offers_to_confirm(other, span)
        if offers <= span.most_offers:
            rate = outlook(other, span, on_start).tokens_per_s
            played.append(Rival(other, rate, 100 * (_worth(other, rate) / _worth(plan, found.tokens_per_s) - 1)))
    return sorted(played, key=lambda rival: -rival.better_percent)


def _worth(plan: Plan, tokens_per_s: float) -> float:
    """Tokens a second, or for the money of the plan's own pace."""
    total = plan.money.total if plan.goal.objective == "cost" else 0.0
    return tokens_per_s / (total * plan.prediction.tokens_per_s) if total else tokens_per_s
