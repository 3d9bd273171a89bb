"""The verdict on a run: how it is, why, and what helps. Headline, ETA, JSON and exit status follow from it.

A pure function of the facts from the bucket. The checks are asked in the order of CHECKS; the first that answers
decides, and without an answer merges go on. A run stalls when no merge comes for STALLS_AFTER of its usual time between
merges, and for at least WRITTEN_S if the cause is written somewhere, or SILENT_S if nothing but silence tells it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median_high

from diloco_cli.observe.facts import RunFacts, moment
from diloco_cli.observe.unit_states import LOST, LOST_S, QUARANTINED, SUSPECT, learner_state, syncer_state
from diloco_cli.protocol.log.records import Island
from diloco_cli.protocol.log.states import LearnerState, RunPhase, SyncerState
from diloco_cli.protocol.rules.divergence import concern
from diloco_cli.units import format_duration

STALLS_AFTER = 1.8  # times the expected time between two merges
WRITTEN_S, SILENT_S = 8.0, 25.0
STARTS_WITHIN_S = 60.0  # processes start, and load what they need, beside the time of the first slot


class State(StrEnum):
    STARTING = "STARTING"
    MERGING = "MERGING"
    SLOW = "SLOW"
    DEGRADED = "DEGRADED"
    STALLED = "STALLED"
    PAUSED = "PAUSED"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    SILENT = "SILENT"
    FAILED = "FAILED"
    FINISHED = "FINISHED"


MEANINGS = {
    State.STARTING: "no merge yet since the launch or the resume, and not for longer than a start takes",
    State.MERGING: "merges go on",
    State.SLOW: "merges go on, below 0.8 of the best pace that this run sustained",
    State.DEGRADED: "merges go on without some of the planned islands",
    State.STALLED: "no merge for longer than expected, or none can come",
    State.PAUSED: "the syncer has stopped the run, because its loss jumped",
    State.DRAINING: "the last offers are settled: the target is reached, or the learners were told to leave",
    State.STOPPED: "an operator has stopped the run; it waits in its bucket",
    State.SILENT: "no unit is heard",
    State.FAILED: "all learners, or all syncers, have ended for good with an error",
    State.FINISHED: "the target is reached",
}
TROUBLE = frozenset({State.DEGRADED, State.STALLED, State.SILENT, State.FAILED})  # `--exit-code` gives 5
MERGES = frozenset({State.MERGING, State.SLOW, State.DEGRADED})  # an ETA means something


@dataclass(frozen=True)
class Verdict:
    """`reason`: in plain words, with the cause where it is known; `since_s`: for so long, if that is known; `hint`: one
    command, or ""; `limit`: what limits the pace, or ""."""

    state: State
    reason: str
    since_s: float | None = None
    hint: str = ""
    limit: str = ""


class Look:
    """The facts, and what follows from them at a glance. `learners`: state by name; `expected_s`: between two merges;
    `missing`: planned islands that take no part now; `unserved`: no syncer serves, and no standby will take over."""

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        islands = facts.state.with_members(facts.run).all_islands
        self.learners = {island.name: learner_state(facts, island.name) for island in islands}
        self.syncer = syncer_state(facts)
        self.resume = f"diloco resume {facts.url}"
        self.expected_s = expected_slot_s(facts)
        self.idle_s = idle_s(facts)
        self.starts = starts(facts)
        waits = any(heard.age_s <= LOST_S for heard in facts.standbys.values())
        self.unserved = self.syncer in (None, LOST, SyncerState.DONE) and not waits
        self.missing = [island.name for island in facts.run.islands if self._is_missing(island.name)]

    def _is_missing(self, name: str) -> bool:
        unheard = name not in self.facts.learners and self.facts.seconds_since_launch() > STARTS_WITHIN_S
        return unheard or self.learners[name] in MISSING

    @property
    def overdue(self) -> bool:
        """No merge has come for longer than expected."""
        written = self.syncer not in (None, SUSPECT, LOST)
        start_s = STARTS_WITHIN_S if self.starts else 0.0
        return self.idle_s > start_s + max(STALLS_AFTER * self.expected_s, WRITTEN_S if written else SILENT_S)


def expected_slot_s(facts: RunFacts) -> float:
    """The expected time between two merges: as the log states a slot and its grace, or as the newest merges came, if
    that is longer. Before the first two as planned, or as the steps of the learners that are heard take."""
    state, run = facts.state, facts.run
    gaps = [
        later - earlier for earlier, later in pairwise(moment(m.time).timestamp() for m in state.metrics.recent_merges)
    ]
    usual_s = median_high(gaps) if gaps else 0.0
    if state.window is not None and state.window.slot_s > 0:
        return max(usual_s, state.window.slot_s + state.window.grace_s)
    return usual_s or min(_slot_of(facts, island) for island in run.islands)


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


def verdict_of(facts: RunFacts) -> Verdict:
    look = Look(facts)
    for check in CHECKS:
        verdict = check(look)
        if verdict is not None:
            return verdict
    gone = look.syncer in (None, SUSPECT, LOST, SyncerState.DONE)
    return Verdict(State.MERGING, no_syncer(facts, look.syncer) if gone else _stated(look))


def _over(look: Look) -> Verdict | None:
    """What the log says of a run that does not run."""
    facts, state = look.facts, look.facts.state
    if state.phase == RunPhase.RUNNING:
        return None
    since_s = facts.seconds_since(state.metrics.updated_at)
    told = next((n.text for n in reversed(state.metrics.notes) if n.kind in ("stop", "finish")), "")
    if state.phase == RunPhase.FINISHED:
        return Verdict(State.FINISHED, told, since_s, f"diloco export {facts.url}")
    if state.stability.paused:
        return Verdict(State.PAUSED, concern(state, facts.run), since_s, look.resume)
    return Verdict(State.STOPPED, told, since_s, look.resume)


def _failed(look: Look) -> Verdict | None:
    if look.learners and all(state == LearnerState.FAILED for state in look.learners.values()):
        return Verdict(State.FAILED, f"all learners have failed: {', '.join(look.learners)}", None, _logs(look))
    return None


def _silent(look: Look) -> Verdict | None:
    facts = look.facts
    ages = [heard.age_s for heard in facts.learners.values()] + [heard.age_s for heard in facts.standbys.values()]
    ages += [facts.syncer.age_s] if facts.syncer is not None else []
    if any(state not in SILENCE for state in look.learners.values()):
        return None
    if not look.unserved or (look.starts and (not ages or min(ages) <= LOST_S) and not look.overdue):
        return None
    if not ages:
        return Verdict(State.SILENT, "no unit has been heard yet", look.idle_s, look.resume)
    since_s = min(ages)
    if all(state == LearnerState.DONE for state in look.learners.values()) and look.syncer == SyncerState.DONE:
        return Verdict(State.SILENT, "all units have left in good order", since_s, look.resume)
    reason = f"no unit has been heard for {format_duration(since_s)}; why is not known from the bucket"
    return Verdict(State.SILENT, reason, since_s, look.resume)


def _draining(look: Look) -> Verdict | None:
    if look.syncer == SyncerState.FINISHING:
        return Verdict(State.DRAINING, "the target is reached: the last evaluation, and the last offers' outcomes")
    present = {name: state for name, state in look.learners.items() if state not in SILENCE}
    if present and all(state == LearnerState.DRAINING for state in present.values()):
        return Verdict(State.DRAINING, f"told to leave: {', '.join(present)}", None, look.resume)
    return None


def _starting(look: Look) -> Verdict | None:
    if not look.starts or look.overdue:
        return None
    waits = [name for name, state in look.learners.items() if state == LearnerState.STARTING]
    waits += ["syncer"] if look.syncer is None else []
    reason = f"not heard yet: {', '.join(waits)}" if waits else f"the first merge is to come; {_stated(look)}"
    return Verdict(State.STARTING, reason)


def _stalled(look: Look) -> Verdict | None:
    """Also before it is overdue, where no merge can come: no syncer serves, or no learner is left."""
    lost = all(name in look.missing for name in look.learners)
    if not (look.overdue or look.unserved or lost):
        return None
    reason, hint = _why_no_merge(look, lost)
    return Verdict(State.STALLED, reason, look.idle_s, hint, reason)


def _why_no_merge(look: Look, lost: bool) -> tuple[str, str]:
    """(reason, hint): the first cause that explains it."""
    facts = look.facts
    if look.unserved or look.syncer in (None, LOST, SUSPECT, SyncerState.DONE):
        return no_syncer(facts, look.syncer), f"diloco syncer {facts.url}" if look.unserved else ""
    if facts.syncer is not None and facts.syncer.heartbeat.retrying:
        return f"the syncer's store fails: {facts.syncer.heartbeat.retrying}", f"diloco doctor {facts.url}"
    if lost:
        return f"no learner is left: {_missing(look)}", _brings_back(look)
    retrying = {name: heard.heartbeat.retrying for name, heard in facts.learners.items() if heard.heartbeat.retrying}
    if look.missing:
        return f"{_stated(look)}; missing: {_missing(look)}", _brings_back(look)
    if retrying:
        trouble = "; ".join(f"{name}: {text}" for name, text in retrying.items())
        return f"the learners' store fails: {trouble}", f"diloco doctor {facts.url}"
    return f"{_stated(look)}; why is not known from the bucket", _logs(look)


def no_syncer(facts: RunFacts, state: str | None) -> str:
    """In words: which syncer served last, and whether one will take over."""
    waiting = [name for name, heard in sorted(facts.standbys.items()) if heard.age_s <= LOST_S]
    if facts.syncer is None:
        who = "no syncer has been heard yet"
    else:
        last = facts.syncer.heartbeat
        gone = "has left" if state == SyncerState.DONE else f"was heard {facts.syncer.age_s:.0f} s ago"
        who = f"no syncer serves: {last.unit} on {last.host} {gone}"
    return f"{who}; {', '.join(waiting)} will take over" if waiting else who


def _degraded(look: Look) -> Verdict | None:
    if not look.missing:
        return None
    planned = len(look.facts.run.islands)
    reason = f"merges go on without {len(look.missing)} of {planned} planned islands: {_missing(look)}"
    ages = [heard.age_s for name, heard in look.facts.learners.items() if name in look.missing]
    return Verdict(State.DEGRADED, reason, max(ages, default=None), _brings_back(look))


def _missing(look: Look) -> str:
    return ", ".join(f"{name} ({_absence(look, name)})" for name in look.missing)


def _absence(look: Look, name: str) -> str:
    heard, state = look.facts.learners.get(name), look.learners[name]
    if heard is None:
        return "not heard yet"
    known = {
        QUARANTINED: f"its offers are refused since commit {look.facts.state.learner(name).quarantined}",
        LearnerState.DONE: "it has left",
        LearnerState.FAILED: "it has failed",
        LOST: f"not heard for {heard.age_s:.0f} s; why is not known from the bucket",
    }
    return known.get(state, state)


def _brings_back(look: Look) -> str:
    """The command that helps the first missing island."""
    name = look.missing[0]
    if look.learners[name] == QUARANTINED:
        return f"diloco readmit {name} {look.facts.url}"
    if look.learners[name] == LearnerState.FAILED:
        return _logs(look, name)
    return look.resume


def _logs(look: Look, unit: str = "") -> str:
    return f"diloco logs {unit} --run {look.facts.url}" if unit else f"diloco logs --run {look.facts.url}"


def _stated(look: Look) -> str:
    """The reason that the syncer states for what it does."""
    return look.facts.syncer.heartbeat.reason if look.facts.syncer is not None else ""


SILENCE = frozenset({LOST, LearnerState.DONE, LearnerState.FAILED, LearnerState.FENCED, LearnerState.STARTING})
MISSING = frozenset({LOST, LearnerState.DONE, LearnerState.FAILED, QUARANTINED, LearnerState.STUCK})
CHECKS: tuple[Callable[[Look], Verdict | None], ...] = (
    _over, _failed, _silent, _draining, _starting, _stalled, _degraded,
)  # fmt: skip
