# ruff: noqa: RUF009
"""The status of a run: each field declared once, as a pure function of the facts. `status`, `launch` and every report
have the same numbers. JSON, its schema, the table of units and the exported metrics follow from the declarations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from diloco_cli.config.hardware import data_class_of
from diloco_cli.engines.port import Job
from diloco_cli.errors import escaped
from diloco_cli.events.bucket import EVALUATOR, newest, unhealed_errors
from diloco_cli.events.event import EVENT_KINDS, Event
from diloco_cli.observe.facts import Heard, Local, RunFacts, moment
from diloco_cli.observe.fields import Fields, UnitColumn, made
from diloco_cli.observe.situation import MERGES, SILENCE, Look, State, Verdict, pace_of_syncer, verdict_of
from diloco_cli.observe.unit_states import ENDED, LEFT, LOST_S, SUSPECT_S, aged, syncer_lost_after_s
from diloco_cli.protocol.actors.collection import NOT_KNOWN, kept_commits
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, MirrorHeartbeat, SyncerHeartbeat
from diloco_cli.protocol.log.keys import SYNCER, number_of
from diloco_cli.protocol.log.metrics import LastDelta, MergeNote
from diloco_cli.protocol.log.records import Island, RegionStore, RunFormat, fragment_of_slot
from diloco_cli.protocol.log.state import LearnerRecord, LearnerState, RunPhase, RunState
from diloco_cli.protocol.rules.belief import planned_rate
from diloco_cli.protocol.rules.capacity import SlotTime
from diloco_cli.protocol.rules.divergence import concern
from diloco_cli.quantities import format_count, format_size
from diloco_cli.runtime.consent import trust_of

DOUBTED = 0.05  # of a learner's stated tokens: less is chance
FAR = 2.0  # times its planned speed, or a part of it as small
MOST_GOODPUT = 1.05  # of islands that train as planned
SETTLED_ROUNDS = 3  # of merges, after which a goodput says something
FORGOTTEN_S = 600.0  # a standby without a heartbeat for so long, or a guest's error, is no longer shown
RECENT_SHOWN = 12
QUIET = frozenset(kind.name for kind in EVENT_KINDS if kind.quiet)  # `diloco events` shows them
SYNCERS = ("standby-", f"{SYNCER}-")  # so begin the names of syncers that stand by at first
GB = 1e9
TOOK_PART = "#"


def age(seconds: float | None) -> str:
    """3.2 -> `3s`, 200 -> `3min`."""
    if seconds is None:
        return "-"
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f}{unit}"
    return f"{seconds:.0f}s"


# -- sources of the sections --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneLearner:
    """What a learner's row is computed from. `heartbeat`: its last one, or that of a learner that was never heard."""

    look: Look
    island: Island

    @property
    def facts(self) -> RunFacts:
        return self.look.facts

    @property
    def heard_s(self) -> float | None:
        heard = self.facts.learners.get(self.island.name)
        return None if heard is None else heard.age_s

    @property
    def known(self) -> LearnerRecord:
        return self.facts.state.learner(self.island.name)

    @property
    def heartbeat(self) -> LearnerHeartbeat:
        heard = self.facts.learners.get(self.island.name)
        number = number_of(self.known.floor)
        return LearnerHeartbeat("STARTING", number, -1, 0, 0, 0.0, 0) if heard is None else heard.heartbeat

    @property
    def attendance(self) -> str:
        merges = self.facts.state.metrics.recent_merges
        return "".join(TOOK_PART if self.island.name in merge.participants else "." for merge in merges)

    @property
    def note(self) -> str:
        data = data_class_of(self.island.infra)
        own = "" if data is None else f"own loop, {data} data"
        own = "own loop, positions not checked" if data == "external" else own
        return "; ".join(filter(None, (own, self._doubt, self._said, self._delta_note)))

    @property
    def stated_share(self) -> float | None:
        """Of the tokens that all learners state in merged offers."""
        total = self.facts.state.stated_parameters
        return (self.known.token_parameters + self.known.doubted) / total if total else None

    @property
    def believed_share(self) -> float | None:
        total = self.facts.state.token_parameters
        return self.known.token_parameters / total if total else None

    @property
    def _doubt(self) -> str:
        known, stated, believed = self.known, self.stated_share, self.believed_share
        is_little = known.doubted <= DOUBTED * (known.token_parameters + known.doubted)
        if stated is None or believed is None or is_little:
            return ""
        return f"states {100 * stated:.0f} % of the tokens, {100 * believed:.0f} % believed"

    @property
    def delta(self) -> LastDelta | None:
        """What is known of its newest merged delta."""
        return self.facts.state.metrics.deltas.get(self.island.name)

    @property
    def _delta_note(self) -> str:
        """For a person who looks for the cause of a jump of the loss."""
        stability, delta = self.facts.state.stability, self.delta
        if delta is None or not (stability.paused or stability.jump or stability.recovers_beyond is not None):
            return ""
        return f"newest delta {delta.times_usual:.3g} times as long as usual, cosine to the others {delta.cosine:+.2f}"

    @property
    def _said(self) -> str:
        name, quarantined = self.island.name, self.known.quarantined
        if quarantined is not None:
            return f"its offers are refused since commit {quarantined}: diloco readmit"
        mirrors = () if self.facts.syncer is None else self.facts.syncer.heartbeat.mirrors
        unheard = next((f"not heard: {mirror.unheard[name]}" for mirror in mirrors if name in mirror.unheard), "")
        said, state = unheard or self.heartbeat.retrying or self.heartbeat.note, self.look.learners[name]
        if not said and state in SILENCE and self.facts.run.island(name) is None:
            return f"it joined, and nothing waits for it; to keep it out: diloco quarantine {name}"
        return said or (self.look.missing.get(name, "") if state != LEFT else "")


