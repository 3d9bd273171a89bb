"""The situation of a run: how it is, why, for how long, and what helps. Headline, ETA, JSON and exit status follow.

SITUATIONS is a table, asked from the top: the first row that holds decides. It is a pure function of the facts from the
bucket and of what this machine knows of its own units. A run stalls when no merge comes for STALLS_AFTER times the
usual time between merges, and for at least WRITTEN_S where the cause is written or known here, or SILENT_S where only
silence tells it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median_high

from diloco_cli.config.hardware import data_class_of
from diloco_cli.observe.facts import STARTS_WITHIN_S, Local, LocalUnit, RunFacts, moment
from diloco_cli.observe.unit_states import (
    BAD,
    GOOD,
    LEFT,
    LOST,
    QUARANTINED,
    STEPS,
    STUCK,
    SUSPECT,
    SUSPECT_S,
    UNKNOWN,
    WARNING,
    Word,
    learner_state,
    syncer_here,
    syncer_state,
    will_take_over,
)
from diloco_cli.plan.link import connections_of, machine_text, measured_by
from diloco_cli.protocol.log.health import REASONS
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat
from diloco_cli.protocol.log.keys import SYNCER
from diloco_cli.protocol.log.metrics import REFUSED, Note
from diloco_cli.protocol.log.records import Island
from diloco_cli.protocol.log.state import LearnerState, RunPhase, SyncerState
from diloco_cli.protocol.rules.capacity import SlotTime, SyncerMachine, shortest_slot
from diloco_cli.protocol.rules.divergence import concern
from diloco_cli.quantities import format_count, format_duration, some_of
from diloco_cli.runtime.units import UnitState, is_submitted, own_start

STALLS_AFTER = 1.8  # times the expected time between two merges
WRITTEN_S, SILENT_S = 8.0, 25.0
SLOW_BELOW = 0.8
BLOCKED_PERCENT = 20.0
DATA_PERCENT = 5.0
GRACE_SHARE = 0.25  # of the time between two merges
CROWDED_SHARE = 0.8  # of a slot: a syncer that needs more will soon limit the run
UNMERGED_ROUNDS = 3  # and as many more as offers may be stale
REFUSALS_TOLD = 2  # reasons
NOT_KNOWN = "why is not known from the bucket"
NOT_GENUINE = "its heartbeats and offers are not signed by it, or with a key that is revoked: diloco key request"
SUPERVISED = frozenset({"started", "restarted", "adopted", "ended", "gave_up"})  # events of a supervisor on a unit
MISSING = frozenset({LOST, LEFT, QUARANTINED, LearnerState.FAILED, STUCK})
SILENCE = frozenset({LOST, LEFT, LearnerState.FAILED, LearnerState.FENCED, LearnerState.STARTING})
SYNCER_GONE = (None, LOST, STUCK, LearnerState.RECOVERING, LearnerState.FAILED, LEFT)


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


RUN_STATES: dict[State, Word] = {
    State.STARTING: Word("no merge yet since the launch or resume: its jobs wait, or it starts", WARNING),
    State.MERGING: Word("merges go on", GOOD),
    State.SLOW: Word("merges go on, below 0.8 of the best pace that as many learners sustained in this run", WARNING),
    State.DEGRADED: Word("merges go on without some of the planned islands", WARNING),
    State.STALLED: Word("no merge for longer than expected, or none can come", BAD),
    State.PAUSED: Word("the syncer has stopped the run, because its loss jumped", WARNING),
    State.DRAINING: Word(
        "the last offers are settled: the target is reached, or the learners were told to leave", WARNING
    ),
    State.STOPPED: Word("an operator has stopped the run; it waits in its bucket", WARNING),
    State.SILENT: Word("no unit is heard", BAD),
    State.FAILED: Word("all learners, or all syncers, have ended for good with an error", BAD),
    State.FINISHED: Word("the target is reached", GOOD),
}
TROUBLE = frozenset({State.DEGRADED, State.STALLED, State.SILENT, State.FAILED})  # `--exit-code` gives 5
MERGES = frozenset({State.MERGING, State.SLOW, State.DEGRADED})  # an ETA means something
OVER = frozenset({State.FINISHED, State.STOPPED, State.PAUSED, State.FAILED})  # a screen that is watched ends


class Look:
    """The facts, and what follows from them at a glance. `learners`: state by name; `expected_s`: between two merges;
    `idle_s`: since the newest; `missing`: planned islands that take no part now, each with why; `left`: none takes
    part, and not all of them are being restarted; `unserved`: no syncer serves, and none will by itself."""

    def __init__(self, facts: RunFacts, local: Local) -> None:
        self.facts, self.local = facts, local
        islands = facts.state.with_members(facts.run).all_islands
        self.learners = {island.name: learner_state(facts, island.name, local) for island in islands}
        self.syncer = syncer_state(facts, local)
        self.expected_s, self.idle_s = expected_slot_s(facts), idle_s(facts)
        self.starts = starts(facts)
        waits = any(will_take_over(heard) for heard in facts.standbys.values())
        paused = self.here is not None and self.here.condition == "paused"
        comes_back = self.syncer == LearnerState.RECOVERING or paused
        self.unserved = self.syncer in SYNCER_GONE and not waits and not comes_back
        self.missing = {i.name: why for i in facts.run.islands if (why := self._absence(i))}
        restarts = all(state == LearnerState.RECOVERING for state in self.learners.values())
        planned = {island.name for island in facts.run.islands}
        guests = [state for name, state in self.learners.items() if name not in planned and state not in SILENCE]
        self.left = len(self.missing) == len(planned) and not guests and not restarts

    @property
    def may_be_restarted(self) -> bool:
        """Whether a supervisor's newest event on some learner is another than that it gave it up."""
        last = {event.unit: event.kind for event in self.facts.written if event.kind in SUPERVISED}
        return any(last.get(name, "gave_up") != "gave_up" for name in self.learners)

    @property
    def overdue(self) -> bool:
        """No merge has come for longer than expected."""
        told = self.syncer not in (None, SUSPECT, LOST, UNKNOWN) or bool(self.local.full or self.local.store)
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
        return known.share_of_best(so_far_s, present)

    @property
    def here(self) -> LocalUnit | None:
        """The syncer's process, if it is one of this machine's."""
        return syncer_here(self.facts, self.local)

    @property
    def phase(self) -> RunPhase:
        return self.facts.state.phase

    @property
    def no_syncer(self) -> bool:
        """Whether no syncer serves, or it is silent."""
        return self.syncer in (*SYNCER_GONE, SUSPECT)

    @property
    def stalls(self) -> bool:
        """Also before a merge is overdue, where none can come: no syncer serves, or no learner is left."""
        return self.overdue or self.unserved or self.left

    @property
    def submits(self) -> bool:
        """Whether islands are jobs: `diloco resume` submits those that have none, and takes no other's place."""
        return any(is_submitted(island.infra) for island in self.facts.run.islands)

    @property
    def retrying(self) -> str:
        """The syncer's failing call to its store. What one that has gone said last is past."""
        heard = None if self.syncer in SYNCER_GONE else self.facts.syncer
        return "" if heard is None else heard.heartbeat.retrying

    @property
    def learner_ages(self) -> dict[str, float]:
        return {name: heard.age_s for name, heard in self.facts.learners.items()}

    @property
    def ages(self) -> list[float]:
        """Of all heartbeats."""
        others = [*self.facts.standbys.values(), *([self.facts.syncer] if self.facts.syncer is not None else [])]
        return [*self.learner_ages.values(), *(heard.age_s for heard in others)]

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
        left = state == LEFT and here is not None and here.said.state == UnitState.DONE  # it has said itself why
        is_told = here is not None and state in (*MISSING, LearnerState.RECOVERING) and not left
        account = here.account(None if heard is None else heard.age_s) if here is not None and is_told else ""
        if account:
            return account
        if name in self.facts.strange:
            return NOT_GENUINE
        if state == UNKNOWN:
            return ""
        if state not in MISSING:
            late = heard is None and self.facts.seconds_since_launch() > STARTS_WITHIN_S
            return "not heard yet" if late else self._unmerged(island)
        if heard is None:
            return "it was never heard"
        if state in (LEFT, LearnerState.FAILED):
            what = "it has left" if state == LEFT else "it has ended with an error"
            return f"{what}: {heard.heartbeat.note}" if heard.heartbeat.note else what
        if state == STUCK:
            return f"its step has not ended for {heard.heartbeat.last_step_s + heard.age_s:.0f} s: it hangs"
        if here is not None and not here.dead:
            return f"not heard for {heard.age_s:.0f} s, though its process {here.pid} lives: it hangs"
        return f"not heard for {heard.age_s:.0f} s; {NOT_KNOWN}"

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
    slots = []
    for island in facts.run.islands:
        heard = facts.learners.get(island.name)
        rate = heard.heartbeat.tokens_per_s if heard is not None else 0.0
        step_s = max(island.step_s, island.batch_tokens / rate) if rate > 0 else island.step_s
        slots.append(island.local_steps * step_s / facts.run.num_fragments)
    return min(slots)


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


