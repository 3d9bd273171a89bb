"""The facts on a run, and what follows from them at a glance: the ground of a verdict (verdict.py)."""

from __future__ import annotations

from itertools import pairwise
from statistics import median_high

from diloco_cli.observe.facts import RunFacts, moment
from diloco_cli.observe.local import Local
from diloco_cli.observe.unit_states import (
    LOST,
    LOST_S,
    QUARANTINED,
    STEPS,
    SUSPECT,
    SUSPECT_S,
    learner_state,
    syncer_here,
    syncer_state,
)
from diloco_cli.observe.unmerged import NOT_GENUINE, refusals_of
from diloco_cli.protocol.log.records import Island
from diloco_cli.protocol.log.states import LearnerState, SyncerState
from diloco_cli.protocol.log.sustained import share_of_best

STALLS_AFTER = 1.8  # times the expected time between two merges
WRITTEN_S, SILENT_S = 8.0, 25.0
STARTS_WITHIN_S = 60.0  # processes start, and load what they need, beside the time of the first slot
SUPERVISED = frozenset({"started", "restarted", "adopted", "ended", "gave_up"})  # events of a supervisor on a unit
UNMERGED_ROUNDS = 3  # and as many more as offers may be stale
MISSING = frozenset({LOST, QUARANTINED, LearnerState.DONE, LearnerState.FAILED, LearnerState.STUCK})
SYNCER_GONE = (None, LOST, LearnerState.STUCK, LearnerState.RECOVERING, LearnerState.FAILED, SyncerState.DONE)


class Look:
    """`learners`: state by name; `expected_s`: between two merges; `idle_s`: since the newest; `missing`: planned
    islands that take no part now, each with why; `left`: none takes part, and not all of them are being restarted;
    `unserved`: no syncer serves, and none will by itself."""

    def __init__(self, facts: RunFacts, local: Local) -> None:
        self.facts, self.local = facts, local
        islands = facts.state.with_members(facts.run).all_islands
        self.learners = {island.name: learner_state(facts, island.name, local) for island in islands}
        self.syncer = syncer_state(facts, local)
        self.expected_s, self.idle_s = expected_slot_s(facts), idle_s(facts)
        self.starts = starts(facts)
        waits = any(heard.age_s <= LOST_S for heard in facts.standbys.values())
        here = syncer_here(facts, local)
        comes_back = self.syncer == LearnerState.RECOVERING or (here is not None and here.condition == "paused")
        self.unserved = self.syncer in SYNCER_GONE and not waits and not comes_back
        self.missing = {i.name: why for i in facts.run.islands if (why := self._absence(i))}
        restarts = all(state == LearnerState.RECOVERING for state in self.learners.values())
        self.left = all(name in self.missing for name in self.learners) and not restarts

    @property
    def may_be_restarted(self) -> bool:
        """Whether some supervisor's newest word on a learner is another than that it gave it up."""
        last = {event.unit: event.kind for event in self.facts.written if event.kind in SUPERVISED}
        return any(last.get(name, "gave_up") != "gave_up" for name in self.learners)

    @property
    def overdue(self) -> bool:
        """No merge has come for longer than expected."""
        told = self.syncer not in (None, SUSPECT, LOST) or bool(self.local.full or self.local.store)
        start_s = STARTS_WITHIN_S if self.starts else 0.0
        return self.idle_s > start_s + max(STALLS_AFTER * self.expected_s, WRITTEN_S if told else SILENT_S)

    @property
    def share_of_best(self) -> float | None:
        """The present pace over the best one that as many learners as take part now have sustained. The time since the
        newest merge counts once a merge is late."""
        known = self.facts.state.metrics.sustained
        if not known.since:
            return None
        present = sum(state not in MISSING for state in self.learners.values())
        so_far_s = self.facts.seconds_since(known.since) - min(self.idle_s, self.expected_s)
        return share_of_best(known, so_far_s, present)

    @property
    def stated(self) -> str:
        """The reason that the syncer states for what it does."""
        return self.facts.syncer.heartbeat.reason if self.facts.syncer is not None else ""

    @property
    def absences(self) -> str:
        return ", ".join(f"{name} ({why})" for name, why in self.missing.items())

    def _absence(self, island: Island) -> str:
        """Why this planned island takes no part, in words; "" if it does."""
        name, state = island.name, self.learners[island.name]
        heard, here = self.facts.learners.get(name), self.local.units.get(name)
        if state == QUARANTINED:
            return f"its offers are refused since commit {self.facts.state.learner(name).quarantined}"
        account = "" if here is None or state not in (*MISSING, LearnerState.RECOVERING) else here.account
        if account or state not in MISSING:
            return account or self._unheard(name) or self._unmerged(island)
        if name in self.facts.strange:
            return NOT_GENUINE
        if heard is None or state == LearnerState.DONE:
            return "it has left"
        if state == LearnerState.FAILED:
            return "it has ended with an error"
        if state == LearnerState.STUCK:
            return f"its step has not ended for {heard.heartbeat.last_step_s + heard.age_s:.0f} s: it hangs"
        if here is not None and not here.dead:
            return f"not heard for {heard.age_s:.0f} s, though its process {here.pid} lives: it hangs"
        return f"not heard for {heard.age_s:.0f} s; why is not known from the bucket"

    def _unheard(self, name: str) -> str:
        if name in self.facts.strange:
            return NOT_GENUINE
        unheard = name not in self.facts.learners and self.facts.seconds_since_launch() > STARTS_WITHIN_S
        return "not heard yet" if unheard else ""

    def _unmerged(self, island: Island) -> str:
        """Why it takes no part although it trains: none of its offers is merged."""
        facts, heard = self.facts, self.facts.learners.get(island.name)
        if heard is None or heard.age_s > SUSPECT_S or heard.heartbeat.state not in STEPS:
            return ""
        rounds = UNMERGED_ROUNDS + facts.run.settings.sync.staleness_rounds
        known = facts.state.learner(island.name)
        newest = max((applied.produced for applied in known.applied.values()), default=facts.state.base_floor)
        commits = facts.state.n - newest
        if heard.heartbeat.step <= rounds * island.local_steps or commits <= rounds * facts.run.num_fragments:
            return ""
        refused = refusals_of(facts.state.metrics.notes, island.name) or "why is not known"
        why = heard.heartbeat.note or heard.heartbeat.retrying or refused
        return f"it trains, and no offer of it has been merged for {commits} commits: {why}"


