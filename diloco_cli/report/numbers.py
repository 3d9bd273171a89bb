"""The numbers of a report: what a run did, what it took, what was planned."""

from __future__ import annotations

from dataclasses import dataclass
from json import dumps
from operator import mul

from diloco_cli.config.codec import to_plain
from diloco_cli.config.origins import leaves
from diloco_cli.config.settings import RunSettings
from diloco_cli.observe.facts import Local, RunFacts
from diloco_cli.observe.status import LearnerStatus, Status, status_of
from diloco_cli.observe.summary import Summary, summary_of
from diloco_cli.plan.money import CLASS_A_PRICE, CLASS_B_PRICE
from diloco_cli.protocol.log.metrics import QUIET_OUTCOMES
from diloco_cli.report.history import Mark, RunHistory
from diloco_cli.report.plan_file import MOST, LaunchPlan

GB = 1e9
HOUR_S = 3600.0


@dataclass(frozen=True)
class LearnerRow:
    """`participation`: of the run's merges, those in which it took part. Bytes are its own statement; 0: not heard.
    `data_percent`: of its steps' time, what they waited for data, by its own statement; None: not known."""

    name: str
    region: str
    tokens: int
    share: float
    merges: int
    participation: float
    restarts: int
    up_bytes: int
    down_bytes: int
    data_percent: float | None = None


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
    """The data of `diloco report --json`. `tokens_per_s` is the mean from the first commit to the last; `planned_` what
    the plan predicts on the machines that the run was launched on, None if the bucket holds no plan."""

    run: str
    url: str
    state: str
    reason: str
    hint: str
    started_at: str
    ended_at: str
    first_commit: int
    last_commit: int
    missing_commits: int
    wall_s: float
    tokens: int
    tokens_target: int
    loss: float | None
    tokens_per_s: float | None
    planned_tokens_per_s: float | None
    goodput: float | None
    planned_goodput: float | None
    merges: int
    skips: int
    participation: float | None
    participants_mean: float | None
    up_bytes: int
    down_bytes: int
    data_parallel_bytes: int
    faults: Survived
    cost: Cost | None
    planned: list[Level]
    measured: list[Level]
    learners: list[LearnerRow]
    regions: list[RegionRow]
    events: list[Mark]
    events_left_out: int
    settings: list[SettingRow]
    software: str


def report_of(
    facts: RunFacts, history: RunHistory, plan: LaunchPlan | None, events: list[Mark], local: Local = Local()
) -> Report:
    """`local`: as for `status`, so that both say the same of a run that lives here."""
    status, summary, run = status_of(facts, local), summary_of(facts, local), facts.run
    learners = [_learner(learner, history, status.tokens) for learner in status.learners]
    ideal = sum(island.tokens_per_s for island in run.islands)
    scale = ideal / plan.prediction.tokens_per_s_ideal if plan and plan.prediction.tokens_per_s_ideal > 0 else 1.0
    planned = [] if plan is None else [Level(s.name, s.tokens_per_s * scale) for s in plan.prediction.waterfall]
    return Report(
        run=run.name,
        url=facts.url,
        state=status.state,
        reason=status.reason,
        hint=status.hint,
        started_at=facts.state.metrics.started_at,
        ended_at=facts.state.metrics.updated_at,
        first_commit=history.first or 0,
        last_commit=history.n,
        missing_commits=history.missing,
        wall_s=summary.wall_s,
        tokens=status.tokens,
        tokens_target=status.tokens_target,
        loss=status.loss,
        tokens_per_s=status.tokens / summary.wall_s if summary.wall_s else None,
        planned_tokens_per_s=None if plan is None else plan.prediction.tokens_per_s * scale,
        goodput=status.goodput,
        planned_goodput=None if plan is None else plan.prediction.goodput,
        merges=summary.merges,
        skips=history.skips,
        participation=summary.participation,
        participants_mean=summary.participants_mean,
        up_bytes=summary.up_bytes,
        down_bytes=summary.down_bytes,
        data_parallel_bytes=summary.data_parallel_bytes,
        faults=_faults(history, events),
        cost=None if plan is None else _cost(status, summary, plan),
        planned=planned,
        measured=_measured(facts, status.tokens, summary.wall_s, history),
        learners=learners,
        regions=_regions(status, summary, learners, plan),
        events=events,
        events_left_out=history.marks_left_out,
        settings=settings_of(run.settings, plan),
        software=run.software,
    )


def _learner(learner: LearnerStatus, history: RunHistory, tokens: int) -> LearnerRow:
    took = history.learners.get(learner.name)
    return LearnerRow(
        name=learner.name,
        region=learner.region,
        tokens=learner.tokens,
        share=learner.tokens / tokens if tokens else 0.0,
        merges=0 if took is None else took.merges,
        participation=history.participation(learner.name),
        restarts=0 if took is None else took.restarts,
        up_bytes=learner.up_bytes,
        down_bytes=learner.down_bytes,
        data_percent=learner.data_percent,
    )


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
        for key, value in leaves(to_plain(settings))
    ]