def refusals_of(notes: Iterable[Note], learner: str) -> str:
    """The most frequent reasons first; "" without any."""
    counts: Counter[str] = Counter()
    for note in notes:
        if (note.kind, note.unit) == (REFUSED, learner):
            counts[note.text] += note.count
    return "; ".join(
        f"{count} refused: {reason}" + (f" ({REASONS[reason].text})" if reason in REASONS else "")
        for reason, count in counts.most_common(REFUSALS_TOLD)
    )


def limit_of(look: Look) -> str:
    """ "" if the facts show none. A cause comes before what it brings about: learners wait for a syncer that is slower
    than their slots."""
    facts, syncer = look.facts, look.facts.syncer
    if look.retrying:
        return f"the syncer's store: {look.retrying}"
    if look.missing:
        return f"missing: {some_of(list(look.missing))}"
    if syncer is not None and syncer.heartbeat.calls_a_s:
        return f"the store throttles: {syncer.heartbeat.calls_a_s:.0f} calls a second of the syncer get through"
    if (pace := pace_of_syncer(look)) is not None and pace[0].seconds >= CROWDED_SHARE * pace[1]:
        spent, slot_s = pace
        needs = f"the syncer needs {100 * spent.seconds / slot_s:.0f}% of its slot of {format_duration(slot_s)}"
        return f"{needs}, most of it for {spent.limit}"
    heard = {name: heard.heartbeat for name, heard in facts.learners.items() if look.learners[name] in STEPS}
    return next(filter(None, (_of_learner(name, said) for name, said in heard.items())), "") or _of_merges(look)