@dataclass(frozen=True)
class OneSyncer:
    look: Look
    said: SyncerHeartbeat
    heard_s: float

    @property
    def note(self) -> str:
        is_stale = self.look.phase != RunPhase.RUNNING
        return "" if is_stale else self.said.retrying or self.said.reason

    @cached_property
    def pace(self) -> tuple[SlotTime, float] | None:
        return pace_of_syncer(self.look)


@dataclass(frozen=True)
class OneStore:
    facts: RunFacts

    @cached_property
    def heartbeats(self) -> dict[str, LearnerHeartbeat | SyncerHeartbeat]:
        """Of all learners and the syncer, by unit."""
        said: dict[str, LearnerHeartbeat | SyncerHeartbeat] = {n: h.heartbeat for n, h in self.facts.learners.items()}
        return said if self.facts.syncer is None else said | {"syncer": self.facts.syncer.heartbeat}

    def total(self, name: str) -> int:
        return sum(getattr(heartbeat, name) for heartbeat in self.heartbeats.values())


@dataclass(frozen=True)
class OneMirror:
    """`said`: what the syncer's last heartbeat says of it; None: nothing."""

    facts: RunFacts
    store: RegionStore

    @cached_property
    def said(self) -> MirrorHeartbeat | None:
        mirrors = () if self.facts.syncer is None else self.facts.syncer.heartbeat.mirrors
        return next((said for said in mirrors if said.region == self.store.name), None)

    @property
    def over(self) -> bool:
        return self.facts.state.phase != RunPhase.RUNNING

    @property
    def heartbeat(self) -> MirrorHeartbeat:
        return self.said or MirrorHeartbeat(self.store.name)

    @property
    def behind(self) -> int:
        """A heartbeat is seconds old, so that newer commits mean no lag while the run goes on."""
        return max(0, self.facts.state.n - self.heartbeat.n) if self.over else self.heartbeat.behind

    @property
    def state(self) -> str:
        facts, said = self.facts, self.heartbeat
        if said.stopped:
            return "STOPPED"
        unheard = self.said is None or facts.syncer is None or facts.syncer.age_s > syncer_lost_after_s(facts)
        if unheard and not self.over:
            return "UNKNOWN"
        return "BEHIND" if self.behind and (self.over or said.error or said.behind_s > SUSPECT_S) else "FOLLOWS"

    @property
    def egress_cost(self) -> float:
        up, down = self.heartbeat.up_bytes, self.heartbeat.down_bytes
        return round((up * self.facts.run.home_egress_per_gb + down * self.store.egress_per_gb) / GB, 6)


