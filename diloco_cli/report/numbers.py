# ruff: noqa: RUF009
"""The numbers of a report: what a run did, what it took, what was planned."""

from __future__ import annotations

from dataclasses import dataclass
from json import dumps
from operator import mul

import msgspec

from diloco_cli.config.fields import origin_of, values_of
from diloco_cli.config.settings import RunSettings
from diloco_cli.engines.port import Job
from diloco_cli.observe.facts import RunFacts
from diloco_cli.observe.fields import Fields, made
from diloco_cli.observe.status import LearnerStatus, Status, status_of
from diloco_cli.observe.summary import LearnerSummary, OneSummary, Summary
from diloco_cli.plan.flow import CLASS_A_PRICE, CLASS_B_PRICE
from diloco_cli.plan.plan import Money, PlannedIsland, Prediction, Setting, SyncerNeeds
from diloco_cli.protocol.log.keys import PLAN_KEY
from diloco_cli.protocol.log.metrics import QUIET_OUTCOMES
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES
from diloco_cli.report.history import MAX_MARKS, Mark, RunHistory
from diloco_cli.store.port import Store

GB = 1e9
HOUR_S = 3600.0
MOST = 1e18  # whoever may write the plan may write any number


@dataclass(frozen=True)
class ReportSource(OneSummary):
    """What a report is computed from. `events`: what happened, oldest first."""

    history: RunHistory
    plan: LaunchPlan | None
    events: list[Mark]

    @property
    def scale(self) -> float:
        """What all islands would train undisturbed where the run was launched, by what the plan says."""
        ideal = sum(island.tokens_per_s for island in self.facts.run.islands)
        stated = self.plan.prediction.tokens_per_s_ideal if self.plan is not None else 0.0
        return ideal / stated if stated > 0 else 1.0

    def restarts(self, learner: str) -> int:
        return self.history.learners[learner].restarts if learner in self.history.learners else 0

    @property
    def rows(self) -> list[LearnerRow]:
        return [made(LearnerRow, (self, learner)) for learner in self.status.learners]


of_report, of_row = Fields[ReportSource](), Fields[tuple[ReportSource, LearnerStatus]]()


@dataclass(frozen=True)
class LearnerRow(LearnerSummary):
    """Bytes are the learner's own statement; 0: not heard."""

    participation: float = of_row(lambda it: it[0].history.participation(it[1].name), "Of the merges.")
    restarts: int = of_row(lambda it: it[0].restarts(it[1].name), "How often it took part again with a new process.")
    up_bytes: int = of_row(lambda it: it[1].up_bytes, "Sent over its link.")
    down_bytes: int = of_row(lambda it: it[1].down_bytes, "Received over its link.")
    data_percent: float | None = of_row(lambda it: it[1].data_percent, "Of its steps' time, waits for data.")


@dataclass(frozen=True)
class RegionRow:
    """`mirrored_bytes`: between the home bucket and the region's own. Money in the inventory's currency."""

    name: str
    learners: int
    tokens: int
    up_bytes: int
    down_bytes: int
    mirrored_bytes: int
    accelerators: float
    egress: float


@dataclass(frozen=True)
class Survived:
    """What the run survived. `restarts`: how often a learner took part again, but for a stop. `injected`: faults by
    `diloco chaos`, as far as their events are kept. `outage_s`: without a merge for much longer than a slot, in
    `outages` stretches. `refused_offers`: as events tell them, without those that the run's end or a newer offer
    settled."""

    restarts: int
    takeovers: int
    injected: int
    rollbacks: int
    refused_offers: int
    outages: int
    outage_s: float


@dataclass(frozen=True)
class Cost:
    """`planned`: up to the target, by the plan. Islands are charged from the first commit to the last; requests at a
    guess of public price lists; storage is not in it."""

    accelerators: float
    egress: float
    requests: float
    total: float
    planned: float


@dataclass(frozen=True)
class Level:
    name: str
    tokens_per_s: float


@dataclass(frozen=True)
class SettingRow:
    name: str
    value: str
    origin: str


def _faults(history: RunHistory, events: list[Mark]) -> Survived:
    return Survived(
        restarts=sum(took.restarts for took in history.learners.values()),
        takeovers=history.takeovers,
        injected=sum(mark.kind == "chaos" for mark in events),
        rollbacks=history.rollbacks,
        refused_offers=sum(n for reason, n in history.refused.items() if reason not in QUIET_OUTCOMES),
        outages=len(history.outages),
        outage_s=sum(end - start for start, end in history.outages),
    )