def _of_learner(name: str, said: LearnerHeartbeat) -> str:
    if said.retrying:
        return f"the store of {name}: {said.retrying}"
    if said.tokens_per_s < SLOW_BELOW * said.mean_tokens_per_s:
        usual = format_count(said.mean_tokens_per_s)
        return f"{name} trains at {format_count(said.tokens_per_s)} tok/s, usually at {usual}"
    if said.blocked_percent > BLOCKED_PERCENT:
        return f"{name} spends {said.blocked_percent:.0f}% of its time on the exchange"
    if (said.data_percent or 0.0) > DATA_PERCENT:
        return f"{name} waits for its data {said.data_percent:.0f}% of its steps' time"
    return ""


def pace_of_syncer(look: Look) -> tuple[SlotTime, float] | None:
    """What a slot takes the syncer, by its own measurements, and the slot that the learners' training takes, in
    seconds: merges that come too late stretch the log's own slots. None before its first merge."""
    facts = look.facts
    merges, heard = facts.state.metrics.recent_merges, facts.syncer
    measured = None if heard is None else measured_by(heard.heartbeat, facts.run, merges)
    if measured is None:
        return None
    slot_s = training_slot_s(facts) or look.expected_s
    return shortest_slot(*measured, slot_s), slot_s


def machine_of_syncer(facts: RunFacts, guess: SyncerMachine) -> tuple[SyncerMachine, str]:
    """The machine of a run's syncer: as its newest heartbeat says, and a guess for what it does not. And in words,
    which it was."""
    if facts.syncer is None:
        return guess, f"its syncer has no heartbeat, so that its machine is guessed: {machine_text(guess)}"
    said = facts.syncer.heartbeat
    measured = measured_by(said, facts.run, facts.state.metrics.recent_merges)
    if measured is not None:
        return measured[1], f"its syncer's machine, as that has measured it: {machine_text(measured[1])}"
    known = replace(guess, reads_back=said.reads_back, connections=connections_of(said))
    return known, f"its syncer has measured no merge, so that its machine's speed is guessed: {machine_text(known)}"