@dataclass(frozen=True)
class OneGarbage:
    facts: RunFacts
    said: SyncerHeartbeat

    @property
    def is_known(self) -> bool:
        """Not before the syncer's first sweep has ended, unless nothing may be deleted yet."""
        return self.said.garbage.commits != NOT_KNOWN or self.facts.state.gc_floor == 0

    @property
    def commits(self) -> int:
        return max(0, self.said.garbage.commits)

    @property
    def per_h(self) -> float:
        return 0.0 if self.said.garbage.commits == NOT_KNOWN else self.said.garbage.per_h

    @property
    def note(self) -> str:
        """Deletions do not keep pace once more commits wait for them than the run keeps."""
        kept = kept_commits(self.facts.run)
        if kept is None or self.commits <= kept:
            return ""
        return (
            f"about {self.said.garbage.objects:,} objects of {self.commits:,} commits wait to be deleted,"
            f" {self.per_h:+,.0f} an hour: more than the {kept:,} commits that the run keeps"
        )


@dataclass(frozen=True)
class OneRun:
    look: Look
    verdict: Verdict

    @property
    def facts(self) -> RunFacts:
        return self.look.facts

    @property
    def state(self) -> RunState:
        return self.facts.state

    @property
    def tokens(self) -> int:
        return self.state.tokens(self.facts.run.layout)

    @property
    def syncer(self) -> OneSyncer | None:
        heard = self.facts.syncer
        return None if heard is None else OneSyncer(self.look, heard.heartbeat, heard.age_s)

    @property
    def age_s(self) -> float | None:
        """Standbys do not count."""
        ages = list(self.look.learner_ages.values())
        return min(ages if self.facts.syncer is None else [*ages, self.facts.syncer.age_s], default=None)

    @property
    def _alive_syncers(self) -> list[Heard[SyncerHeartbeat]]:
        heard = [*self.facts.standbys.values(), *([] if self.facts.syncer is None else [self.facts.syncer])]
        return [one for one in heard if one.heartbeat.state not in ENDED]

    def is_concerned(self, event: Event) -> bool:
        """Whether the run is to be told of this error. A name that was mistyped or refused, or that joined and is not
        heard any more, is no part of it for good. A standby is, until it is heard again: merges may be another's."""
        since_s = self.facts.now_s - moment(event.time).timestamp()
        if event.unit.startswith(SYNCERS):
            return not any(it.heartbeat.unit == event.unit and it.age_s < since_s for it in self._alive_syncers)
        heard = self.facts.learners.get(event.unit)
        planned = self.facts.run.island(event.unit) is not None or event.unit in (SYNCER, EVALUATOR)
        return planned or since_s <= FORGOTTEN_S or (heard is not None and heard.age_s <= FORGOTTEN_S)

    @property
    def eta_s(self) -> float | None:
        rate = merged_rate(self.state)
        left = self.facts.run.settings.train.tokens - self.tokens
        return max(0.0, left / rate) if rate and self.verdict.state in MERGES else None


of_merge, of_learner, of_syncer = Fields[tuple[RunFacts, MergeNote]](), Fields[OneLearner](), Fields[OneSyncer]()
of_standby, of_store, of_mirror = Fields[tuple[str, Heard[SyncerHeartbeat]]](), Fields[OneStore](), Fields[OneMirror]()
of_garbage, of_run = Fields[OneGarbage](), Fields[OneRun]()


# -- the fields ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LastMerge:
    age_s: float = of_merge(
        lambda it: it[0].seconds_since(it[1].time), "Since the last merge.", gauge="diloco_merge_age_seconds"
    )
    participants: int = of_merge(
        lambda it: len(it[1].participants), "Participants of the last merge.", gauge="diloco_merge_participants"
    )
    alive: int = of_merge(lambda it: it[1].alive, "Islands alive at the last merge.", gauge="diloco_merge_alive")
    quorum: int = of_merge(lambda it: it[1].quorum, "Offers that it needed at least.")
    grace_used_s: float = of_merge(
        lambda it: it[1].grace_used_s, "Waited beyond the quorum.", gauge="diloco_merge_grace_used_seconds"
    )
    grace_s: float = of_merge(lambda it: it[1].grace_s, "It would have waited so long beyond the quorum.")


