"""Goodput and uptime of a failing fleet, or of a plan's islands: decoupled learners, and the same chips as one
data-parallel learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor
from statistics import fmean, stdev
from typing import Literal

from diloco_cli.errors import UsageError
from diloco_cli.forecast.chips import DAY_MS, MS, ChipsLearner, Constants, equal_learners, one_cluster
from diloco_cli.forecast.failing import generator, leap, walk
from diloco_cli.forecast.published import CHIPS, GOODPUT, PUBLISHED, Method
from diloco_cli.forecast.slots import MergeRules, SlotMemory, merge_all
from diloco_cli.forecast.timeline import Presence, Timeline, fleet_goodput, fleet_uptime, presence
from diloco_cli.plan.flow import drift_s
from diloco_cli.plan.goodput import (
    Stops,
    elastic_goodput,
    inelastic_goodput,
    probability_at_least,
    restart_s,
    waiting,
)
from diloco_cli.plan.plan import Plan

Form = Literal["stepwise", "unmemoised", "fast"]
METHOD_NUMBERS: dict[Method, int] = {"data_parallel_no_elasticity": 0, "data_parallel_elastic": 1, "decoupled": 2}
LEAST_DAYS = 0.01
MAX_FAILURES = 10_000_000  # of one history: they are drawn at once
MAX_STEPS = 200_000_000  # of all histories: minutes


@dataclass(frozen=True)
class GoodputRow:
    """One cell of each table, in percent: means over the seeds, `_sd` their standard deviation (None for one seed).
    `slices`: of all learners together. `quorum_percent`: of the time in which the quorum is present; None for K = 1.
    `participation_percent`: of the learners alive, per merge; None if nothing is merged or the form does not simulate
    merges."""

    method: Method
    learners: int
    chips: int
    slices: int
    goodput_percent: float
    uptime_percent: float
    goodput_sd: float | None
    uptime_sd: float | None
    quorum_percent: float | None
    participation_percent: float | None
    closed_form_goodput_percent: float
    closed_form_uptime_percent: float
    failures: int
    published_goodput_percent: float | None = None
    published_uptime_percent: float | None = None


def published_grid(constants: Constants, days: float, seeds: Sequence[int], form: Form) -> Iterator[GoodputRow]:
    """Every cell of the published table, row by row, with the published figure if it is for the same interrupts."""
    most = max(GOODPUT, key=lambda row: row.learners).learners
    check_work(equal_learners(max(CHIPS), most, constants), days, len(seeds), form)
    comparable = constants.mtbi_s == PUBLISHED.mtbi_s
    for published in GOODPUT:
        memory = SlotMemory(remember=form == "stepwise")
        for chips, goodput, uptime in zip(CHIPS, published.goodput, published.uptime, strict=True):
            learners = equal_learners(chips, published.learners, constants)
            row = simulate_row(published.method, learners, chips, constants, days, seeds, form, MergeRules(), memory)
            if comparable:
                row = replace(row, published_goodput_percent=float(goodput), published_uptime_percent=float(uptime))
            yield row


def all_methods(
    learners: Sequence[ChipsLearner],
    chips: int,
    constants: Constants,
    days: float,
    seeds: Sequence[int],
    form: Form,
    rules: MergeRules,
) -> Iterator[GoodputRow]:
    """One fleet by all three methods."""
    check_work(learners, days, len(seeds), form)
    for method in METHOD_NUMBERS:
        yield simulate_row(method, learners, chips, constants, days, seeds, form, rules, SlotMemory(form == "stepwise"))


def check_work(learners: Sequence[ChipsLearner], days: float, histories: int, form: Form) -> None:
    """Refuse a simulation that would take too much memory, or hours."""
    horizon_s = days * DAY_MS / MS
    failures = horizon_s * sum(learner.slices * learner.failures_per_s for learner in learners)
    if not failures <= MAX_FAILURES:
        fewer = days * MAX_FAILURES / failures
        raise UsageError(
            f"{failures:.2g} failures are to be expected in {days:g} days, more than {MAX_FAILURES:,}",
            hint=f"--days {_below(fewer)}" if fewer >= LEAST_DAYS else "fewer chips, or ones that fail more rarely",
        )
    steps = histories * horizon_s * sum(MS / learner.step_ms for learner in learners)
    if form != "fast" and not steps <= MAX_STEPS:
        fewer = days * MAX_STEPS / steps
        shorter = f", or --days {_below(fewer)}" if fewer >= LEAST_DAYS else ""
        raise UsageError(
            f"the learners would make {steps:.2g} steps in {histories} x {days:g} days, more than {MAX_STEPS:,}",
            hint=f"--fast, which leaves out steps and merges{shorter}",
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
    form: Form,
    rules: MergeRules,
    memory: SlotMemory,
) -> GoodputRow:
    """Simulate one fleet once per seed. For data-parallel the learners' chips become one learner."""
    fleet = fleet_of(method, learners, constants)
    horizon_ms = round(days * DAY_MS)
    quorum = rules.quorum if method == "decoupled" else 1
    goodputs, uptimes, quorums, shares, failures = [], [], [], [], 0
    for seed in seeds:
        timelines = run_fleet(fleet, horizon_ms, form, (seed, METHOD_NUMBERS[method], chips, len(fleet)))
        found = _together(timelines, quorum, rules.drift_s)
        goodputs.append(100 * found.goodput)
        uptimes.append(100 * found.uptime)
        quorums.append(100 * found.share)
        failures += sum(timeline.failures for timeline in timelines)
        if method == "decoupled" and form != "fast":
            shares.append(100 * merge_all(timelines, rules, memory).participation)
    closed = closed_form(fleet, quorum, rules.drift_s)
    return GoodputRow(
        method=method,
        learners=len(fleet),
        chips=chips,
        slices=sum(learner.slices for learner in fleet),
        goodput_percent=fmean(goodputs),
        uptime_percent=fmean(uptimes),
        goodput_sd=_sd(goodputs),
        uptime_sd=_sd(uptimes),
        quorum_percent=fmean(quorums) if quorum > 1 else None,
        participation_percent=fmean(shares) if shares else None,
        closed_form_goodput_percent=100 * closed[0],
        closed_form_uptime_percent=100 * closed[1],
        failures=failures,
    )