def _of_merges(look: Look) -> str:
    """Who is often left out, and how long the syncer waits."""
    merges = look.facts.state.metrics.recent_merges
    if len(merges) < 2:
        return ""
    planned = [island.name for island in look.facts.run.islands]
    parts = {name: sum(name in merge.participants for merge in merges) for name in planned}
    rarest = min(parts, key=lambda name: parts[name])
    if parts[rarest] < SLOW_BELOW * len(merges):
        return f"{rarest} took part in {parts[rarest]} of the last {len(merges)} merges"
    grace_s = fmean(merge.grace_used_s for merge in merges)
    if grace_s > GRACE_SHARE * look.expected_s:
        return f"the grace: each merge waits {grace_s:.1f} s of {look.expected_s:.1f} s"
    return "the syncer is busy with a merge" if look.syncer == SyncerState.MERGING else ""


# -- the table ----------------------------------------------------------------------------------------------------


Words = str | Callable[["Look"], str]
"""Text as it is, but for {url} of the run; or what makes it."""


@dataclass(frozen=True)
class Situation:
    """A row of the table. `holds`: whether the run is in it; `reason`: in plain words, with the cause where it is
    known; `hint`: one command; `since_s`: for so long, if that is known; `limit`: what limits the pace."""

    state: State
    holds: Callable[[Look], object]
    reason: Words
    hint: Words = ""
    since_s: Callable[[Look], float | None] = lambda look: None
    limit: Words = ""


@dataclass(frozen=True)
class Verdict:
    """A row of SITUATIONS, computed for one run."""

    state: State
    reason: str
    since_s: float | None = None
    hint: str = ""
    limit: str = ""


def verdict_of(look: Look) -> Verdict:
    row = next(row for row in SITUATIONS if row.holds(look))
    reason, hint, limit = (_said(words, look) for words in (row.reason, row.hint, row.limit))
    return Verdict(row.state, reason, row.since_s(look), hint, limit)


def _said(words: Words, look: Look) -> str:
    return words.replace("{url}", look.facts.url) if isinstance(words, str) else words(look)


def _told_last(look: Look) -> str:
    notes = look.facts.state.metrics.notes
    return next((note.text for note in reversed(notes) if note.kind in ("stop", "finish")), "")


def _updated(look: Look) -> float:
    return look.facts.seconds_since(look.facts.state.metrics.updated_at)


def _learners_gave_up(look: Look) -> bool:
    """On this machine it is known that nothing is restarted. In the bucket a supervisor says that it gave a learner up;
    where none has said so, nothing was restarted for a while."""
    if not look.learners or any(state != LearnerState.FAILED for state in look.learners.values()):
        return False
    given_up = any(unit.gave_up and unit.kind == "learner" for unit in look.local.units.values())
    youngest_s = min(look.learner_ages.values(), default=0.0)
    return given_up or not (youngest_s <= WRITTEN_S or look.may_be_restarted)


def _is_silent(look: Look) -> bool:
    if not look.unserved or any(state not in SILENCE for state in look.learners.values()):
        return False
    if any(not unit.dead for unit in look.local.units.values()):
        return False  # what hinders them is known here
    ended = any(state == LOST for state in look.learners.values()) or look.syncer == LOST
    return not look.starts or look.overdue or ended


def _left(look: Look) -> list[str]:
    """The units that have left in good order."""
    states = {**look.learners, **({"syncer": look.syncer} if look.syncer else {})}
    return [name for name, state in states.items() if state == LEFT]


def _all_left(look: Look) -> bool:
    return _is_silent(look) and len(_left(look)) == len(look.learners) + (look.syncer is not None)


def _all_dead_here(look: Look) -> bool:
    units = look.local.units.values()
    return _is_silent(look) and bool(units) and all(unit.dead for unit in units)


def _silence(look: Look) -> str:
    if not look.ages:
        return "no unit has been heard yet"
    left = f"{', '.join(_left(look))} left in good order; " if _left(look) else ""
    return f"{left}no unit has been heard for {format_duration(min(look.ages))}; {NOT_KNOWN}"


def _youngest_s(look: Look) -> float:
    return min(look.ages, default=look.idle_s)


def _told_to_leave(look: Look) -> list[str]:
    """The learners that are heard, if all of them were told to leave."""
    present = {name: state for name, state in look.learners.items() if state not in SILENCE}
    return list(present) if all(state == LearnerState.DRAINING for state in present.values()) else []


