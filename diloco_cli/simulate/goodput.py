"""Goodput and uptime of a failing fleet: decoupled learners, and the same chips as one data-parallel learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from diloco_cli.plan.goodput import Stops, elastic_goodput, inelastic_goodput
from diloco_cli.simulate.chips import DAY_MS, MS, Constants, Learner, equal_learners, one_cluster
from diloco_cli.simulate.draws import generator
from diloco_cli.simulate.fast import leap
from diloco_cli.simulate.published import CHIPS, GOODPUT, Method
from diloco_cli.simulate.slots import MergeRules, SlotMemory, merge_all
from diloco_cli.simulate.stepwise import walk
from diloco_cli.simulate.timeline import Timeline, fleet_goodput, fleet_uptime

Form = Literal["stepwise", "unmemoised", "fast"]
METHOD_NUMBERS: dict[Method, int] = {"data_parallel_no_elasticity": 0, "data_parallel_elastic": 1, "decoupled": 2}


@dataclass(frozen=True)
class Row:
    """One cell of each table, in percent: means over the seeds, `_sd` their standard deviation (0 for one seed).
    `participation_percent`: of the learners alive, per merge; None where nothing is merged or the form skips it."""

    method: Method
    learners: int
    chips: int
    goodput_percent: float
    uptime_percent: float
    goodput_sd: float
    uptime_sd: float
    participation_percent: float | None
    closed_form_goodput_percent: float
    closed_form_uptime_percent: float
    failures: int
    published_goodput_percent: float | None = None
    published_uptime_percent: float | None = None


def published_grid(constants: Constants, days: float, seeds: Sequence[int], form: Form) -> Iterator[Row]:
    """Every cell of the published table, row by row, with what was published beside it."""
    for published in GOODPUT:
        memory = SlotMemory(remember=form == "stepwise")
        for chips, goodput, uptime in zip(CHIPS, published.goodput, published.uptime, strict=True):
            learners = equal_learners(chips, published.learners, constants)
            row = simulate_row(published.method, learners, chips, constants, days, seeds, form, MergeRules(), memory)
            yield replace(row, published_goodput_percent=float(goodput), published_uptime_percent=float(uptime))


def all_methods(
    learners: Sequence[Learner],
    chips: int,
    constants: Constants,
    days: float,
    seeds: Sequence[int],
    form: Form,
    rules: MergeRules,
) -> Iterator[Row]:
    """One fleet by all three methods."""
    for method in METHOD_NUMBERS:
        yield simulate_row(method, learners, chips, constants, days, seeds, form, rules, SlotMemory(form == "stepwise"))


def simulate_row(
    method: Method,
    learners: Sequence[Learner],
    chips: int,
    constants: Constants,
    days: float,
    seeds: Sequence[int],
    form: Form,
    rules: MergeRules,
    memory: SlotMemory,
) -> Row:
    """Simulate one fleet once per seed. For data-parallel the learners' chips become one learner."""
    fleet = fleet_of(method, learners, constants)
    horizon_ms = round(days * DAY_MS)
    goodputs, uptimes, shares, failures = [], [], [], 0
    for seed in seeds:
        timelines = run_fleet(fleet, horizon_ms, form, (seed, METHOD_NUMBERS[method], chips, len(fleet)))
        goodputs.append(100 * fleet_goodput(timelines))
        uptimes.append(100 * fleet_uptime(timelines))
        failures += sum(timeline.failures for timeline in timelines)
        if method == "decoupled" and form != "fast":
            shares.append(100 * merge_all(timelines, rules, memory).participation)
    closed = closed_form(fleet)
    return Row(
        method=method,
        learners=len(fleet),
        chips=chips,
        goodput_percent=fmean(goodputs),
        uptime_percent=fmean(uptimes),
        goodput_sd=_sd(goodputs),
        uptime_sd=_sd(uptimes),
        participation_percent=fmean(shares) if shares else None,
        closed_form_goodput_percent=100 * closed[0],
        closed_form_uptime_percent=100 * closed[1],
        failures=failures,
    )


def fleet_of(method: Method, learners: Sequence[Learner], constants: Constants) -> tuple[Learner, ...]:
    if method == "decoupled":
        return tuple(learners)
    return (one_cluster(tuple(learners), elastic=method == "data_parallel_elastic", constants=constants),)


def run_fleet(fleet: Sequence[Learner], horizon_ms: int, form: Form, seeds: tuple[int, ...]) -> list[Timeline]:
    """Every learner's timeline; the same seeds give the same ones in either stepwise form."""
    if form == "fast":
        return leap(fleet, horizon_ms, generator(*seeds))
    return [walk(learner, horizon_ms, generator(*seeds, index)) for index, learner in enumerate(fleet)]


def closed_form(fleet: Sequence[Learner]) -> tuple[float, float]:
    """(goodput, uptime) of the fleet by mean values; the learners fail independently."""
    goodput, idle = 0.0, 1.0
    for learner in fleet:
        stops = Stops(
            slices=learner.slices,
            failures=learner.failures_per_step,
            step_s=learner.step_ms / MS,
            down_s=learner.down_ms / MS,
            up_s=learner.up_ms / MS,
            away_s=learner.repair.mean_s,
            cdf=learner.repair.cdf,
        )
        share, stepping = elastic_goodput(stops) if learner.elastic else (inelastic_goodput(stops),) * 2
        goodput += share * learner.weight / learner.slowdown
        idle *= 1 - stepping
    return goodput / sum(learner.weight for learner in fleet), 1 - idle


def _sd(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
