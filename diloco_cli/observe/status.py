"""Status as a pure function of the facts: the same numbers in `status`, `launch` and every report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from diloco_cli.events.bucket import newest, unhealed_errors
from diloco_cli.events.event import KINDS, Event
from diloco_cli.observe.facts import RunFacts, moment
from diloco_cli.observe.garbage import GarbageStatus, garbage_of
from diloco_cli.observe.limits import pace_of_syncer
from diloco_cli.observe.local import Local
from diloco_cli.observe.look import Look
from diloco_cli.observe.own_loops import own_loop_note
from diloco_cli.observe.unit_states import LOST, SUSPECT_S, aged, syncer_lost_after_s
from diloco_cli.observe.verdict import MERGES, verdict_at
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, MirrorHeartbeat, SyncerHeartbeat
from diloco_cli.protocol.log.metrics import MergeNote
from diloco_cli.protocol.log.records import Island, RegionStore, RunFormat, fragment_of_slot
from diloco_cli.protocol.log.state import LearnerRecord, RunState
from diloco_cli.protocol.log.states import LearnerState, RunPhase
from diloco_cli.protocol.rules.divergence import concern
from diloco_cli.runtime.consent import trust_of

FORGOTTEN_S = 600.0  # a standby without a heartbeat for so long is no longer shown
RECENT_SHOWN = 12
GB = 1e9
TOOK_PART = "#"


@dataclass(frozen=True)
class LastMerge:
    age_s: float
    participants: int
    alive: int
    quorum: int
    grace_used_s: float
    grace_s: float


@dataclass(frozen=True)
class LearnerStatus:
    """`attendance` has a mark for each of the last 10 merges, the newest last: `#` took part, `.` did not; `in_last_10`
    counts them. `data_percent`: of its steps' time, what they waited for data; None: not known."""

    name: str
    region: str
    state: str
    incarnation: int
    heard_s: float | None
    behind: int
    step: int
    tokens: int
    tokens_per_s: float
    in_last_10: int
    attendance: str
    loss: float | None
    up_bytes: int
    down_bytes: int
    note: str
    data_percent: float | None = None


@dataclass(frozen=True)
class SyncerStatus:
    """`unit`: `syncer`, or the standby that took over. `note`: its failing call to the store, or what it states as the
    reason for what it does. `limit`: what limits its pace (calls, bytes, processor), as measured, and `busy_percent` of
    a slot of `slot_s` that they take it; None before the first merge."""

    state: str
    epoch: int
    host: str
    heard_s: float | None
    unit: str = "syncer"
    note: str = ""
    limit: str | None = None
    busy_percent: float | None = None
    slot_s: float | None = None
    calls_s: float | None = None
    bytes_s: float | None = None
    processor_s: float | None = None


@dataclass(frozen=True)
class StandbyStatus:
    name: str
    state: str
    host: str
    heard_s: float
    note: str


@dataclass(frozen=True)
class StoreStatus:
    """Requests of all learners and the syncer since the launch. `writes`: those that write or list (class A); the
    others read (class B). `requests_a_slot` is None before the first slot. `calls_a_s`: the syncer's pace of calls, if
    the store throttles it; else 0."""

    url: str
    up_bytes: int
    down_bytes: int
    requests: int
    writes: int
    requests_a_slot: float | None
    retrying: str
    calls_a_s: float = 0.0


@dataclass(frozen=True)
class MirrorStatus:
    """A region's own bucket, by the syncer's last heartbeat. `state`: FOLLOWS the home log; BEHIND by `commits_behind`,
    for `behind_s`; STOPPED, as it holds other bytes than home; UNKNOWN, while no syncer serves. Bytes are the traffic
    between the two buckets since the launch, in `requests` of the syncers to the region's; `egress_cost` is the price
    of leaving either, by the inventory. `unheard`: learners whose offers are not carried home, and why."""

    region: str
    url: str
    state: str
    commit: int
    commits_behind: int
    behind_s: float
    offers: int
    up_bytes: int
    down_bytes: int
    egress_cost: float
    last_error: str
    requests: int
    writes: int
    unheard: dict[str, str]


@dataclass(frozen=True)
class UnitError:
    """The last error of a unit that has not been well since."""

    unit: str
    time: str
    text: str


@dataclass(frozen=True)
class Status:
    """The fields of `status --json`. Tokens are merged tokens; loss is of the outer parameters, nats per token;
    `divergence`: what people should know of it, "" if it is well. `state`, `reason`, `since_s`, `hint` and `limit`: the
    verdict (verdict.py)."""

    run: str
    state: str
    commit: int
    step: int
    tokens: int
    tokens_target: int
    loss: float | None
    tokens_per_s: float | None
    goodput: float | None
    participation: float | None
    eta_s: float | None
    age_s: float | None
    reason: str
    last_merge: LastMerge | None
    learners: list[LearnerStatus] = field(default_factory=list)
    syncer: SyncerStatus | None = None
    store: StoreStatus | None = None
    recent: list[Event] = field(default_factory=list)
    clock_skew_s: float | None = None
    standbys: list[StandbyStatus] = field(default_factory=list)
    mirrors: list[MirrorStatus] = field(default_factory=list)
    divergence: str = ""
    trust: str = ""
    since_s: float | None = None
    hint: str = ""
    limit: str = ""
    errors: list[UnitError] = field(default_factory=list)
    garbage: GarbageStatus | None = None


