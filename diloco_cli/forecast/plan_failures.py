"""`plan --simulate`: the plan's failures as events in virtual time, beside its closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from textwrap import fill
from typing import Any

from diloco_cli.forecast.chips import DAY_MS
from diloco_cli.forecast.goodput import METHOD_NUMBERS, learners_of_plan, run_fleet
from diloco_cli.forecast.timeline import presence
from diloco_cli.plan.flow import drift_s
from diloco_cli.plan.plan import Plan
from diloco_cli.units import format_count

DAYS, SEEDS = 30.0, (0, 1, 2)


@dataclass(frozen=True)
class Simulated:
    """Percent are means over the seeds. `failures_percent`: the share of the work that failures leave, simulated;
    `closed_form_percent`: the same by the plan's formula; `tokens_per_s`: the plan's, with the simulated share. At
    least `quorum` islands train for `quorum_percent` of the time; without a quorum learners step on up to the drift
    bound, or, with `adoption: at_tau` (`stands_still`), to the merge that they await, and later steps do not count."""

    days: float
    seeds: tuple[int, ...]
    failures: int
    failures_percent: float
    failures_sd: float
    closed_form_percent: float
    uptime_percent: float
    tokens_per_s: float
    quorum: int
    quorum_percent: float
    closed_form_quorum_percent: float
    stands_still: bool


def simulated(plan: Plan) -> Simulated:
    """Every island fails and comes back by its MTBF and restart time; three histories of a month."""
    chips, learners = sum(island.devices for island in plan.islands), learners_of_plan(plan)
    seeds = [(seed, METHOD_NUMBERS["decoupled"], chips, len(learners)) for seed in SEEDS]
    histories = [run_fleet(learners, round(DAYS * DAY_MS), "fast", each) for each in seeds]
    quorum, stands_still = plan.schedule.quorum, plan.run.sync.adoption == "at_tau"
    together = [presence(timelines, quorum, drift_s(plan.run.sync, plan.schedule)) for timelines in histories]
    counted = [each.goodput for each in together]
    after_link, after_failures = plan.prediction.waterfall[-2:]
    return Simulated(
        days=DAYS,
        seeds=SEEDS,
        failures=sum(timeline.failures for timelines in histories for timeline in timelines),
        failures_percent=100 * fmean(counted),
        failures_sd=100 * stdev(counted),
        closed_form_percent=100 * after_failures.tokens_per_s / after_link.tokens_per_s,
        uptime_percent=100 * fmean(each.uptime for each in together),
        tokens_per_s=after_link.tokens_per_s * fmean(counted),
        quorum=quorum,
        quorum_percent=100 * fmean(each.share for each in together),
        closed_form_quorum_percent=100 * plan.prediction.quorum_probability,
        stands_still=stands_still,
    )


def simulation_text(plain: Mapping[str, Any]) -> str:
    found = Simulated(**plain)
    histories = f"{len(found.seeds)} histories of {found.days:g} days, {found.failures} failures"
    left = f"they leave {found.failures_percent:.1f} % (sd {found.failures_sd:.1f}) of the work"
    at_least = "an island trains" if found.quorum == 1 else f"the quorum of {found.quorum} trains"
    still = ", and no island trains without it" if found.stands_still and found.quorum > 1 else ""
    formula = f"by the closed form {found.closed_form_quorum_percent:.2f} %{still}"
    text = (
        f"simulated  {histories}: {left}, by the closed form {found.closed_form_percent:.1f} %; {at_least}"
        f" {found.quorum_percent:.2f} % of the time, {formula}; {format_count(found.tokens_per_s)} tok/s"
    )
    return fill(text, 80, subsequent_indent=" " * 11)
