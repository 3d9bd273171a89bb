"""Evaluations, jumps and what followed them, folded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diloco_cli.protocol.log.norms import longest, upper_median
from diloco_cli.protocol.log.stability import GOOD_KEPT, LONG, Evaluated, Rejudging
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import RecordError, decode, encode
from tests.unit.protocol.log.test_interventions import after_merges
from tests.unit.protocol.records import applied, follow, genesis, merge, output


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


def test_the_rollback_that_answers_a_jump_opens_a_re_judgement_of_all_whose_deltas_it_undoes() -> None:
    state = gone_back(after_a_jump(), 2)
    assert state.stability.rejudging == Rejudging((Evaluated(2, 1.6, 200),), Evaluated(5, 9.5, 500), ("l0", "l1"))
    assert (state.stability.rollbacks, state.stability.beyond, state.stability.jump) == (1, 500, None)
    assert decode(RunState, encode(state), "a snapshot") == state, "a syncer that takes over goes on with it"


def test_an_operator_s_rollback_opens_none_and_drops_what_was_evaluated_behind_it() -> None:
    state = gone_back(evaluated(after_merges(3), 1.6), 1, by="operator")
    assert state.stability.good == () and state.stability.rejudging is None and state.stability.rollbacks == 0


def test_a_quarantine_of_one_of_those_judged_closes_it_and_one_of_another_does_not() -> None:
    state = gone_back(after_a_jump(), 2)
    assert follow(state, "quarantine", learner="l7").stability.rejudging is not None
    assert follow(state, "quarantine", learner="l1", evaluated=5).stability.rejudging is None


def test_a_quarantine_for_faults_leaves_a_re_judgement_open_and_its_verdict_may_name_that_learner() -> None:
    kept_out = follow(gone_back(after_a_jump(), 2), "quarantine", learner="l1")
    assert kept_out.stability.rejudging is not None
    judged = follow(kept_out, "quarantine", learner="l1", evaluated=5)
    assert judged.stability.rejudging is None and judged.learner("l1").quarantined == judged.n
    with pytest.raises(RecordError, match="does not fit"):
        follow(kept_out, "quarantine", learner="l1")


def test_a_quarantine_for_faults_since_the_good_evaluation_keeps_no_re_judgement_from_being_opened() -> None:
    state = gone_back(follow(after_a_jump(), "quarantine", learner="l1"), 2)
    assert state.stability.rejudging is not None and state.stability.rejudging.names == ("l0", "l1")


def test_one_that_was_blamed_and_is_readmitted_is_judged_again() -> None:
    state = follow(after_a_jump(), "quarantine", learner="l1", evaluated=5)
    state = gone_back(follow(state, "readmit", learner="l1"), 2)
    assert state.stability.rejudging is not None


def test_the_slots_since_the_newest_evaluation_are_counted() -> None:
    state = evaluated(after_merges(2), 1.6)
    assert state.stability.since == 0
    state = merge(state, applied("l0", 2, base=1, data_start=16, data_end=24))
    assert follow(state, "skip", slot=state.slot).stability.since == 2


def test_where_one_is_blamed_since_nobody_else_is_judged() -> None:
    state = after_a_jump()
    state = gone_back(follow(state, "quarantine", learner="l1", evaluated=5), 2)
    assert state.stability.rejudging is None and state.stability.rollbacks == 1


def test_only_an_evaluation_that_is_well_beyond_the_jump_ends_the_count_of_rollbacks() -> None:
    state = gone_back(after_a_jump(), 2)
    assert evaluated(state, 1.6, tokens=500).stability.rollbacks == 1
    assert evaluated(state, 1.6, tokens=501).stability.rollbacks == 0


def test_a_pause_before_a_rollback_is_resumed_with_the_loss_as_it_is() -> None:
    stopped = follow(after_a_jump(), "stop", diverged=True)
    resumed = follow(stopped, "epoch_start", epoch=2)
    assert resumed.stability.good == () and resumed.stability.jump is None and not resumed.stability.paused


def test_an_operator_who_goes_back_while_the_run_pauses_keeps_the_good_evaluations() -> None:
    state = follow(follow(after_a_jump(), "stop", diverged=True), "epoch_start", epoch=2, serves=False)
    state = follow(gone_back(state, 2, by="operator"), "stop", epoch=2)
    resumed = follow(state, "epoch_start", epoch=3)
    assert [at.n for at in resumed.stability.good] == [2] and not resumed.stability.paused


def test_a_pause_after_a_rollback_keeps_the_good_evaluations_and_begins_to_count_anew() -> None:
    state = follow(gone_back(after_a_jump(), 2), "stop", diverged=True)
    assert state.stability.rejudging is None
    resumed = follow(state, "epoch_start", epoch=2)
    assert [at.n for at in resumed.stability.good] == [2] and resumed.stability.rollbacks == 0


def test_a_stop_for_any_other_reason_leaves_an_open_re_judgement_to_the_next_syncer() -> None:
    state = follow(gone_back(after_a_jump(), 2), "stop")
    assert follow(state, "epoch_start", epoch=2).stability.rejudging is not None


def test_a_loss_that_is_not_finite_is_in_no_curve() -> None:
    state = evaluated(after_merges(1), None, jumped=True)
    assert state.metrics.losses == () and state.stability.jump == Evaluated(1, None, 100)


def test_a_re_judgement_remembers_whose_deltas_were_long_since_the_good_evaluation() -> None:
    state = evaluated(after_merges(2), 1.6)
    first = applied("l0", 2, base=1, data_start=16, data_end=24, norm=1.0)
    state = merge(state, first, applied("l1", 0, norm=6.0), applied("l2", 0, norm=1.0))
    assert state.stability.long == {"l1": 6.0}
    state = gone_back(evaluated(state, 9.5, jumped=True), 2)
    assert state.stability.rejudging is not None and state.stability.rejudging.long == {"l1": 6.0}
    assert state.stability.long == {}


def test_steps_explain_a_longer_delta() -> None:
    usual = (applied("l0", 0, norm=1.0, steps=2), applied("l2", 0, norm=1.0, steps=2))
    state = merge(genesis(), *usual, applied("l1", 0, norm=4.0, steps=8, tokens=32))
    assert state.stability.long == {}


def test_of_two_deltas_none_is_long() -> None:
    """Or a hostile learner could make an honest one look long beside a short delta of its own."""
    assert merge(genesis(), applied("l0", 0, norm=1.0), applied("l1", 0, norm=0.01)).stability.long == {}


@pytest.mark.parametrize("seed", range(20))
def test_what_is_long_is_what_the_median_of_all_other_deltas_says(seed: int) -> None:
    rng = random.Random(seed)
    steps = [rng.choice([1, 2, 4, 7, 8]) for _ in range(rng.randint(3, 40))]
    inputs = [
        applied(f"l{place:02}", norm=many**0.5 * rng.choice([1.0, 1.1, 2.0, 2.2, 5.0]), steps=many, tokens=4 * many)
        for place, many in enumerate(steps)
    ]
    expected = {}
    for item in inputs:
        usual = upper_median(longest(one.norm, one.steps, item.steps) for one in inputs if one is not item)
        if usual and item.norm > LONG * usual:
            expected[item.learner] = item.norm / usual
    assert merge(genesis(), *inputs).stability.long == expected