@dataclass(frozen=True)
class LearnerStatus:
    """Byte counts are since the learner's first incarnation, by its own statement, as are pace and loss."""

    name: str = of_learner(
        lambda it: it.island.name,
        "Of the island and its learner.",
        UnitColumn("LEARNER", lambda row: escaped(row.name), left=True),
    )
    region: str = of_learner(lambda it: it.island.region, "Where it is.")
    state: str = of_learner(
        lambda it: it.look.learners[it.island.name],
        "How it is (observe/unit_states.py).",
        UnitColumn("STATE", lambda row: escaped(row.state), left=True),
    )
    incarnation: int = of_learner(
        lambda it: it.heartbeat.incarnation,
        "How many processes it has had.",
        UnitColumn("INC", lambda row: str(row.incarnation), gives_way=2),
    )
    heard_s: float | None = of_learner(
        lambda it: it.heard_s,
        "Since its last heartbeat.",
        UnitColumn("HEARD", lambda row: age(row.heard_s)),
        gauge="diloco_learner_heard_seconds",
    )
    behind: int = of_learner(
        lambda it: it.heartbeat.behind,
        "Versions that it has not adopted yet.",
        UnitColumn("BEHIND", lambda row: str(row.behind), gives_way=5),
        gauge="diloco_learner_behind",
    )
    step: int = of_learner(
        lambda it: it.heartbeat.step, "Its local steps.", UnitColumn("STEP", lambda row: str(row.step), gives_way=4)
    )
    tokens: int = of_learner(
        lambda it: it.known.token_parameters // it.facts.run.layout.num_parameters,
        "Its merged tokens.",
        counter="diloco_learner_tokens_merged",
    )
    tokens_per_s: float = of_learner(
        lambda it: it.heartbeat.tokens_per_s,
        "Its own pace.",
        UnitColumn("TOK/S", lambda row: format_count(row.tokens_per_s)),
        gauge="diloco_learner_tokens_per_second",
    )
    in_last_10: int = of_learner(
        lambda it: it.attendance.count(TOOK_PART),
        "In so many of the last ten merges it took part.",
        gauge="diloco_learner_in_last_merges",
    )
    attendance: str = of_learner(
        lambda it: it.attendance,
        "A mark for each of the last ten merges, the newest last: # took part, . did not.",
        UnitColumn(
            "IN LAST 10", lambda row: row.attendance.replace(TOOK_PART, "█").replace(".", "·"), gives_way=6, left=True
        ),
    )
    loss: float | None = of_learner(
        lambda it: it.heartbeat.loss,
        "Its training loss, nats per token.",
        UnitColumn("LOSS", lambda row: "" if row.loss is None else f"{row.loss:.2f}", gives_way=3),
        gauge="diloco_learner_loss",
    )
    up_bytes: int = of_learner(
        lambda it: it.heartbeat.up_bytes,
        "Sent over its link.",
        UnitColumn("UP/DOWN", lambda row: f"{format_size(row.up_bytes)}/{format_size(row.down_bytes)}", gives_way=1),
        counter="diloco_learner_bytes",
        labels={"direction": "up"},
    )
    down_bytes: int = of_learner(
        lambda it: it.heartbeat.down_bytes,
        "Received over its link.",
        counter="diloco_learner_bytes",
        labels={"direction": "down"},
    )
    note: str = of_learner(
        lambda it: it.note,
        "What else there is to know of it.",
        UnitColumn("NOTE", lambda row: escaped(row.note), gives_way=0, left=True),
    )
    data_percent: float | None = of_learner(
        lambda it: it.heartbeat.data_percent,
        "Of its steps' time, what they waited for data; null: not known.",
        gauge="diloco_learner_data_percent",
    )
    times_usual: float | None = of_learner(
        lambda it: None if it.delta is None else it.delta.times_usual,
        "The norm of its newest merged delta, before clipping, over what is usual; 0: nothing to compare it with.",
        gauge="diloco_learner_delta_times_usual",
    )
    cosine: float | None = of_learner(
        lambda it: None if it.delta is None else it.delta.cosine,
        "Between its newest merged delta and the others of that merge.",
        gauge="diloco_learner_delta_cosine",
    )
    stated_share: float | None = of_learner(
        lambda it: it.stated_share,
        "Of the tokens that all learners state.",
        gauge="diloco_learner_stated_share_ratio",
    )
    believed_share: float | None = of_learner(
        lambda it: it.believed_share,
        "Of the tokens that count: what the syncer's clock bears out.",
        gauge="diloco_learner_believed_share_ratio",
    )


