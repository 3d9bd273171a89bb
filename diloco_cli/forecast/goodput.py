"""Goodput and uptime of a failing fleet, or of a plan's islands: decoupled learners, and the same chips as one
data-parallel learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from statistics import fmean, stdev
from textwrap import fill
from typing import Any, Literal

from diloco_cli.errors import UsageError
from diloco_cli.forecast.chips import (
    DAY_MS,
    MS,
    ChipsLearner,
    Constants,
    Presence,
    Repair,
    Timeline,
    equal_learners,
    fleet_goodput,
    fleet_uptime,
    generator,
    leap,
    one_cluster,
    presence,
)
from diloco_cli.plan.candidates import restart_s
from diloco_cli.plan.flow import drift_s
from diloco_cli.plan.plan import Plan
from diloco_cli.quantities import format_count

Method = Literal["data_parallel_no_elasticity", "data_parallel_elastic", "decoupled"]
PUBLISHED = Constants(repair=Repair(scale_s=60.0, shape=1.3, exponent=1.2))
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
METHOD_NUMBERS: dict[Method, int] = {"data_parallel_no_elasticity": 0, "data_parallel_elastic": 1, "decoupled": 2}
LEAST_DAYS = 0.01
MAX_FAILURES = 10_000_000  # of one history: they are drawn at once


@dataclass(frozen=True)
class PublishedRow:
    """Percent of chip time and of time, by `CHIPS`."""

    method: Method
    learners: int
    goodput: tuple[int, ...]
    uptime: tuple[int, ...]


GOODPUT = (
    PublishedRow("data_parallel_no_elasticity", 1, (72, 57, 38, 27, 18), (72, 57, 38, 27, 18)),
    PublishedRow("data_parallel_elastic", 1, (88, 80, 69, 58, 40), (88, 81, 69, 59, 42)),
    PublishedRow("decoupled", 2, (94, 88, 80, 70, 54), (100, 97, 96, 90, 80)),
    PublishedRow("decoupled", 4, (96, 93, 89, 82, 73), (100, 100, 99, 99, 99)),
    PublishedRow("decoupled", 8, (98, 96, 94, 88, 80), (100, 100, 100, 100, 99)),
    PublishedRow("decoupled", 16, (99, 98, 96, 93, 86), (100, 100, 100, 100, 99)),
)


@dataclass(frozen=True)
class GoodputRow:
    """One cell of each table, in percent: means over the seeds, `_sd` their standard deviation (None for one seed).
    `slices`: of all learners together."""

    method: Method
    learners: int
    chips: int
    slices: int
    goodput_percent: float
    uptime_percent: float
    goodput_sd: float | None
    uptime_sd: float | None
    failures: int
    published_goodput_percent: float | None = None
    published_uptime_percent: float | None = None


def published_grid(constants: Constants, days: float, seeds: Sequence[int]) -> Iterator[GoodputRow]:
    """Every cell of the published table, row by row, with the published figure if it is for the same interrupts."""
    most = max(GOODPUT, key=lambda row: row.learners).learners
    check_work(equal_learners(max(CHIPS), most, constants), days)
    comparable = constants.mtbi_s == PUBLISHED.mtbi_s
    for published in GOODPUT:
        for chips, goodput, uptime in zip(CHIPS, published.goodput, published.uptime, strict=True):
            learners = equal_learners(chips, published.learners, constants)
            row = simulate_row(published.method, learners, chips, constants, days, seeds)
            if comparable:
                row = replace(row, published_goodput_percent=float(goodput), published_uptime_percent=float(uptime))
            yield row


def all_methods(
    learners: Sequence[ChipsLearner],
    chips: int,
    constants: Constants,
    days: float,
    seeds: Sequence[int],
) -> Iterator[GoodputRow]:
    """One fleet by all three methods."""
    check_work(learners, days)
    for method in METHOD_NUMBERS:
        yield simulate_row(method, learners, chips, constants, days, seeds)


def check_work(learners: Sequence[ChipsLearner], days: float) -> None:
    """Refuse a simulation that would take too much memory."""
    failures = days * DAY_MS / MS * sum(learner.slices * learner.failures_per_s for learner in learners)
    if not failures <= MAX_FAILURES:
        fewer = days * MAX_FAILURES / failures
        raise UsageError(
            f"{failures:.2g} failures are to be expected in {days:g} days, more than {MAX_FAILURES:,}",
            hint=f"--days {_below(fewer)}" if fewer >= LEAST_DAYS else "fewer chips, or ones that fail more rarely",
        )


def _below(days: float) -> str:
    return f"{floor(days / LEAST_DAYS) * LEAST_DAYS:.2f}"


def simulate_row(
    method: Method,
    learners: Sequence[ChipsLearner],
    chips: int,
    constants: Constants,
    days: float,
    seeds: Sequence[int],
) -> GoodputRow:
    """Simulate one fleet once per seed. For data-parallel the learners' chips become one learner."""
    fleet = fleet_of(method, learners, constants)
    goodputs, uptimes, failures = [], [], 0
    for seed in seeds:
        streams = (seed, METHOD_NUMBERS[method], chips, len(fleet))
        timelines = leap(fleet, round(days * DAY_MS), generator(*streams))
        goodputs.append(100 * fleet_goodput(timelines))
        uptimes.append(100 * fleet_uptime(timelines))
        failures += sum(timeline.failures for timeline in timelines)
    return GoodputRow(
        method=method,
        learners=len(fleet),
        chips=chips,
        slices=sum(learner.slices for learner in fleet),
        goodput_percent=fmean(goodputs),
        uptime_percent=fmean(uptimes),
        goodput_sd=_sd(goodputs),
        uptime_sd=_sd(uptimes),
        failures=failures,
    )


