# ruff: noqa: RUF009
"""The numbers of a report: what a run did, what it took, what was planned."""

from __future__ import annotations

from dataclasses import dataclass
from json import dumps
from operator import mul

import msgspec

from diloco_cli.config.fields import origin_of, values_of
from diloco_cli.config.settings import RunSettings
from diloco_cli.observe.facts import Local, RunFacts
from diloco_cli.observe.fields import Fields, made
from diloco_cli.observe.status import LearnerStatus, Status, status_of
from diloco_cli.observe.summary import Summary, summary_of
from diloco_cli.plan.money import CLASS_A_PRICE, CLASS_B_PRICE
from diloco_cli.plan.plan import Money, PlannedIsland, Prediction, Setting
from diloco_cli.protocol.log.keys import PLAN_KEY
from diloco_cli.protocol.log.metrics import QUIET_OUTCOMES
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES
from diloco_cli.report.history import Mark, RunHistory, Took
from diloco_cli.store.port import Store

GB = 1e9
HOUR_S = 3600.0
MOST = 1e18  # whoever may write the plan may write any number


@dataclass(frozen=True)
class ReportSource:
    """What a report is computed from."""

    facts: RunFacts
    history: RunHistory
    plan: LaunchPlan | None
    events: list[Mark]
    status: Status
    summary: Summary

    @property
    def scale(self) -> float:
        """What all islands would train undisturbed where the run was launched, by what the plan says."""
        ideal = sum(island.tokens_per_s for island in self.facts.run.islands)
        stated = self.plan.prediction.tokens_per_s_ideal if self.plan is not None else 0.0
        return ideal / stated if stated > 0 else 1.0

    @property
    def learners(self) -> list[LearnerRow]:
        took = self.history.learners
        return [made(LearnerRow, (self, learner, took.get(learner.name, Took()))) for learner in self.status.learners]


of_report = Fields[ReportSource]()
of_learner = Fields[tuple[ReportSource, LearnerStatus, Took]]()


@dataclass(frozen=True)
class LearnerRow:
    """Bytes are the learner's own statement; 0: not heard."""

    name: str = of_learner(lambda it: it[1].name, "Of the island and its learner.")
    region: str = of_learner(lambda it: it[1].region, "Where it is.")
    tokens: int = of_learner(lambda it: it[1].tokens, "Its merged tokens.")
    share: float = of_learner(
        lambda it: it[1].tokens / it[0].status.tokens if it[0].status.tokens else 0.0, "Of the run's merged tokens."
    )
    merges: int = of_learner(lambda it: it[2].merges, "In so many it took part.")
    participation: float = of_learner(lambda it: it[0].history.participation(it[1].name), "Of the kept merges.")
    restarts: int = of_learner(lambda it: it[2].restarts, "How often it took part again with a new process.")
    up_bytes: int = of_learner(lambda it: it[1].up_bytes, "Sent over its link.")
    down_bytes: int = of_learner(lambda it: it[1].down_bytes, "Received over its link.")
    data_percent: float | None = of_learner(lambda it: it[1].data_percent, "Of its steps' time, waits for data.")


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