@dataclass(frozen=True)
class SyncerStatus:
    """The last three are measured, and null before the first merge."""

    state: str = of_syncer(lambda it: it.look.syncer or "", "How it is (observe/unit_states.py).")
    epoch: int = of_syncer(
        lambda it: it.look.facts.state.epoch, "How many syncers have served.", gauge="diloco_syncer_epoch"
    )
    host: str = of_syncer(lambda it: it.said.host, "Its machine.")
    heard_s: float | None = of_syncer(
        lambda it: it.heard_s, "Since its last heartbeat.", gauge="diloco_syncer_heard_seconds"
    )
    unit: str = of_syncer(lambda it: it.said.unit, "`syncer`, or the standby that took over.")
    note: str = of_syncer(lambda it: it.note, "Its failing call to the store, or why it does what it does.")
    limit: str | None = of_syncer(
        lambda it: it.pace[0].limit if it.pace else None, "What limits its pace: calls, bytes or processor."
    )
    busy_percent: float | None = of_syncer(
        lambda it: 100 * it.pace[0].seconds / it.pace[1] if it.pace else None, "Of a slot, what it needs."
    )
    slot_s: float | None = of_syncer(
        lambda it: it.pace[1] if it.pace else None, "The slot that the learners' training takes."
    )


@dataclass(frozen=True)
class StandbyStatus:
    name: str = of_standby(lambda it: it[0], "Of the standby.")
    state: str = of_standby(lambda it: aged(it[1].heartbeat.state, it[1].age_s), "How it is (observe/unit_states.py).")
    host: str = of_standby(lambda it: it[1].heartbeat.host, "Its machine.")
    heard_s: float = of_standby(lambda it: it[1].age_s, "Since its last heartbeat.")
    note: str = of_standby(
        lambda it: "" if it[1].age_s > LOST_S else it[1].heartbeat.reason, "Why it does what it does."
    )


@dataclass(frozen=True)
class StoreStatus:
    """Traffic of all learners and the syncer since the launch, by their own statements."""

    url: str = of_store(lambda it: it.facts.url, "The run's bucket.")
    up_bytes: int = of_store(
        lambda it: it.total("up_bytes"),
        "Moved to the store.",
        counter="diloco_store_bytes",
        labels={"direction": "up"},
    )
    down_bytes: int = of_store(
        lambda it: it.total("down_bytes"),
        "Moved from the store.",
        counter="diloco_store_bytes",
        labels={"direction": "down"},
    )
    requests: int = of_store(
        lambda it: it.total("requests"),
        "Requests to the store.",
        counter="diloco_store_requests",
        labels={"kind": "read"},
        value=lambda store: store.requests - store.writes,
    )
    writes: int = of_store(
        lambda it: it.total("writes"),
        "Those that write or list (class A); the others read (class B).",
        counter="diloco_store_requests",
        labels={"kind": "write"},
    )
    requests_a_slot: float | None = of_store(
        lambda it: round(it.total("requests") / it.facts.state.slot, 1) if it.facts.state.slot else None,
        "Requests for each slot so far; null before the first.",
    )
    retrying: str = of_store(
        lambda it: "; ".join(f"{unit}: {said.retrying}" for unit, said in it.heartbeats.items() if said.retrying),
        "Calls that fail now, by unit.",
    )
    calls_a_s: float = of_store(
        lambda it: 0.0 if it.facts.syncer is None else it.facts.syncer.heartbeat.calls_a_s,
        "The syncer's pace of calls, if the store throttles it; else 0.",
    )