def fleet_of(method: Method, learners: Sequence[ChipsLearner], constants: Constants) -> tuple[ChipsLearner, ...]:
    if method == "decoupled":
        return tuple(learners)
    return (one_cluster(tuple(learners), elastic=method == "data_parallel_elastic", constants=constants),)


def _sd(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def learners_of_plan(plan: Plan) -> tuple[ChipsLearner, ...]:
    """Each island is one learner that fails as a whole and is restarted. A "step" is one slot's work, after which a
    learner reports. Time away has the fitted form, scaled to the island's restart; the work that a failed island had
    not offered yet (half a round on average) is done again, as a pause when it is back. An island's share counts by its
    tokens per second."""
    settings = {island.name: island for island in plan.inventory.islands}
    made = []
    for island in plan.islands:
        if island.name not in settings:
            raise UsageError(f"the plan's island {island.name!r} is not in the plan's inventory", hint="diloco plan")
        mtbf_s = settings[island.name].mtbf_s
        made.append(
            ChipsLearner(
                name=island.name,
                slices=1,
                failures_per_s=1.0 / mtbf_s if mtbf_s else 0.0,
                step_ms=max(1, round(plan.schedule.slot_s * MS)),
                down_ms=0,
                up_ms=round(plan.schedule.round_s / 2 * MS),
                repair=PUBLISHED.repair.with_mean(restart_s(settings[island.name])),
                weight=island.tokens_per_s,
            )
        )
    return tuple(made)


DAYS, SEEDS = 30.0, (0, 1, 2)


@dataclass(frozen=True)
class Simulated:
    """Percent are means over the seeds. `failures_percent`: the share of the work that failures leave, simulated;
    `closed_form_percent`: the same by the plan's formula; `tokens_per_s`: the plan's, with the simulated share. At
    least `quorum` islands train for `quorum_percent` of the time; without a quorum learners step on up to the drift
    bound, and later steps do not count."""

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


def histories_of_plan(plan: Plan, days: float, seeds: Sequence[int]) -> Iterator[list[Timeline]]:
    """Every island fails and comes back by its MTBF and restart time."""
    chips, learners = sum(island.devices for island in plan.islands), learners_of_plan(plan)
    for seed in seeds:
        streams = seed, METHOD_NUMBERS["decoupled"], chips, len(learners)
        yield leap(learners, round(days * DAY_MS), generator(*streams))


def presence_of_plan(plan: Plan, history: Sequence[Timeline]) -> Presence:
    return presence(history, plan.schedule.quorum, drift_s(plan.run.sync, plan.schedule))


def simulated(plan: Plan) -> Simulated:
    """Three histories of a month."""
    histories, quorum = list(histories_of_plan(plan, DAYS, SEEDS)), plan.schedule.quorum
    together = [presence_of_plan(plan, history) for history in histories]
    counted = [each.goodput for each in together]
    after_link, after_failures = plan.prediction.waterfall[-2:]
    return Simulated(
        days=DAYS,
        seeds=SEEDS,
        failures=sum(timeline.failures for history in histories for timeline in history),
        failures_percent=100 * fmean(counted),
        failures_sd=100 * stdev(counted),
        closed_form_percent=100 * after_failures.tokens_per_s / after_link.tokens_per_s,
        uptime_percent=100 * fmean(each.uptime for each in together),
        tokens_per_s=after_link.tokens_per_s * fmean(counted),
        quorum=quorum,
        quorum_percent=100 * fmean(each.share for each in together),
        closed_form_quorum_percent=100 * plan.prediction.quorum_probability,
    )


def simulation_text(plain: Mapping[str, Any]) -> str:
    found = Simulated(**plain)
    histories = f"{len(found.seeds)} histories of {found.days:g} days, {found.failures} failures"
    left = f"they leave {found.failures_percent:.1f} % (sd {found.failures_sd:.1f}) of the work"
    at_least = "an island trains" if found.quorum == 1 else f"the quorum of {found.quorum} trains"
    formula = f"by the closed form {found.closed_form_quorum_percent:.2f} %"
    text = (
        f"simulated  {histories}: {left}, by the closed form {found.closed_form_percent:.1f} %; {at_least}"
        f" {found.quorum_percent:.2f} % of the time, {formula}; {format_count(found.tokens_per_s)} tok/s"
    )
    return fill(text, 80, subsequent_indent=" " * 11)