@dataclass(frozen=True)
class Report:
    """The data of `diloco report --json`. Tokens are merged tokens."""

    run: str = of_report(lambda it: it.facts.run.name, "The run's name.")
    url: str = of_report(lambda it: it.facts.url, "The run's bucket.")
    state: str = of_report(lambda it: it.status.state, "The verdict on the run.")
    reason: str = of_report(lambda it: it.status.reason, "Why it is in its state.")
    hint: str = of_report(lambda it: it.status.hint, "One command that helps.")
    started_at: str = of_report(lambda it: it.facts.state.metrics.started_at, "Of the first commit.")
    ended_at: str = of_report(lambda it: it.facts.state.metrics.updated_at, "Of the newest commit.")
    first_commit: int = of_report(lambda it: it.history.first or 0, "The first that the bucket holds.")
    last_commit: int = of_report(lambda it: it.history.n, "The newest.")
    missing_commits: int = of_report(lambda it: it.history.missing, "That the bucket does not hold any more.")
    wall_s: float = of_report(lambda it: it.summary.wall_s, "Since the launch, or until the run's end.")
    tokens: int = of_report(lambda it: it.status.tokens, "Merged tokens.")
    tokens_target: int = of_report(lambda it: it.status.tokens_target, "Merged tokens at which the run ends.")
    loss: float | None = of_report(lambda it: it.status.loss, "Held-out loss of the outer parameters.")
    tokens_per_s: float | None = of_report(
        lambda it: it.status.tokens / it.summary.wall_s if it.summary.wall_s else None, "Mean of the whole run."
    )
    planned_tokens_per_s: float | None = of_report(
        lambda it: it.plan.prediction.tokens_per_s * it.scale if it.plan else None,
        "As the plan predicts on the machines of the launch; null: no plan.",
    )
    goodput: float | None = of_report(lambda it: it.status.goodput, "Merged tokens by those of the undisturbed plan.")
    planned_goodput: float | None = of_report(
        lambda it: it.plan.prediction.goodput if it.plan else None, "As the plan predicts."
    )
    merges: int = of_report(lambda it: it.summary.merges, "Commits that merged offers.")
    skips: int = of_report(lambda it: it.history.skips, "Slots without a merge.")
    participation: float | None = of_report(
        lambda it: it.summary.participation, "Mean share of the islands in a merge."
    )
    participants_mean: float | None = of_report(lambda it: it.summary.participants_mean, "Learners in a merge.")
    up_bytes: int = of_report(lambda it: it.summary.up_bytes, "Sent over the islands' links.")
    down_bytes: int = of_report(lambda it: it.summary.down_bytes, "Received over the islands' links.")
    data_parallel_bytes: int = of_report(
        lambda it: it.summary.data_parallel_bytes, "What data-parallel training would move."
    )
    faults: Survived = of_report(lambda it: _faults(it.history, it.events), "What the run survived.")
    cost: Cost | None = of_report(
        lambda it: _cost(it.status, it.summary, it.plan) if it.plan else None, "By the plan's prices."
    )
    planned: list[Level] = of_report(
        lambda it: [Level(s.name, s.tokens_per_s * it.scale) for s in it.plan.prediction.waterfall] if it.plan else [],
        "From planned speeds to merged tokens, as predicted.",
    )
    measured: list[Level] = of_report(
        lambda it: _measured(it.facts, it.status.tokens, it.summary.wall_s, it.history), "The same, as it was."
    )
    learners: list[LearnerRow] = of_report(lambda it: it.learners, "All islands.")
    regions: list[RegionRow] = of_report(
        lambda it: _regions(it.status, it.summary, it.learners, it.plan), "Their learners' sums."
    )
    events: list[Mark] = of_report(lambda it: it.events, "What happened, oldest first.")
    events_left_out: int = of_report(lambda it: it.history.marks_left_out, "Older ones.")
    settings: list[SettingRow] = of_report(
        lambda it: settings_of(it.facts.run.settings, it.plan), "Every setting, and where it came from."
    )
    software: str = of_report(lambda it: it.facts.run.software, "The version that created the run.")


def report_of(
    facts: RunFacts, history: RunHistory, plan: LaunchPlan | None, events: list[Mark], local: Local = Local()
) -> Report:
    """`local`: as for `status`, so that both say the same of a run that lives here."""
    status, summary = status_of(facts, local), summary_of(facts, local)
    return made(Report, ReportSource(facts, history, plan, events, status, summary))


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
    return 0.0 if plan is None else learner.up_bytes / GB * plan.egress_per_gb(learner.name)


def _cost(status: Status, summary: Summary, plan: LaunchPlan) -> Cost:
    accelerators = sum(island.price_per_h for island in plan.islands) * summary.wall_s / HOUR_S
    egress = sum(_egress(learner, plan) for learner in status.learners)
    egress += sum(mirror.egress_cost for mirror in status.mirrors)
    store = status.store
    reads = 0 if store is None else store.requests - store.writes
    requests = 0.0 if store is None else store.writes * CLASS_A_PRICE + reads * CLASS_B_PRICE
    return Cost(accelerators, egress, requests, accelerators + egress + requests, plan.money.total)


