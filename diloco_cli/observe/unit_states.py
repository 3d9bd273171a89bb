"""The state of one unit as `status` shows it: what it last said of itself, for how long it has been silent, and what
has become of its process, if that lived on this machine.

UNIT_STATES explains every word.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from diloco_cli.observe.facts import STARTS_WITHIN_S, Heard, Local, LocalUnit, RunFacts
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, SyncerHeartbeat, moving_s, tolerated_s
from diloco_cli.protocol.log.keys import SYNCER
from diloco_cli.protocol.log.state import LearnerState, RunPhase, StandbyState, SyncerState

SUSPECT_S = 8.0  # one heartbeat is missing
LOST_S = 25.0
STUCK_AFTER = 5.0  # times the time of a step
FIRST_STEP_S, COMPILED_STEP_S = 60.0, 900.0  # that the first one may take in any case
SUSPECT, LOST, STUCK, QUARANTINED, UPLOADING = "SUSPECT", "LOST", "STUCK", "QUARANTINED", "UPLOADING"
UNKNOWN = "UNKNOWN"
LEFT = "LEFT"
STEPS = (LearnerState.TRAINING, UPLOADING)
LATELY_S = 10.0
ENDED = {LearnerState.DRAINING, LearnerState.FENCED, LearnerState.DONE, LearnerState.FAILED, SyncerState.DONE}
GOOD, WARNING, BAD = "green", "yellow", "bold red"  # as Rich writes them


class Word(NamedTuple):
    """What a state's name means, and its colour."""

    meaning: str
    style: str


UNIT_STATES: dict[str, Word] = {
    LearnerState.STARTING: Word("a learner loads the newest versions, or has not been heard yet", WARNING),
    LearnerState.RECOVERING: Word(
        "a unit is being started again, or loads the newest versions after a failure", WARNING
    ),
    LearnerState.TRAINING: Word("a learner trains", GOOD),
    UPLOADING: Word("a learner trains, and an offer of it is on its way to the bucket", GOOD),
    LearnerState.WAITING: Word("a learner waits for a merge, for its turn in a cold start, or for its link", WARNING),
    STUCK: Word("a learner is heard and its step does not end, or a unit is paused on this machine", BAD),
    LearnerState.DRAINING: Word("a learner was told to leave, and awaits the outcome of its offers", WARNING),
    LearnerState.FENCED: Word("a newer process has this one's place", WARNING),
    LEFT: Word("a unit has left in good order, and the run is not over: `diloco resume`", WARNING),
    LearnerState.DONE: Word("a unit has left in good order, and the run is over", GOOD),
    LearnerState.FAILED: Word("a unit has ended with an error", BAD),
    QUARANTINED: Word("a learner's offers are refused until `diloco readmit`", WARNING),
    SyncerState.READING: Word("a syncer reads the log", WARNING),
    SyncerState.CLAIMING: Word("a syncer takes over", WARNING),
    SyncerState.SERVING: Word("the syncer waits for offers", GOOD),
    SyncerState.MERGING: Word("the syncer merges", GOOD),
    SyncerState.FINISHING: Word("the target is reached: the syncer evaluates and settles the last offers", GOOD),
    StandbyState.STANDING_BY: Word("a standby takes over if the syncer falls silent", GOOD),
    UNKNOWN: Word("the store did not show the unit's heartbeat in time", WARNING),
    SUSPECT: Word(f"no heartbeat for {SUSPECT_S:.0f} s", WARNING),
    LOST: Word(
        f"no heartbeat for {LOST_S:.0f} s (longer with large fragments or a slow syncer), or its process on this"
        " machine has ended",
        BAD,
    ),
}


def will_take_over(standby: Heard[SyncerHeartbeat]) -> bool:
    """Whether this standby lives; while it loads what a syncer needs, it says nothing."""
    return standby.age_s <= (STARTS_WITHIN_S if standby.heartbeat.state == StandbyState.CLAIMING else LOST_S)


def aged(state: str, age_s: float, lost_s: float = LOST_S) -> str:
    return LOST if age_s > lost_s else SUSPECT if age_s > SUSPECT_S else state


def lost_after_s(facts: RunFacts) -> float:
    """After what silence a learner is taken for lost: it may be at a version of the largest fragment."""
    return LOST_S + moving_s(facts.run.layout)


def syncer_lost_after_s(facts: RunFacts) -> float:
    """The same of the syncer, that has said how long it is silent now and then."""
    said_s = 0.0 if facts.syncer is None else facts.syncer.heartbeat.slowest_s
    return tolerated_s(lost_after_s(facts), said_s, facts.run.layout)