def _together(timelines: Sequence[Timeline], quorum: int, drift_s: float) -> Presence:
    if quorum > 1:
        return presence(timelines, quorum, drift_s)
    uptime = fleet_uptime(timelines)
    return Presence(uptime, uptime, fleet_goodput(timelines))


def fleet_of(method: Method, learners: Sequence[ChipsLearner], constants: Constants) -> tuple[ChipsLearner, ...]:
    if method == "decoupled":
        return tuple(learners)
    return (one_cluster(tuple(learners), elastic=method == "data_parallel_elastic", constants=constants),)


def run_fleet(fleet: Sequence[ChipsLearner], horizon_ms: int, form: Form, seeds: tuple[int, ...]) -> list[Timeline]:
    """Every learner's timeline; the same seeds give the same ones in either stepwise form."""
    if form == "fast":
        return leap(fleet, horizon_ms, generator(*seeds))
    return [walk(learner, horizon_ms, generator(*seeds, index)) for index, learner in enumerate(fleet)]


def closed_form(fleet: Sequence[ChipsLearner], quorum: int = 1, drift_s: float = 0.0) -> tuple[float, float]:
    """(goodput, uptime) of the fleet by mean values; the learners fail independently, and step on for `drift_s` while
    the quorum is missing."""
    shares = [_closed_form_alone(learner) for learner in fleet]
    stepping = [share for _, share in shares]
    waits = waiting(quorum, stepping, [learner.slices * learner.failures_per_s for learner in fleet], drift_s)
    goodput = sum(
        share * moving * learner.weight / learner.slowdown
        for learner, (share, _), moving in zip(fleet, shares, waits.moving, strict=True)
    )
    anybody, enough = probability_at_least(1, stepping), probability_at_least(quorum, stepping)
    return goodput / sum(learner.weight for learner in fleet), anybody - (anybody - enough) * waits.still


def _closed_form_alone(learner: ChipsLearner) -> tuple[float, float]:
    """(goodput, uptime) of one learner."""
    stops = Stops(
        slices=learner.slices,
        failures=learner.failures_per_step,
        step_s=learner.step_ms / MS,
        down_s=learner.down_ms / MS,
        up_s=learner.up_ms / MS,
        away_s=learner.repair.mean_s,
        cdf=learner.repair.cdf,
    )
    return elastic_goodput(stops) if learner.elastic else (inelastic_goodput(stops),) * 2


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


def rules_of_plan(plan: Plan) -> MergeRules:
    """Quorum, overlap, grace and drift bound as planned."""
    return MergeRules(
        quorum=plan.schedule.quorum,
        overlap=plan.schedule.overlap,
        gamma=plan.run.sync.grace.gamma,
        sync_s=plan.schedule.exchange_s,
        skip_after_s=plan.run.sync.skip_after_s,
        drift_s=drift_s(plan.run.sync, plan.schedule),
    )
