"""Status as a pure function of the facts: the same numbers in `status`, `launch` and every report."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from diloco_cli.observe.facts import Heard, RunFacts
from diloco_cli.protocol.beats import LearnerBeat
from diloco_cli.protocol.records import Island
from diloco_cli.protocol.schedule import fragment_of_slot
from diloco_cli.protocol.state import MergeNote, RunState

SUSPECT_S = 8.0  # one beat is missing
LOST_S = 30.0
RECENT_SHOWN = 12
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
    """`last_10` has a mark per merge, the newest last: `#` took part, `.` did not; `in_last_10` counts them."""

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
    last_10: str
    loss: float | None
    up_bytes: int
    down_bytes: int
    note: str


@dataclass(frozen=True)
class SyncerStatus:
    state: str
    epoch: int
    host: str
    heard_s: float | None


@dataclass(frozen=True)
class StoreStatus:
    url: str
    bytes_up: int
    bytes_down: int
    requests: int
    retrying: str


@dataclass(frozen=True)
class RecentEvent:
    time: str
    kind: str
    unit: str
    text: str


@dataclass(frozen=True)
class Status:
    """The fields of `status --json`. Tokens are merged tokens; loss is of the outer parameters, nats per token."""

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
    recent: list[RecentEvent] = field(default_factory=list)
    clock_skew_s: float | None = None


def status_of(facts: RunFacts) -> Status:
    run, state = facts.run, facts.state
    tokens, rate = state.tokens(run.layout), merged_rate(state)
    target = run.settings.train.tokens
    syncer = _syncer(facts)
    learners = [_learner(facts, island) for island in state.with_members(run).everybody]
    ages = [heard.age_s for heard in facts.learners.values()] + ([facts.syncer.age_s] if facts.syncer else [])
    over = state.phase != "RUNNING"
    return Status(
        run=run.name,
        state=run_state(facts, learners, syncer),
        commit=state.n,
        step=_global_step(state.slot, run.settings.sync.every, run.num_fragments),
        tokens=tokens,
        tokens_target=target,
        loss=state.loss,
        tokens_per_s=rate,
        goodput=goodput(facts),
        participation=state.participation,
        eta_s=None if over or not rate else max(0.0, (target - tokens) / rate),
        age_s=min(ages, default=None),
        reason=facts.syncer.beat.reason if facts.syncer and not over else "",
        last_merge=_last_merge(facts),
        learners=learners,
        syncer=syncer,
        store=_store(facts),
        recent=[RecentEvent(n.time, n.kind, n.unit, n.text) for n in state.notes[-RECENT_SHOWN:]][::-1],
        clock_skew_s=facts.clock_skew_s,
    )


def run_state(facts: RunFacts, learners: list[LearnerStatus], syncer: SyncerStatus | None) -> str:
    """FINISHED and STOPPED come from the log. SILENT: nobody is heard; DEGRADED: some are not. Those that joined later
    may leave whenever they like."""
    if facts.state.phase != "RUNNING":
        return facts.state.phase
    heard = [learner for learner in learners if learner.state not in ("LOST", "STARTING", "FAILED")]
    syncer_lost = syncer is None or syncer.state == "LOST"
    if facts.state.merges == 0 and not all(learner.state == "LOST" for learner in learners):
        return "STARTING"
    if not heard and syncer_lost:
        return "SILENT"
    missing = {learner.name for learner in learners} - {learner.name for learner in heard}
    expected = {island.name for island in facts.run.islands}
    return "DEGRADED" if syncer_lost or missing & expected else "RUNNING"


def merged_rate(state: RunState) -> float | None:
    """Merged tokens per second over the last merges."""
    notes = state.recent_merges
    if len(notes) < 2:
        return None
    seconds = (_time(notes[-1]) - _time(notes[0])).total_seconds()
    return (notes[-1].tokens - notes[0].tokens) / seconds if seconds > 0 else None


def wall_seconds(facts: RunFacts) -> float:
    """Since launch: from the first commit to now, or to the last commit if the run is over."""
    if not facts.state.started_at:
        return 0.0
    started = datetime.fromisoformat(facts.state.started_at).timestamp()
    ended = facts.now_s
    if facts.state.phase != "RUNNING":
        ended = datetime.fromisoformat(facts.state.updated_at).timestamp()
    return max(0.0, ended - started)


def goodput(facts: RunFacts) -> float | None:
    """Merged tokens / (sum over planned islands of their undisturbed tokens per second x wall time since launch).

    Islands that joined later add to the tokens and not to the plan, so that with them it may be above 1."""
    planned = sum(island.tokens_per_s for island in facts.run.islands) * wall_seconds(facts)
    return facts.state.tokens(facts.run.layout) / planned if planned > 0 else None


def _global_step(slot: int, every: int, num_fragments: int) -> int:
    """The paper's t of the last committed slot."""
    if slot == 0:
        return 0
    rounds = (slot - 1) // num_fragments
    return rounds * every + (fragment_of_slot(slot - 1, num_fragments) + 1) * every // num_fragments