def _awaited(look: Look) -> str:
    planned = [island.name for island in look.facts.run.islands]
    waits = ["syncer"] if look.syncer is None else []
    waits += [name for name in planned if look.learners[name] == LearnerState.STARTING]
    return f"waits for: {some_of(waits)}" if waits else _clauses("the first merge is to come", look.stated)


def _failing_learners(look: Look) -> str:
    heard = {name: said for name, said in look.facts.learners.items() if look.learners[name] not in SILENCE}
    retrying = {name: said.heartbeat.retrying for name, said in heard.items() if said.heartbeat.retrying}
    return "; ".join(f"{name}: {text}" for name, text in retrying.items()) or look.local.store


def _clauses(*texts: str) -> str:
    """The syncer may state nothing."""
    return "; ".join(filter(None, texts))


def _syncers_end(look: Look) -> str:
    """In words: what has become of the syncer, and whether a standby will take over."""
    facts, here = look.facts, look.here
    waiting = [name for name, heard in sorted(facts.standbys.items()) if will_take_over(heard)]
    account = "" if here is None else here.account(None if facts.syncer is None else facts.syncer.age_s)
    if account:
        who = f"no syncer serves: {account}"
    elif facts.syncer is None:
        who = "no syncer has been heard yet"
    else:
        last = facts.syncer.heartbeat
        gone = f"has left: {last.reason}" if look.syncer == LEFT else f"was heard {facts.syncer.age_s:.0f} s ago"
        state = "the syncer is silent" if look.syncer == SUSPECT else "no syncer serves"
        who = _clauses(f"{state}: {last.unit} on {last.host} {gone}", look.local.store)
    return f"{who}; {', '.join(waiting)} will take over" if waiting else who


def _brings_syncer_back(look: Look) -> str:
    here = look.here
    if here is not None and here.is_held:
        return f"diloco chaos revive syncer --run {look.facts.url}"
    if look.local.store:
        return _said(DOCTOR, look)
    if not look.unserved:
        return ""
    stands_by = (here is None or here.supervised) and not look.submits
    return f"diloco {'syncer --standby' if stands_by else 'resume'} {look.facts.url}"


def _brings_back(look: Look) -> str:
    """The command that helps the first missing island."""
    name = next(iter(look.missing))
    state, here = look.learners[name], look.local.units.get(name)
    if state == QUARANTINED:
        return f"diloco readmit {name} {look.facts.url}"
    if here is not None and here.is_held:
        return f"diloco chaos revive {name} --run {look.facts.url}"
    run = look.facts.run
    island = run.island(name)
    if island is not None and data_class_of(island.infra) is not None:  # nothing else starts it, and its log is its own
        start = own_start(name, run.url_for(island.region, run.home_of(look.facts.url)))
        return "" if state == STUCK else start
    if state in (LOST, LEFT) and (here is None or here.dead):
        regions = {island.name: island.region for island in run.islands}
        others = [regions[other] for other in regions.keys() - look.missing.keys()]
        if here is None and regions[name] in others and not look.submits:
            url = run.url_for(regions[name], run.home_of(look.facts.url))  # a resume would take the others' places
            return f"diloco learner --run {url} --name {name}"
        jobs_alone = all(is_submitted(island.infra) for island in run.islands)  # of which it brings what is missing
        elsewhere = len({*regions.values()}) > 1 and not jobs_alone and not set(regions) <= set(look.local.units)
        region = f" --region {regions[name]}" if elsewhere else ""
        return f"diloco resume {look.facts.url}{region}"
    return f"diloco logs {name} --run {look.facts.url}"


def _without(look: Look) -> str:
    planned = len(look.facts.run.islands)
    return f"merges go on without {len(look.missing)} of {planned} planned islands: {look.absences}"


def _pace(look: Look) -> str:
    if look.idle_s > STALLS_AFTER * look.expected_s:
        units = {**look.learners, SYNCER: look.syncer}
        silent = ", ".join(name for name, state in units.items() if state == SUSPECT)
        why = f"; not heard for more than {SUSPECT_S:.0f} s: {silent}" if silent else ""
        return f"no merge for {look.idle_s:.0f} s, usually one in {format_duration(look.expected_s)}{why}"
    return f"merges go on at {look.share_of_best:.2f} of the best pace that as many learners sustained in this run"