@dataclass(frozen=True)
class MirrorStatus:
    """A region's own bucket, by the syncer's last heartbeat. Bytes and requests are between the two buckets since the
    launch."""

    region: str = of_mirror(lambda it: it.store.name, "Whose bucket it is.")
    url: str = of_mirror(lambda it: it.store.url, "The region's bucket.")
    state: str = of_mirror(
        lambda it: it.state,
        "FOLLOWS the home log; BEHIND; STOPPED: holds other bytes than home; UNKNOWN: no syncer serves.",
    )
    commit: int = of_mirror(lambda it: it.heartbeat.n, "Its newest commit.")
    commits_behind: int = of_mirror(lambda it: it.behind, "How far it is behind.", gauge="diloco_region_behind_commits")
    behind_s: float = of_mirror(lambda it: it.heartbeat.behind_s, "For so long.")
    offers: int = of_mirror(lambda it: it.heartbeat.offers, "Offers that were carried home.")
    up_bytes: int = of_mirror(lambda it: it.heartbeat.up_bytes, "To the region's bucket.")
    down_bytes: int = of_mirror(lambda it: it.heartbeat.down_bytes, "From the region's bucket.")
    egress_cost: float = of_mirror(lambda it: it.egress_cost, "What leaving either costs, by the inventory.")
    last_error: str = of_mirror(lambda it: it.heartbeat.error, "The call that fails.")
    requests: int = of_mirror(lambda it: it.heartbeat.requests, "Requests to the region's bucket.")
    writes: int = of_mirror(lambda it: it.heartbeat.writes, "Those that write or list.")
    unheard: dict[str, str] = of_mirror(
        lambda it: it.heartbeat.unheard, "Learners whose offers are not carried home, and why."
    )


@dataclass(frozen=True)
class GarbageStatus:
    """What the syncer has still to delete."""

    objects: int = of_garbage(lambda it: it.said.garbage.objects, "About so many objects, or those found so far.")
    commits: int | None = of_garbage(
        lambda it: it.commits if it.is_known else None, "Commits that left them behind; null: not known yet."
    )
    per_h: float | None = of_garbage(
        lambda it: it.per_h if it.is_known else None, "How many more each hour; null: not known yet."
    )
    note: str = of_garbage(lambda it: it.note, "That this is more than the run keeps; empty if deletions keep pace.")


@dataclass(frozen=True)
class UnitError:
    """The last error of a unit that has not been well since."""

    unit: str
    time: str
    text: str