def expected_slot_s(facts: RunFacts) -> float:
    """The expected time between two merges: as the log states a slot and its grace, or as the newest merges came, if
    that is longer. Before the first two as planned, or as the steps of the learners that are heard take."""
    state = facts.state
    times = [moment(merge.time).timestamp() for merge in state.metrics.recent_merges]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    usual_s = median_high(gaps) if gaps else 0.0
    if state.window is not None and state.window.slot_s > 0:
        return max(usual_s, state.window.slot_s + state.window.grace_s)
    return usual_s or training_slot_s(facts)


def training_slot_s(facts: RunFacts) -> float:
    """The slot of the fastest island: as planned, or as the steps of one that is heard take, without its waits."""
    return min(_slot_of(facts, island) for island in facts.run.islands)


def _slot_of(facts: RunFacts, island: Island) -> float:
    heard = facts.learners.get(island.name)
    rate = heard.heartbeat.tokens_per_s if heard is not None else 0.0
    step_s = max(island.step_s, island.batch_tokens / rate) if rate > 0 else island.step_s
    return island.local_steps * step_s / facts.run.num_fragments


def idle_s(facts: RunFacts) -> float:
    """Since the newest merge, or since a syncer began to serve, or since the run was created."""
    metrics = facts.state.metrics
    times = [merge.time for merge in metrics.recent_merges[-1:]]
    times += [note.time for note in metrics.notes if note.kind == "epoch_start"][-1:]
    return facts.seconds_since(max(times, key=moment, default=facts.run.created_at))


def starts(facts: RunFacts) -> bool:
    """No merge has come since the launch, or since the newest stop."""
    metrics = facts.state.metrics
    stops = [note.time for note in metrics.notes if note.kind == "stop"]
    merges = [merge.time for merge in metrics.recent_merges]
    return facts.state.merges == 0 or (bool(stops) and (not merges or moment(stops[-1]) > moment(merges[-1])))