def _stall(holds: Callable[[Look], object], reason: Words, hint: Words) -> Situation:
    """The first cause that explains a stall is its reason, and what limits the pace."""
    return Situation(State.STALLED, lambda it: it.stalls and holds(it), reason, hint, lambda it: it.idle_s, reason)


RESUME, DOCTOR, LOGS = "diloco resume {url}", "diloco doctor {url}", "diloco logs --run {url}"


def _resume(look: Look) -> str:
    """Nothing while a supervisor here ends the run, or resumes it."""
    return "" if any(unit.supervised for unit in look.local.units.values()) else f"diloco resume {look.facts.url}"


SITUATIONS: tuple[Situation, ...] = (
    Situation(State.FINISHED, lambda it: it.phase == RunPhase.FINISHED, _told_last, "diloco export {url}", _updated),
    Situation(
        State.PAUSED,
        lambda it: it.phase == RunPhase.STOPPED and it.facts.state.stability.paused,
        lambda it: concern(it.facts.state, it.facts.run),
        _resume,
        _updated,
    ),
    Situation(State.STOPPED, lambda it: it.phase == RunPhase.STOPPED, _told_last, _resume, _updated),
    Situation(
        State.MERGING,
        lambda it: it.facts.cut and it.syncer not in SYNCER_GONE,
        "the syncer is heard, and what it merged last is not known",
        DOCTOR,
    ),
    Situation(
        State.FAILED,
        lambda it: it.unserved and it.here is not None and it.here.gave_up,
        lambda it: f"the syncer has failed: {it.here.said.reason if it.here else ''}",
        "diloco logs syncer --run {url}",
    ),
    Situation(
        State.FAILED,
        _learners_gave_up,
        lambda it: f"all learners have failed: {it.absences}",
        LOGS,
        lambda it: min(it.learner_ages.values(), default=None),
    ),
    Situation(State.SILENT, _all_left, "all units have left in good order", RESUME, _youngest_s),
    Situation(
        State.SILENT,
        _all_dead_here,
        lambda it: "; ".join(f"{name}: {unit.account(None)}" for name, unit in it.local.units.items()),
        RESUME,
        _youngest_s,
    ),
    Situation(State.SILENT, _is_silent, _silence, RESUME, _youngest_s),
    Situation(
        State.DRAINING,
        lambda it: it.syncer == SyncerState.FINISHING,
        "the target is reached: the last evaluation, and the last offers' outcomes",
    ),
    Situation(State.DRAINING, _told_to_leave, lambda it: f"told to leave: {some_of(_told_to_leave(it))}", RESUME),
    Situation(State.STARTING, lambda it: it.starts and not it.overdue, _awaited),
    _stall(lambda it: it.local.full, lambda it: it.local.full, ""),
    _stall(lambda it: it.no_syncer, _syncers_end, _brings_syncer_back),
    _stall(
        lambda it: (
            it.facts.syncer is not None and it.facts.syncer.heartbeat.wants and not it.facts.syncer.heartbeat.epoch
        ),
        lambda it: f"the log has lost records, and who has them is asked: {it.stated}",
        LOGS,
    ),
    _stall(lambda it: it.retrying, lambda it: f"the syncer's store fails: {it.retrying}", DOCTOR),
    _stall(lambda it: it.left, lambda it: f"no learner is left: {it.absences}", _brings_back),
    _stall(lambda it: it.missing, lambda it: _clauses(it.stated, f"missing: {it.absences}"), _brings_back),
    _stall(_failing_learners, lambda it: f"the learners' store fails: {_failing_learners(it)}", DOCTOR),
    _stall(lambda it: True, lambda it: _clauses(it.stated, NOT_KNOWN), LOGS),
    Situation(
        State.DEGRADED,
        lambda it: it.missing,
        _without,
        _brings_back,
        lambda it: max((age_s for name, age_s in it.learner_ages.items() if name in it.missing), default=None),
        limit_of,
    ),
    Situation(
        State.SLOW,
        lambda it: it.share_of_best is not None and it.share_of_best < SLOW_BELOW,
        _pace,
        lambda it: "" if limit_of(it) else _said(LOGS, it),
        limit=lambda it: limit_of(it) or NOT_KNOWN,
    ),
    Situation(State.MERGING, lambda it: it.no_syncer, _syncers_end, limit=limit_of),
    Situation(State.MERGING, lambda it: True, lambda it: it.stated, limit=limit_of),
)
