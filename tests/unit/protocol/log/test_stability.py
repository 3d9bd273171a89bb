"""Evaluations, jumps and what followed them, folded."""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.protocol.log.stability import GOOD_KEPT, Evaluated
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import decode, encode
from tests.unit.protocol.log.test_interventions import after_merges
from tests.unit.protocol.records import applied, follow, merge, output


def evaluated(state: RunState, loss: float | None, jumped: bool = False, tokens: int | None = None) -> RunState:
    tokens = 100 * state.n if tokens is None else tokens
    return follow(state, "eval", evaluated=state.n, loss=loss, tokens=tokens, jumped=jumped)


def gone_back(state: RunState, to: int, by: str = "syncer") -> RunState:
    jump = state.stability.jump
    outputs = tuple(replace(output(f, state.n + 1, state.slot - 1), state_digest=f"old-{f}") for f in range(2))
    answered = jump.n if jump is not None and by == "syncer" else None
    return follow(state, "rollback", outputs=outputs, to=to, evaluated=answered)


def after_a_jump() -> RunState:
    """Good as of commit 2; l0 and l1 merge; the loss of commit 5 has jumped."""
    state = evaluated(after_merges(2), 1.6)
    state = merge(state, applied("l0", 2, base=1, data_start=16, data_end=24))
    state = merge(state, applied("l1", 0, base=2))
    return evaluated(state, 9.5, jumped=True)


def test_the_newest_good_evaluations_are_kept() -> None:
    state = after_merges(1)
    for at in range(GOOD_KEPT + 2):
        state = evaluated(state, 3.0 - 0.1 * at)
    assert [round(at.loss or 0, 1) for at in state.stability.good] == [2.8, 2.7, 2.6, 2.5, 2.4]


def test_a_jump_stays_until_something_follows_and_is_no_good_evaluation() -> None:
    state = after_a_jump()
    assert state.stability.jump == Evaluated(5, 9.5, 500) and [at.n for at in state.stability.good] == [2]
    assert evaluated(state, 1.7).stability.jump is None, "it has passed by itself"


def test_after_the_rollback_that_answers_a_jump_the_run_has_not_recovered_until_it_is_well_beyond_it() -> None:
    state = gone_back(after_a_jump(), 2)
    assert state.stability.jump is None and state.stability.recovers_beyond == 500
    assert decode(RunState, encode(state), "a snapshot") == state, "a syncer that takes over goes on with it"
    assert evaluated(state, 1.6, tokens=500).stability.recovers_beyond == 500
    assert evaluated(state, 9.6, jumped=True, tokens=501).stability.recovers_beyond == 500
    assert evaluated(state, 1.6, tokens=501).stability.recovers_beyond is None


def test_an_operator_s_rollback_drops_what_was_evaluated_behind_it() -> None:
    state = gone_back(evaluated(after_merges(3), 1.6), 1, by="operator")
    assert state.stability.good == () and state.stability.recovers_beyond is None


def test_the_slots_since_the_newest_evaluation_are_counted() -> None:
    state = evaluated(after_merges(2), 1.6)
    assert state.stability.since == 0
    state = merge(state, applied("l0", 2, base=1, data_start=16, data_end=24))
    assert follow(state, "skip", slot=state.slot).stability.since == 2


def test_a_pause_before_a_rollback_is_resumed_with_the_loss_as_it_is() -> None:
    stopped = follow(after_a_jump(), "stop", diverged=True)
    resumed = follow(stopped, "epoch_start", epoch=2)
    assert resumed.stability.good == () and resumed.stability.jump is None and not resumed.stability.paused


def test_an_operator_who_goes_back_while_the_run_pauses_keeps_the_good_evaluations() -> None:
    state = follow(follow(after_a_jump(), "stop", diverged=True), "epoch_start", epoch=2, serves=False)
    state = follow(gone_back(state, 2, by="operator"), "stop", epoch=2)
    resumed = follow(state, "epoch_start", epoch=3)
    assert [at.n for at in resumed.stability.good] == [2] and not resumed.stability.paused


def test_a_pause_after_a_rollback_keeps_the_good_evaluations_and_begins_anew() -> None:
    state = follow(gone_back(after_a_jump(), 2), "stop", diverged=True)
    resumed = follow(state, "epoch_start", epoch=2)
    assert [at.n for at in resumed.stability.good] == [2] and resumed.stability.recovers_beyond is None


def test_a_loss_that_is_not_finite_is_in_no_curve() -> None:
    state = evaluated(after_merges(1), None, jumped=True)
    assert state.metrics.losses == () and state.stability.jump == Evaluated(1, None, 100)