def status_of(facts: RunFacts, local: Local = Local()) -> Status:
    """`local`: what this machine knows of its own units."""
    run, state = facts.run, facts.state
    tokens, rate = state.tokens(run.layout), merged_rate(state)
    target = run.settings.train.tokens
    standbys = _standbys(facts)
    ages = [heard.age_s for heard in facts.learners.values()] + ([facts.syncer.age_s] if facts.syncer else [])
    look = Look(facts, local)
    verdict = verdict_at(look)
    return Status(
        run=run.name,
        state=verdict.state,
        commit=state.n,
        step=_global_step(run, state.slot),
        tokens=tokens,
        tokens_target=target,
        loss=state.metrics.loss,
        tokens_per_s=rate,
        goodput=goodput(facts),
        participation=state.participation,
        eta_s=max(0.0, (target - tokens) / rate) if rate and verdict.state in MERGES else None,
        age_s=min(ages, default=None),
        reason=verdict.reason,
        last_merge=_last_merge(facts),
        learners=[_learner(look, island) for island in state.with_members(run).all_islands],
        syncer=_syncer(look),
        store=_store(facts),
        errors=[
            UnitError(e.unit, e.time, e.text) for e in unhealed_errors(facts.events, state.metrics.loss is not None)
        ],
        recent=newest((event for event in facts.events if not KINDS[event.kind].quiet), RECENT_SHOWN),
        clock_skew_s=facts.clock_skew_s,
        standbys=standbys,
        mirrors=[_mirror(facts, store) for store in run.regions],
        divergence=concern(state, run),
        trust=trust_of(run),
        since_s=verdict.since_s,
        hint=verdict.hint,
        limit=verdict.limit,
        garbage=garbage_of(facts),
    )


def merged_rate(state: RunState) -> float | None:
    """Merged tokens per second over the last merges."""
    merges = state.metrics.recent_merges
    return rate_between(merges[0], merges[-1]) if merges else None


def rate_between(first: MergeNote, last: MergeNote) -> float | None:
    seconds = (moment(last.time) - moment(first.time)).total_seconds()
    return (last.tokens - first.tokens) / seconds if seconds > 0 else None


def wall_seconds(facts: RunFacts) -> float:
    """Since launch: from the first commit to now, or to the last commit if the run is over."""
    metrics = facts.state.metrics
    if not metrics.started_at:
        return 0.0
    wall_s = facts.seconds_since(metrics.started_at)
    return wall_s if facts.state.phase == RunPhase.RUNNING else wall_s - facts.seconds_since(metrics.updated_at)


def goodput(facts: RunFacts) -> float | None:
    """Merged tokens / (sum over planned islands of their undisturbed tokens per second x wall time since launch).

    Islands that joined later add to the tokens and not to the plan, so that with them it may be above 1."""
    planned = sum(island.tokens_per_s for island in facts.run.islands) * wall_seconds(facts)
    return facts.state.tokens(facts.run.layout) / planned if planned > 0 else None


def _global_step(run: RunFormat, slot: int) -> int:
    """The paper's t of the last committed slot."""
    if slot == 0:
        return 0
    every, cold = run.settings.sync.every, run.settings.cold_start
    first = every if cold.every is None else cold.every
    rounds = (slot - 1) // run.num_fragments
    due = (fragment_of_slot(slot - 1, run.num_fragments) + 1) * (first if rounds < cold.rounds else every)
    return min(rounds, cold.rounds) * first + max(0, rounds - cold.rounds) * every + due // run.num_fragments


def _last_merge(facts: RunFacts) -> LastMerge | None:
    if not facts.state.metrics.recent_merges:
        return None
    note = facts.state.metrics.recent_merges[-1]
    age_s = facts.seconds_since(note.time)
    return LastMerge(age_s, len(note.participants), note.alive, note.quorum, note.grace_used_s, note.grace_s)


def _learner(look: Look, island: Island) -> LearnerStatus:
    facts = look.facts
    heard = facts.learners.get(island.name)
    known = facts.state.learner(island.name)
    took_part = "".join(TOOK_PART if island.name in n.participants else "." for n in facts.state.metrics.recent_merges)
    heartbeat = heard.heartbeat if heard else LearnerHeartbeat("STARTING", known.floor, -1, 0, 0, 0.0, 0)
    return LearnerStatus(
        name=island.name,
        region=island.region,
        state=look.learners[island.name],
        incarnation=heartbeat.incarnation,
        heard_s=heard.age_s if heard else None,
        behind=heartbeat.behind,
        step=heartbeat.step,
        tokens=known.token_parameters // facts.run.layout.num_parameters,
        tokens_per_s=heartbeat.tokens_per_s,
        in_last_10=took_part.count(TOOK_PART),
        attendance=took_part,
        loss=heartbeat.loss,
        up_bytes=heartbeat.up_bytes,
        down_bytes=heartbeat.down_bytes,
        note=own_loop_note(island, _note(look, island.name, known, heartbeat)),
        data_percent=heartbeat.data_percent,
    )