def _last_merge(facts: RunFacts) -> LastMerge | None:
    if not facts.state.recent_merges:
        return None
    note = facts.state.recent_merges[-1]
    age_s = max(0.0, facts.now_s - _time(note).timestamp())
    return LastMerge(age_s, len(note.participants), note.alive, note.quorum, note.grace_used_s, note.grace_s)


def _learner(facts: RunFacts, island: Island) -> LearnerStatus:
    heard = facts.learners.get(island.name)
    known = facts.state.learner(island.name)
    took_part = "".join(TOOK_PART if island.name in n.participants else "." for n in facts.state.recent_merges)
    beat = heard.beat if heard else LearnerBeat("STARTING", known.floor, -1, 0, 0, 0.0, 0)
    return LearnerStatus(
        name=island.name,
        region=island.region,
        state=_learner_state(facts.state, heard),
        incarnation=beat.incarnation,
        heard_s=heard.age_s if heard else None,
        behind=beat.behind,
        step=beat.step,
        tokens=known.token_parameters // facts.run.layout.num_parameters,
        tokens_per_s=beat.tokens_per_s,
        in_last_10=took_part.count(TOOK_PART),
        last_10=took_part,
        loss=beat.loss,
        up_bytes=beat.up_bytes,
        down_bytes=beat.down_bytes,
        note=beat.retrying or beat.note,
    )


def _learner_state(state: RunState, heard: Heard | None) -> str:
    if heard is None:
        return "STARTING"
    if heard.beat.state in ("DONE", "FAILED") or state.phase == "FINISHED":
        return "FAILED" if heard.beat.state == "FAILED" else "DONE"
    if heard.age_s > LOST_S:
        return "LOST"
    return "SUSPECT" if heard.age_s > SUSPECT_S else heard.beat.state


def _syncer(facts: RunFacts) -> SyncerStatus | None:
    if facts.syncer is None:
        return None
    beat, age_s = facts.syncer.beat, facts.syncer.age_s
    state = beat.state
    if state != "DONE" and facts.state.phase == "RUNNING":
        state = "LOST" if age_s > LOST_S else "SUSPECT" if age_s > SUSPECT_S else state
    return SyncerStatus(state, facts.state.epoch, beat.host, age_s)


def _store(facts: RunFacts) -> StoreStatus:
    beats = [heard.beat for heard in facts.learners.values()]
    syncer = facts.syncer.beat if facts.syncer else None
    return StoreStatus(
        url=facts.url,
        bytes_up=sum(b.up_bytes for b in beats) + (syncer.up_bytes if syncer else 0),
        bytes_down=sum(b.down_bytes for b in beats) + (syncer.down_bytes if syncer else 0),
        requests=sum(b.requests for b in beats) + (syncer.requests if syncer else 0),
        retrying="; ".join(filter(None, [*(b.retrying for b in beats), syncer.retrying if syncer else ""])),
    )


def _time(note: MergeNote) -> datetime:
    return datetime.fromisoformat(note.time)