@dataclass(frozen=True)
class Status:
    """The fields of `status --json`. Tokens are merged tokens."""

    run: str = of_run(lambda it: it.facts.run.name, "The run's name.")
    plan: str = of_run(lambda it: it.facts.run.plan, "The digest of the plan that it was launched from.")
    state: str = of_run(
        lambda it: it.verdict.state,
        "1 for the verdict on the run, 0 for every other state.",
        gauge="diloco_state",
        states=tuple(State),
    )
    commit: int = of_run(lambda it: it.state.n, "Number of the newest commit.", gauge="diloco_commit")
    step: int = of_run(
        lambda it: global_step(it.facts.run, it.state.slot), "The syncer's global step.", gauge="diloco_step"
    )
    tokens: int = of_run(lambda it: it.tokens, "Merged tokens.", counter="diloco_tokens_merged")
    tokens_target: int = of_run(
        lambda it: it.facts.run.settings.train.tokens,
        "Merged tokens at which the run ends.",
        gauge="diloco_tokens_target",
    )
    loss: float | None = of_run(
        lambda it: it.state.metrics.loss, "Held-out loss of the outer parameters, nats per token.", gauge="diloco_loss"
    )
    tokens_per_s: float | None = of_run(
        lambda it: merged_rate(it.state),
        "Merged tokens per second over the last merges.",
        gauge="diloco_tokens_per_second",
    )
    goodput: float | None = of_run(
        lambda it: goodput(it.facts), "Merged tokens by those of the undisturbed plan.", gauge="diloco_goodput_ratio"
    )
    participation: float | None = of_run(
        lambda it: it.state.participation, "Mean share of the islands in a merge.", gauge="diloco_participation_ratio"
    )
    eta_s: float | None = of_run(
        lambda it: it.eta_s, "Until the target, while merges go on.", gauge="diloco_eta_seconds"
    )
    age_s: float | None = of_run(lambda it: it.age_s, "Of what was heard last; null: nobody was heard.")
    reason: str = of_run(lambda it: it.verdict.reason, "Why it is in its state.")
    last_merge: LastMerge | None = of_run(lambda it: last_merge(it.facts), "The newest merge; null before the first.")
    learners: list[LearnerStatus] = of_run(
        lambda it: [
            made(LearnerStatus, OneLearner(it.look, island))
            for island in it.state.with_members(it.facts.run).all_islands
        ],
        "All islands, planned and joined.",
    )
    syncer: SyncerStatus | None = of_run(
        lambda it: made(SyncerStatus, it.syncer) if it.syncer else None,
        "The syncer that serves, or served last; null: not heard yet.",
    )
    store: StoreStatus | None = of_run(lambda it: made(StoreStatus, OneStore(it.facts)), "The run's traffic.")
    recent: list[Event] = of_run(
        lambda it: newest((event for event in it.facts.events if event.kind not in QUIET), RECENT_SHOWN),
        "The newest events, the newest first, without merges and collections.",
    )
    clock_skew_s: float | None = of_run(
        lambda it: it.facts.clock_skew_s,
        "How far the store's clock is ahead (below 0: behind), if that is notable.",
    )
    standbys: list[StandbyStatus] = of_run(
        lambda it: standbys(it.facts), "Who would take over, and who fell silent lately."
    )
    mirrors: list[MirrorStatus] = of_run(
        lambda it: [made(MirrorStatus, OneMirror(it.facts, store)) for store in it.facts.run.regions],
        "The buckets of regions.",
    )
    partial: str = of_run(lambda it: it.facts.partial, "What a slow store did not show in time.")
    divergence: str = of_run(lambda it: concern(it.state, it.facts.run), "What people should know of the loss.")
    trust: str = of_run(lambda it: trust_of(it.facts.run), "Whom the run trusts.")
    since_s: float | None = of_run(lambda it: it.verdict.since_s, "For how long it is in its state, if that is known.")
    hint: str = of_run(lambda it: it.verdict.hint, "One command that helps.")
    limit: str = of_run(lambda it: it.verdict.limit, "What limits the pace.")
    jobs: list[Job] = of_run(lambda it: [], "Of its units that are jobs of a cluster, where `status` asks it.")
    errors: list[UnitError] = of_run(
        lambda it: [
            UnitError(event.unit, event.time, event.text)
            for event in unhealed_errors(it.facts.events, it.state.metrics.loss is not None)
            if it.is_concerned(event)
        ],
        "The last errors of units that have not been well since.",
    )
    garbage: GarbageStatus | None = of_run(
        lambda it: made(GarbageStatus, OneGarbage(it.facts, it.syncer.said)) if it.syncer else None,
        "What the syncer has still to delete; null: not known.",
    )
    doubts: str = of_run(lambda it: doubts(it.look), "What does not fit the plan, and why goodput is low.")


def status_of(facts: RunFacts, local: Local = Local()) -> Status:
    """`local`: what this machine knows of its own units."""
    look = Look(facts, local)
    return made(Status, OneRun(look, verdict_of(look)))


def last_merge(facts: RunFacts) -> LastMerge | None:
    merges = facts.state.metrics.recent_merges
    return made(LastMerge, (facts, merges[-1])) if merges else None


