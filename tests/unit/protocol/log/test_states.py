"""States are tables: what they allow, and that nothing else is done in silence."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.protocol.log.records import RecordError
from diloco_cli.protocol.log.state import (
    LEARNER,
    RUN,
    STANDBY,
    SYNCER,
    IllegalStateError,
    LearnerState,
    RunPhase,
    StandbyState,
    SyncerState,
    moved,
)
from tests.unit.protocol.records import KINDS, follow, genesis

TABLES: dict[Any, Any] = {LearnerState: LEARNER, SyncerState: SYNCER, StandbyState: STANDBY, RunPhase: RUN}


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: str(kind.__name__))
def test_every_state_has_a_row_and_is_reached_from_the_first(kind: Any) -> None:
    table, first = TABLES[kind], next(iter(kind))
    table = {a: set(ways.values()) if isinstance(ways, dict) else ways for a, ways in table.items()}
    assert set(table) == set(kind)
    reached, waiting = {first}, [first]
    while waiting:
        new = set(table[waiting.pop()]) - reached
        reached |= new
        waiting += new
    assert reached == set(kind)


def test_a_process_that_is_over_stays_so() -> None:
    for state in (LearnerState.DONE, LearnerState.FENCED, LearnerState.FAILED):
        assert not LEARNER[state]
    for syncer in (SyncerState.DONE, SyncerState.FENCED):
        assert not SYNCER[syncer]


def test_a_way_that_the_table_does_not_have_is_an_error_that_names_those_it_has() -> None:
    assert moved(SYNCER, SyncerState.MERGING, SyncerState.SERVING) is SyncerState.SERVING
    assert moved(SYNCER, SyncerState.DONE, SyncerState.DONE) is SyncerState.DONE, "where it is already"
    with pytest.raises(IllegalStateError, match="from MERGING to FINISHING; allowed: DONE, FENCED, SERVING") as caught:
        moved(SYNCER, SyncerState.MERGING, SyncerState.FINISHING)
    assert caught.value.exit_status == 1


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("ending", "phase"), [("stop", "STOPPED"), ("finish", "FINISHED")])
def test_after_the_end_of_a_run_its_log_does_not_go_on_but_for_an_epoch_after_a_stop(
    kind: str, ending: str, phase: str
) -> None:
    state = follow(genesis(), ending)
    assert state.phase == phase
    fields: dict[str, dict[str, Any]] = {
        "skip": {"slot": 0},
        "eval": {"evaluated": 0, "loss": 1.0, "tokens": 1},
        "merge": {"inputs": (None,)},
        "membership": {"islands": (None,)},
        "quarantine": {"learner": "l0"},
        "readmit": {"learner": "l0"},
        "revoke": {"key": "a1" * 32},
        "rollback": {"to": 0, "outputs": genesis().outputs},
        "gc_floor": {"floor": 1},
    }
    if (ending, kind) == ("stop", "epoch_start"):
        assert follow(state, kind).phase == RunPhase.RUNNING
        return
    with pytest.raises(RecordError, match=f"a {kind}, comes after the run was {phase}"):
        follow(state, kind, **fields.get(kind, {}))