def learner_state(facts: RunFacts, name: str, local: Local = Local()) -> str:
    heard, running = facts.learners.get(name), facts.state.phase == RunPhase.RUNNING
    if running and facts.state.learner(name).quarantined is not None:
        return QUARANTINED
    if name in facts.unread:
        return UNKNOWN
    if running and heard is not None and comes_back(facts, heard.age_s):
        heard = None
    said = LearnerState.STARTING if heard is None else heard.heartbeat.state
    if facts.state.phase == RunPhase.FINISHED and said != LearnerState.FAILED:
        return LearnerState.DONE if heard is not None else LOST
    if running and (here := state_here(local.units.get(name), heard, said)):
        return here
    if heard is None or said == LearnerState.FAILED:
        return said
    if said == LearnerState.DONE:
        return LEFT
    return STUCK if is_stuck(facts, name, heard) else aged(said, heard.age_s, lost_after_s(facts))


def comes_back(facts: RunFacts, heard_s: float) -> bool:
    """Whether a learner was last heard before the newest resume, and that was lately: what it said then is past."""
    resumed = facts.state.metrics.resumed_at
    return bool(resumed) and facts.seconds_since(resumed) < min(heard_s, STARTS_WITHIN_S)


def is_stuck(facts: RunFacts, name: str, heard: Heard[LearnerHeartbeat]) -> bool:
    """Whether it is heard and trains, and its step takes far longer than a step; the first one, than is planned."""
    said, island = heard.heartbeat, facts.run.island(name) or facts.state.with_members(facts.run).island(name)
    if said.state not in STEPS or heard.age_s > SUSPECT_S or island is None:
        return False
    rate = said.mean_tokens_per_s
    first_s = COMPILED_STEP_S if facts.run.settings.train.compile else FIRST_STEP_S
    usual_s, least_s = (island.batch_tokens / rate, SUSPECT_S) if rate > 0 else (island.step_s, first_s)
    most_s = max(least_s, STUCK_AFTER * usual_s)
    return said.last_step_s > most_s / 2 and said.last_step_s + heard.age_s > most_s


def syncer_state(facts: RunFacts, local: Local = Local()) -> str | None:
    """None: no syncer has been heard yet."""
    if SYNCER in facts.unread:
        return UNKNOWN
    if facts.syncer is None:
        return state_here(local.units.get("syncer"), None, "") or None
    said = facts.syncer.heartbeat.state
    if said == SyncerState.DONE and facts.state.phase != RunPhase.FINISHED:
        return LEFT
    if facts.state.phase != RunPhase.RUNNING:
        return said
    here = state_here(syncer_here(facts, local), facts.syncer, said)
    return here or aged(said, facts.syncer.age_s, syncer_lost_after_s(facts))


def syncer_here(facts: RunFacts, local: Local) -> LocalUnit | None:
    """The syncer's process, if it is one of this machine's units."""
    if facts.syncer is None:
        return local.units.get("syncer")
    said = facts.syncer.heartbeat
    return local.units.get(said.unit) if said.host == os.uname().nodename else None


def state_here(
    unit: LocalUnit | None, heard: Heard[LearnerHeartbeat] | Heard[SyncerHeartbeat] | None, said: str
) -> str:
    """By the unit's process on this machine; "" if that tells nothing. Where no supervisor lives, a dead process's unit
    may go on elsewhere: then it is heard."""
    if unit is None:
        return ""
    if said in (LearnerState.DONE, LearnerState.FENCED):
        again = unit.condition == "running" and heard is not None and heard.age_s > unit.running_s
        return LearnerState.STARTING if again else ""
    if unit.condition == "paused":
        return STUCK
    heard_s = None if heard is None else heard.age_s
    if unit.restarts(heard_s) or unit.is_new(heard_s):
        return LearnerState.RECOVERING
    if not unit.dead:
        return LearnerState.RECOVERING if said == LearnerState.FAILED else ""  # that was an earlier process
    if unit.gave_up:
        return LearnerState.FAILED
    heard_elsewhere = heard is not None and heard.age_s <= SUSPECT_S and not unit.supervised
    return "" if heard_elsewhere or said == LearnerState.FAILED else LOST


def working(facts: RunFacts, names: Collection[str]) -> list[str]:
    """Of these units those that work by what they said within LATELY_S."""
    heard = {name: (said.age_s, said.heartbeat.state) for name, said in facts.learners.items()}
    heard |= {name: (said.age_s, said.heartbeat.state) for name, said in facts.standbys.items()}
    if facts.syncer is not None:
        heard[facts.syncer.heartbeat.unit] = facts.syncer.age_s, facts.syncer.heartbeat.state
    return sorted(
        name for name in heard.keys() & set(names) if heard[name][0] <= LATELY_S and heard[name][1] not in ENDED
    )