def standbys(facts: RunFacts) -> list[StandbyStatus]:
    """Those that wait now, and those that fell silent lately; none for a run that is over."""
    if facts.state.phase != RunPhase.RUNNING:
        return []
    return [
        made(StandbyStatus, (name, heard))
        for name, heard in sorted(facts.standbys.items())
        if heard.heartbeat.state != "DONE" and heard.age_s <= FORGOTTEN_S
    ]


def merged_rate(state: RunState) -> float | None:
    """Merged tokens per second over the last merges since the run was at rest."""
    merges = [merge for merge in state.metrics.recent_merges if merge.time >= state.metrics.resumed_at]
    return rate_between(merges[0], merges[-1]) if merges else None


def rate_between(first: MergeNote, last: MergeNote) -> float | None:
    seconds = (moment(last.time) - moment(first.time)).total_seconds()
    return (last.tokens - first.tokens) / seconds if seconds > 0 else None


def wall_seconds(facts: RunFacts) -> float:
    """Since launch: from the first commit to now, or to the last commit if the run is over; less what it rested."""
    metrics = facts.state.metrics
    if not metrics.started_at:
        return 0.0
    wall_s = facts.seconds_since(metrics.started_at) - metrics.rested_s
    return wall_s if facts.state.phase == RunPhase.RUNNING else wall_s - facts.seconds_since(metrics.updated_at)


def goodput(facts: RunFacts) -> float | None:
    """Merged tokens / (sum over planned islands of their undisturbed tokens per second x wall time since launch,
    without the time between a stop and the next syncer).

    Islands that joined later add to the tokens and not to the plan, so that with them it may be above 1."""
    planned = sum(island.tokens_per_s for island in facts.run.islands) * wall_seconds(facts)
    return facts.state.tokens(facts.run.layout) / planned if planned > 0 else None


def doubts(look: Look) -> str:
    """What people should look at: islands far from their planned speed, and more merged than planned islands train."""
    facts, told = look.facts, []
    for island in facts.run.islands:
        heard, planned = facts.learners.get(island.name), planned_rate(facts.run, island.name)
        proven = facts.state.learner(island.name).proven
        is_over = facts.state.phase == RunPhase.FINISHED
        trains = heard is not None and (is_over or look.learners[island.name] == LearnerState.TRAINING)
        mean = heard.heartbeat.mean_tokens_per_s if heard is not None and trains else 0.0
        if planned and proven >= FAR * planned:
            told.append(f"{island.name} has shown {proven / planned:.2g} times its planned speed")
        elif planned and 0 < mean <= planned / FAR:
            told.append(f"{island.name} trains at {mean / planned:.2g} of its planned speed")
    share = goodput(facts)
    if share is not None and share > MOST_GOODPUT and not facts.state.members:
        told.insert(0, f"goodput {100 * share:.0f}%: more counts than the planned islands train undisturbed")
    elif share is not None and share <= 1 / FAR and facts.state.merges > SETTLED_ROUNDS * facts.run.num_fragments:
        told.extend(_idle(facts))
    return "; ".join(told)


def _idle(facts: RunFacts) -> Iterator[str]:
    """Why little was merged, of islands that trained as fast as planned while they did."""
    wall_s, undone = wall_seconds(facts), ", or its work was rolled back" if facts.state.rollbacks else ""
    for island in facts.run.islands:
        heard, known = facts.learners.get(island.name), facts.state.learner(island.name)
        mean = 0.0 if heard is None else heard.heartbeat.mean_tokens_per_s
        tokens = known.token_parameters / facts.run.layout.num_parameters
        worked = tokens / mean / wall_s if mean else 0.0
        if not known.merges:
            yield f"{island.name} has merged nothing"
        elif 0 < worked <= 1 / FAR:
            late = f"it came late or stood still{undone}"
            yield f"{island.name} merged the work of {100 * worked:.0f}% of the time: {late}"


def global_step(run: RunFormat, slot: int) -> int:
    """The paper's t of the last committed slot."""
    if slot == 0:
        return 0
    every, rounds = run.settings.sync.every, (slot - 1) // run.num_fragments
    due = (fragment_of_slot(slot - 1, run.num_fragments) + 1) * every
    return rounds * every + due // run.num_fragments