def _measured(facts: RunFacts, tokens: int, wall_s: float, history: RunHistory) -> list[Level]:
    """From what all islands would have trained, undisturbed, to what was merged; each step by what it says alone. An
    island is absent from the merges that it took no part in, and weighs by its speed."""
    islands = facts.run.islands
    ideal = sum(island.tokens_per_s for island in islands)
    if wall_s <= 0 or ideal <= 0 or history.first_merge_s is None:
        return []
    without_s = history.first_merge_s + sum(end - start for start, end in history.outages)
    after_start, after_outages = (max(0.0, 1 - gone_s / wall_s) for gone_s in (history.first_merge_s, without_s))
    present = [history.participation(island.name) for island in islands]
    levels = [
        Level("ideal", ideal),
        Level("after the start", ideal * after_start),
        Level("after outages", ideal * after_outages),
        Level("after absences", after_outages * sum(map(mul, (i.tokens_per_s for i in islands), present))),
    ]
    speeds = _speeds(facts)
    if speeds:
        levels.append(Level("at real speeds", after_outages * sum(map(mul, speeds, present))))
    return [*levels, Level("merged", tokens / wall_s)]


def _speeds(facts: RunFacts) -> list[float]:
    """Of the planned islands while they trained, as they state them; empty if one has not been heard."""
    heard = [facts.learners.get(island.name) for island in facts.run.islands]
    speeds = [0.0 if learner is None else learner.heartbeat.mean_tokens_per_s for learner in heard]
    return speeds if all(0 < speed <= MOST for speed in speeds) else []


def _regions(status: Status, summary: Summary, learners: list[LearnerRow], plan: LaunchPlan | None) -> list[RegionRow]:
    mirrors = {mirror.region: mirror for mirror in status.mirrors}
    prices = {} if plan is None else {island.name: island.price_per_h for island in plan.islands}
    rows = []
    for region in sorted({learner.region for learner in learners}):
        mine, mirror = [learner for learner in learners if learner.region == region], mirrors.get(region)
        egress = sum(_egress(learner, plan) for learner in mine)
        rows.append(
            RegionRow(
                name=region,
                learners=len(mine),
                tokens=sum(learner.tokens for learner in mine),
                up_bytes=sum(learner.up_bytes for learner in mine),
                down_bytes=sum(learner.down_bytes for learner in mine),
                mirrored_bytes=0 if mirror is None else mirror.up_bytes + mirror.down_bytes,
                accelerators=sum(prices.get(learner.name, 0.0) for learner in mine) * summary.wall_s / HOUR_S,
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


# -- the plan that `launch` left in the bucket ---------------------------------------------------------------------


class LaunchPlan(msgspec.Struct, frozen=True):
    """The fields of `diloco plan --json` that a report uses, and where each setting of the run file came from. A plan
    that cannot be read is a report without one."""

    prediction: Prediction
    money: Money
    islands: tuple[PlannedIsland, ...] = ()
    settings: tuple[Setting, ...] = ()
    origins: dict[str, str] = {}

    def island(self, name: str) -> PlannedIsland | None:
        return next((island for island in self.islands if island.name == name), None)

    def egress_per_gb(self, name: str) -> float:
        """The price of what leaves this island: the plan states it by the day, for as many bytes from each island."""
        island, gb_per_day = self.island(name), self.money.egress_gb_per_day / max(1, len(self.islands))
        return 0.0 if island is None or gb_per_day <= 0 else island.egress_per_day / gb_per_day

    def origin(self, key: str) -> str:
        searched = next((s.origin for s in self.settings if s.name == key and s.origin != "given"), None)
        return searched or origin_of(self.origins, key)


def read_launch_plan(store: Store) -> LaunchPlan | None:
    data = store.get(PLAN_KEY, MAX_RECORD_BYTES)
    try:
        plan = None if data is None else msgspec.json.decode(data, type=LaunchPlan)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return plan if plan is not None and _can_be_drawn(plan) else None


def _can_be_drawn(plan: LaunchPlan) -> bool:
    p, money = plan.prediction, plan.money
    numbers = [p.tokens_per_s_ideal, p.tokens_per_s, p.goodput, money.total, money.egress_gb_per_day]
    numbers += [stage.tokens_per_s for stage in p.waterfall]
    numbers += [number for island in plan.islands for number in (island.price_per_h, island.egress_per_day)]
    return all(0 <= number <= MOST for number in numbers)
