"""The state of one unit as `status` shows it: what it last said of itself, and for how long it has been silent.

UNIT_STATES explains every word; ARCHITECTURE.md shows the same table.
"""

from __future__ import annotations

from diloco_cli.observe.facts import RunFacts
from diloco_cli.protocol.log.states import LearnerState, RunPhase, StandbyState, SyncerState

SUSPECT_S = 8.0  # one heartbeat is missing
LOST_S = 25.0
SUSPECT, LOST, QUARANTINED, UPLOADING = "SUSPECT", "LOST", "QUARANTINED", "UPLOADING"
LEFT = (LearnerState.DONE, LearnerState.FAILED)
UNIT_STATES = {
    LearnerState.STARTING: "a learner loads the newest versions, or has not been heard yet",
    LearnerState.RECOVERING: "a learner loads the newest versions again after a failure",
    LearnerState.TRAINING: "a learner trains",
    UPLOADING: "a learner trains, and an offer of it is on its way to the bucket",
    LearnerState.WAITING: "a learner pauses: it is a round ahead of the merges, or its link is slow",
    LearnerState.STUCK: "a learner is heard, and its step does not end",
    LearnerState.DRAINING: "a learner was told to leave, and awaits the outcome of its offers",
    LearnerState.FENCED: "a newer process has this one's place",
    LearnerState.DONE: "a unit has left in good order",
    LearnerState.FAILED: "a learner has ended for good, with an error",
    QUARANTINED: "a learner's offers are refused until `diloco readmit`",
    SyncerState.READING: "a syncer reads the log",
    SyncerState.CLAIMING: "a syncer takes over",
    SyncerState.SERVING: "the syncer waits for offers",
    SyncerState.MERGING: "the syncer merges",
    SyncerState.FINISHING: "the target is reached: the syncer evaluates and settles the last offers",
    StandbyState.STANDING_BY: "a standby takes over if the syncer falls silent",
    SUSPECT: f"no heartbeat for {SUSPECT_S:.0f} s",
    LOST: f"no heartbeat for {LOST_S:.0f} s",
}


def aged(state: str, age_s: float) -> str:
    return LOST if age_s > LOST_S else SUSPECT if age_s > SUSPECT_S else state


def learner_state(facts: RunFacts, name: str) -> str:
    heard, phase = facts.learners.get(name), facts.state.phase
    if facts.state.learner(name).quarantined is not None and phase == RunPhase.RUNNING:
        return QUARANTINED
    if heard is None:
        return LearnerState.STARTING
    said = heard.heartbeat.state
    if said in LEFT or phase == RunPhase.FINISHED:
        return LearnerState.FAILED if said == LearnerState.FAILED else LearnerState.DONE
    return aged(said, heard.age_s)


def syncer_state(facts: RunFacts) -> str | None:
    """None: no syncer has been heard yet."""
    if facts.syncer is None:
        return None
    said = facts.syncer.heartbeat.state
    over = said == SyncerState.DONE or facts.state.phase != RunPhase.RUNNING
    return said if over else aged(said, facts.syncer.age_s)