def _egress(learner: LearnerStatus | LearnerRow, plan: LaunchPlan | None) -> float:
    if plan is None:
        return 0.0
    return (
        learner.up_bytes * plan.egress_per_gb(learner.name) + learner.down_bytes * plan.download_per_gb(learner.name)
    ) / GB


def _cost(it: ReportSource, plan: LaunchPlan) -> Cost:
    accelerators = sum(island.price_per_h for island in plan.islands) * it.wall_s / HOUR_S
    egress = sum(_egress(learner, plan) for learner in it.status.learners)
    egress += sum(mirror.egress_cost for mirror in it.status.mirrors)
    reads = it.store.requests - it.store.writes
    requests = it.store.writes * CLASS_A_PRICE + reads * CLASS_B_PRICE
    return Cost(accelerators, egress, requests, accelerators + egress + requests, plan.money.total)


def _measured(it: ReportSource) -> list[Level]:
    """From what all islands would have trained, undisturbed, to what was merged; each step by what it says alone. An
    island is absent from the merges that it took no part in, and weighs by its speed."""
    islands, history, wall_s = it.facts.run.islands, it.history, it.wall_s
    ideal = sum(island.tokens_per_s for island in islands)
    if wall_s <= 0 or ideal <= 0 or not history.merges:
        return []
    start_s = history.merges[0].s
    without_s = start_s + sum(end - start for start, end in history.outages)
    after_start, after_outages = (max(0.0, 1 - gone_s / wall_s) for gone_s in (start_s, without_s))
    present = [history.participation(island.name) for island in islands]
    levels = [
        Level("ideal", ideal),
        Level("after the start", ideal * after_start),
        Level("after outages", ideal * after_outages),
        Level("after absences", after_outages * sum(map(mul, (i.tokens_per_s for i in islands), present))),
    ]
    heard = [it.facts.learners.get(island.name) for island in islands]
    speeds = [0.0 if learner is None else learner.heartbeat.mean_tokens_per_s for learner in heard]
    if all(0 < speed <= MOST for speed in speeds):
        levels.append(Level("at real speeds", after_outages * sum(map(mul, speeds, present))))
    return [*levels, Level("merged", it.status.tokens / wall_s)]


def _regions(it: ReportSource) -> list[RegionRow]:
    mirrors = {mirror.region: mirror for mirror in it.status.mirrors}
    prices = {} if it.plan is None else {island.name: island.price_per_h for island in it.plan.islands}
    rows = []
    for region in sorted({learner.region for learner in it.status.learners}):
        mine, mirror = [one for one in it.status.learners if one.region == region], mirrors.get(region)
        egress = sum(_egress(learner, it.plan) for learner in mine)
        rows.append(
            RegionRow(
                name=region,
                learners=len(mine),
                tokens=sum(learner.tokens for learner in mine),
                up_bytes=sum(learner.up_bytes for learner in mine),
                down_bytes=sum(learner.down_bytes for learner in mine),
                mirrored_bytes=0 if mirror is None else mirror.up_bytes + mirror.down_bytes,
                accelerators=sum(prices.get(learner.name, 0.0) for learner in mine) * it.wall_s / HOUR_S,
                egress=egress + (0.0 if mirror is None else mirror.egress_cost),
            )
        )
    return rows


def settings_of(settings: RunSettings, plan: LaunchPlan | None) -> list[SettingRow]:
    """Every setting with its value, and where that came from, by the plan; without one nobody knows."""
    return [
        SettingRow(key, dumps(value), "unknown" if plan is None else plan.origin(key))
        for key, value in values_of(settings)
    ]


