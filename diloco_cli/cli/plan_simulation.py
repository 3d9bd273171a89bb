"""`plan --simulate`: the plan's failures as events in virtual time, beside its closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

from diloco_cli.units import format_count

if TYPE_CHECKING:
    from diloco_cli.plan.plan import Plan

DAYS, SEEDS = 30.0, (0, 1, 2)


@dataclass(frozen=True)
class Simulated:
    """Percent are means over the seeds. `failures_percent` of the work is left by failures in the simulation,
    `closed_form_percent` by the plan's formula; `tokens_per_s` puts the former in the latter's place."""

    days: float
    seeds: tuple[int, ...]
    failures: int
    failures_percent: float
    failures_sd: float
    closed_form_percent: float
    uptime_percent: float
    tokens_per_s: float


def simulated(plan: Plan) -> Simulated:
    """Every island fails and comes back as its MTBF and restart say; three histories of a month."""
    from diloco_cli.simulate.goodput import simulate_row
    from diloco_cli.simulate.planned import learners_of_plan, rules_of_plan
    from diloco_cli.simulate.published import PUBLISHED
    from diloco_cli.simulate.slots import SlotMemory

    chips = sum(island.devices for island in plan.islands)
    rules, memory = rules_of_plan(plan), SlotMemory(remember=True)
    row = simulate_row("decoupled", learners_of_plan(plan), chips, PUBLISHED, DAYS, SEEDS, "fast", rules, memory)
    after_link, after_failures = plan.prediction.waterfall[-2:]
    return Simulated(
        days=DAYS,
        seeds=SEEDS,
        failures=row.failures,
        failures_percent=row.goodput_percent,
        failures_sd=row.goodput_sd,
        closed_form_percent=100 * after_failures.tokens_per_s / after_link.tokens_per_s,
        uptime_percent=row.uptime_percent,
        tokens_per_s=after_link.tokens_per_s * row.goodput_percent / 100,
    )


def simulation_text(plain: Mapping[str, Any]) -> str:
    found = Simulated(**plain)
    histories = f"{len(found.seeds)} histories of {found.days:g} days, {found.failures} failures"
    left = f"they leave {found.failures_percent:.1f} % (sd {found.failures_sd:.1f}) of the work"
    text = (
        f"simulated  {histories}: {left}, by the closed form {found.closed_form_percent:.1f} %; somebody trains"
        f" {found.uptime_percent:.2f} % of the time; {format_count(found.tokens_per_s)} tok/s"
    )
    return fill(text, 80, subsequent_indent=" " * 11)