def _note(look: Look, name: str, known: LearnerRecord, heartbeat: LearnerHeartbeat) -> str:
    said = _quarantine_note(known) or _unheard_note(look.facts, name) or heartbeat.retrying or heartbeat.note
    return said or (look.missing.get(name, "") if look.learners[name] != LearnerState.DONE else "")


def _unheard_note(facts: RunFacts, learner: str) -> str:
    said = () if facts.syncer is None else facts.syncer.heartbeat.mirrors
    return next((f"not heard: {mirror.unheard[learner]}" for mirror in said if learner in mirror.unheard), "")


def _quarantine_note(known: LearnerRecord) -> str:
    return (
        "" if known.quarantined is None else f"its offers are refused since commit {known.quarantined}: diloco readmit"
    )


def _syncer(look: Look) -> SyncerStatus | None:
    heard = look.facts.syncer
    if heard is None:
        return None
    said, state = heard.heartbeat, look.syncer or ""
    note = (said.retrying or said.reason) if look.facts.state.phase == RunPhase.RUNNING else ""  # else it is stale
    found = SyncerStatus(state, look.facts.state.epoch, said.host, heard.age_s, said.unit, note)
    pace = pace_of_syncer(look)
    if pace is None:
        return found
    spent, slot_s = pace
    busy_percent = 100 * spent.seconds / slot_s
    return replace(found, limit=spent.limit, busy_percent=busy_percent, slot_s=slot_s, **asdict(spent))


def _standbys(facts: RunFacts) -> list[StandbyStatus]:
    """The standbys that wait now, and those that fell silent lately; none for a run that is over."""
    if facts.state.phase != RunPhase.RUNNING:
        return []
    return [
        _standby(name, heard.heartbeat, heard.age_s)
        for name, heard in sorted(facts.standbys.items())
        if heard.heartbeat.state != "DONE" and heard.age_s <= FORGOTTEN_S
    ]


def _standby(name: str, said: SyncerHeartbeat, age_s: float) -> StandbyStatus:
    state = aged(said.state, age_s)
    return StandbyStatus(name, state, said.host, age_s, "" if state == LOST else said.reason)


def _mirror(facts: RunFacts, store: RegionStore) -> MirrorStatus:
    said = () if facts.syncer is None else facts.syncer.heartbeat.mirrors
    heartbeat = next((heartbeat for heartbeat in said if heartbeat.region == store.name), None)
    cost = 0.0
    if heartbeat is not None:
        cost = (heartbeat.up_bytes * facts.run.home_egress_per_gb + heartbeat.down_bytes * store.egress_per_gb) / GB
    known, heartbeat = heartbeat is not None, heartbeat or MirrorHeartbeat(store.name)
    over = facts.state.phase != RunPhase.RUNNING
    behind = heartbeat.behind  # a heartbeat is seconds old: new commits mean no lag
    if over:
        behind = max(0, facts.state.n - heartbeat.n)
    state = "BEHIND" if behind and (over or heartbeat.error or heartbeat.behind_s > SUSPECT_S) else "FOLLOWS"
    if not over and (not known or facts.syncer is None or facts.syncer.age_s > syncer_lost_after_s(facts)):
        state = "UNKNOWN"
    return MirrorStatus(
        region=store.name,
        url=store.url,
        state="STOPPED" if heartbeat.stopped else state,
        commit=heartbeat.n,
        commits_behind=behind,
        behind_s=heartbeat.behind_s,
        offers=heartbeat.offers,
        up_bytes=heartbeat.up_bytes,
        down_bytes=heartbeat.down_bytes,
        egress_cost=round(cost, 6),
        last_error=heartbeat.error,
        requests=heartbeat.requests,
        writes=heartbeat.writes,
        unheard=heartbeat.unheard,
    )


def _store(facts: RunFacts) -> StoreStatus:
    heartbeats: dict[str, LearnerHeartbeat | SyncerHeartbeat] = {
        name: heard.heartbeat for name, heard in facts.learners.items()
    }
    if facts.syncer is not None:
        heartbeats["syncer"] = facts.syncer.heartbeat
    requests = sum(heartbeat.requests for heartbeat in heartbeats.values())
    return StoreStatus(
        url=facts.url,
        up_bytes=sum(heartbeat.up_bytes for heartbeat in heartbeats.values()),
        down_bytes=sum(heartbeat.down_bytes for heartbeat in heartbeats.values()),
        requests=requests,
        writes=sum(heartbeat.writes for heartbeat in heartbeats.values()),
        requests_a_slot=round(requests / facts.state.slot, 1) if facts.state.slot else None,
        retrying="; ".join(
            f"{unit}: {heartbeat.retrying}" for unit, heartbeat in heartbeats.items() if heartbeat.retrying
        ),
        calls_a_s=0.0 if facts.syncer is None else facts.syncer.heartbeat.calls_a_s,
    )