@dataclass(frozen=True)
class Report(Summary):
    """The data of `diloco report --json`: the run's summary, and what the log and the plan tell besides."""

    reason: str = of_report(lambda it: it.status.reason, "Why it is in its state.")
    started_at: str = of_report(lambda it: it.state.metrics.started_at, "Of the first commit.")
    ended_at: str = of_report(lambda it: it.state.metrics.updated_at, "Of the newest commit.")
    tokens_target: int = of_report(lambda it: it.status.tokens_target, "Merged tokens at which the run ends.")
    tokens_per_s: float | None = of_report(
        lambda it: it.status.tokens / it.wall_s if it.wall_s else None, "Mean of the whole run."
    )
    planned_tokens_per_s: float | None = of_report(
        lambda it: it.plan.prediction.tokens_per_s * it.scale if it.plan else None,
        "As the plan predicts on the machines of the launch; null: no plan.",
    )
    planned_goodput: float | None = of_report(
        lambda it: it.plan.prediction.goodput if it.plan else None, "As the plan predicts."
    )
    skips: int = of_report(lambda it: it.history.skips, "Slots without a merge.")
    faults: Survived = of_report(lambda it: _faults(it.history, it.events), "What the run survived.")
    cost: Cost | None = of_report(lambda it: _cost(it, it.plan) if it.plan else None, "By the plan's prices.")
    planned: list[Level] = of_report(
        lambda it: [Level(s.name, s.tokens_per_s * it.scale) for s in it.plan.prediction.waterfall] if it.plan else [],
        "From planned speeds to merged tokens, as predicted.",
    )
    measured: list[Level] = of_report(_measured, "The same, as it was.")
    learners: list[LearnerRow] = of_report(lambda it: it.rows, "All islands.")  # type: ignore[assignment]
    regions: list[RegionRow] = of_report(_regions, "Their learners' sums.")
    jobs: list[Job] = of_report(lambda it: it.status.jobs, "As `status` tells them, while the run goes on.")
    events: list[Mark] = of_report(lambda it: it.events[-MAX_MARKS:], "What happened, oldest first.")
    events_left_out: int = of_report(lambda it: max(0, len(it.events) - MAX_MARKS), "Older ones.")
    settings: list[SettingRow] = of_report(
        lambda it: settings_of(it.facts.run.settings, it.plan), "Every setting, and where it came from."
    )
    software: str = of_report(lambda it: it.facts.run.software, "The version that created the run.")


def report_of(
    facts: RunFacts, history: RunHistory, plan: LaunchPlan | None, events: list[Mark], status: Status | None = None
) -> Report:
    """`status`: with what this machine knows of the run, so that both say the same."""
    return made(Report, ReportSource(facts, status or status_of(facts), history, plan, events))


# -- the plan that `launch` left in the bucket ---------------------------------------------------------------------


class LaunchPlan(msgspec.Struct, frozen=True):
    """The fields of `diloco plan --json` that a report or a job's submission uses, and where each setting of the run
    file came from. A plan that cannot be read is a report without one."""

    prediction: Prediction
    money: Money
    islands: tuple[PlannedIsland, ...] = ()
    syncer: SyncerNeeds | None = None
    settings: tuple[Setting, ...] = ()
    origins: dict[str, str] = {}

    def island(self, name: str) -> PlannedIsland | None:
        return next((island for island in self.islands if island.name == name), None)

    def egress_per_gb(self, name: str) -> float:
        """The price of what leaves this island: the plan states it by the day, for as many bytes from each island."""
        island, gb_per_day = self.island(name), self.money.egress_gb_per_day / max(1, len(self.islands))
        return 0.0 if island is None or gb_per_day <= 0 else island.egress_per_day / gb_per_day

    def download_per_gb(self, name: str) -> float:
        """The price of what this island reads, likewise: of as many bytes to each that has one."""
        island, priced = self.island(name), sum(island.downloads_per_day > 0 for island in self.islands)
        gb_per_day = self.money.downloads_gb_per_day / max(1, priced)
        return 0.0 if island is None or gb_per_day <= 0 else island.downloads_per_day / gb_per_day

    def origin(self, key: str) -> str:
        searched = next((s.origin for s in self.settings if s.name == key and s.origin != "given"), None)
        return searched or origin_of(self.origins, key)


def read_launch_plan(store: Store) -> LaunchPlan | None:
    data = store.get(PLAN_KEY, MAX_RECORD_BYTES)
    try:
        plan = None if data is None else msgspec.json.decode(data, type=LaunchPlan)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return plan if plan is not None and all(0 <= number <= MOST for number in _numbers(plan)) else None


def _numbers(plan: LaunchPlan) -> list[float]:
    """All that are drawn or added up."""
    p, money = plan.prediction, plan.money
    of_islands = [
        number
        for island in plan.islands
        for number in (island.price_per_h, island.egress_per_day, island.downloads_per_day)
    ]
    memory = [number for i in plan.islands for number in (i.host_memory_gb_needed, i.memory_gb_needed)]
    memory += [] if plan.syncer is None else [plan.syncer.memory_gb]
    rates = [p.tokens_per_s_ideal, p.tokens_per_s, *(stage.tokens_per_s for stage in p.waterfall)]
    return [*memory, *rates, *of_islands, p.goodput, money.total, money.egress_gb_per_day, money.downloads_gb_per_day]
