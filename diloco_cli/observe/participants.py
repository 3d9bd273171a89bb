"""Who takes part in a run beside this machine, by what the bucket says."""

from __future__ import annotations

import os
from collections.abc import Collection

from diloco_cli.observe.facts import RunFacts
from diloco_cli.protocol.log.heartbeats import SyncerHeartbeat
from diloco_cli.protocol.log.states import LearnerState, StandbyState, SyncerState
from diloco_cli.runtime.ending import Participants

LATELY_S = 10.0
ENDED = {LearnerState.DRAINING, LearnerState.FENCED, LearnerState.DONE, LearnerState.FAILED, SyncerState.DONE}
SERVES = (SyncerState.SERVING, SyncerState.MERGING, SyncerState.FINISHING)


def participants_of(facts: RunFacts, here: Collection[str]) -> Participants:
    """`here`: the names of this machine's units. A syncer that is not heard any more may still be named, as ages are
    measured by clocks: then a machine leaves where it could have stopped the run, and says so."""
    mine = {*here, *(f"standby-{name}" for name in here)}  # a learner may host a standby
    others = [name for name, heard in facts.standbys.items() if name not in mine and _waits(heard.heartbeat)]
    if facts.syncer is not None and _serves_elsewhere(facts.syncer.heartbeat, mine):
        others.append(f"{facts.syncer.heartbeat.unit} on {facts.syncer.heartbeat.host}")
    joined = tuple(island.name for island in facts.state.members)
    return Participants(tuple(island.name for island in facts.run.islands), joined, tuple(sorted(others)))


def working(facts: RunFacts, names: Collection[str]) -> list[str]:
    """Of these units those that work by what they said within LATELY_S."""
    heard = {name: (said.age_s, said.heartbeat.state) for name, said in facts.learners.items()}
    if facts.syncer is not None:
        heard[facts.syncer.heartbeat.unit] = facts.syncer.age_s, facts.syncer.heartbeat.state
    return sorted(
        name for name in heard.keys() & set(names) if heard[name][0] <= LATELY_S and heard[name][1] not in ENDED
    )


def _waits(heartbeat: SyncerHeartbeat) -> bool:
    return heartbeat.state == StandbyState.STANDING_BY


def _serves_elsewhere(heartbeat: SyncerHeartbeat, mine: Collection[str]) -> bool:
    if heartbeat.state not in SERVES:
        return False
    return heartbeat.unit not in mine or heartbeat.host != os.uname().nodename
