"""What the log remembers of norms, refusals and the held-out loss."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.protocol.log.commits import Merge, Quarantine, Readmit, Skip
from diloco_cli.protocol.log.health import (
    FALLS,
    GOOD_KEPT,
    GROWS,
    LEARNERS_KEPT,
    REASONS,
    Evaluated,
    Norms,
    bad_in_a_row,
    is_bad,
    times_usual,
    usual_norms,
)
from diloco_cli.protocol.log.records import MergedOffer, Outcome, decode, encode
from diloco_cli.protocol.log.state import RunState
from tests.unit.protocol.log.test_interventions import after_merges
from tests.unit.protocol.records import applied, follow, genesis, merge, output


def item(learner: str, norm: float, steps: int = 4, scale: float = 1.0) -> MergedOffer:
    return replace(applied(learner), norm=norm, steps=steps, scale=scale)


def after(*items: MergedOffer) -> RunState:
    return merge(genesis(), *items)


def test_of_each_learner_the_newest_merged_norm_is_remembered_as_it_was_after_clipping() -> None:
    state = after(item("l0", 8.0), item("l1", 1e6, scale=1e-6))
    assert state.norms == {0: {"l0": (8.0, 4), "l1": (1.0, 4)}}
    assert decode(RunState, encode(state), "a snapshot") == state


def newest(norms: Norms, *items: MergedOffer) -> Norms:
    """After a merge of fragment 0."""
    return Merge(slot=0, inputs=items, outputs=(output(0, 1, 0),)).norms_after(norms, 2)


def test_a_norm_falls_by_half_a_merge_at_most_and_rises_at_once() -> None:
    norms: Norms = {}
    seen = []
    for norm in (8.0, 0.0, 1e-9, 100.0):
        norms = newest(norms, item("l0", norm))
        seen.append(norms[0]["l0"][0])
    assert seen == [8.0, 8.0 * FALLS, 8.0 * FALLS**2, 100.0]


def test_those_that_were_merged_last_are_kept() -> None:
    norms = newest({}, *[item(f"l{i:02}", 1.0) for i in range(LEARNERS_KEPT)])
    norms = newest(newest(norms, item("l00", 1.0)), item("new", 1.0))
    assert len(norms[0]) == LEARNERS_KEPT and "l00" in norms[0] and "l01" not in norms[0]


@pytest.mark.parametrize("kind", [Quarantine, Readmit])
def test_what_is_remembered_of_a_learner_is_forgotten_when_it_is_kept_out_or_readmitted(
    kind: type[Quarantine] | type[Readmit],
) -> None:
    norms = newest({}, item("l0", 2.0), item("l1", 2.0))
    assert kind(learner="l0").norms_after(norms, 2) == {0: {"l1": (2.0, 4)}}
    assert Skip(slot=1).norms_after(norms, 2) == norms


def test_what_a_delta_is_compared_with() -> None:
    def usual(memory: list[float], *norms: float) -> list[float]:
        known = {f"l{i}": (norm, 4) for i, norm in enumerate(memory)}
        return usual_norms(known, [(norm, 4) for norm in norms], [4] * len(norms))

    assert usual([], 1.0, 2.0) == [0.0, 0.0]
    assert usual([], 1.0, 2.0, 3.0) == [3.0, 3.0, 2.0], "the upper median of the others"
    assert usual([1.0, 9.0], 5.0) == [GROWS * 9.0], "the upper median in memory"
    assert usual([0.625] * 3, 1.0, 2.0, 3.0) == [2.5, 2.5, 2.0], "whichever is less"
    assert usual([0.1], 1.0, 2.0, 3.0) == [3.0, 3.0, 2.0], "one learner that came first is not heard"


def test_honest_norms_grow_with_the_steps_by_the_root_at_least_and_in_proportion_at_most() -> None:
    assert usual_norms({"l0": (1.0, 4)}, [(1.0, 16), (1.0, 1)], [16, 1]) == [GROWS * 4.0, GROWS * 0.5]


def test_people_see_how_long_each_learners_newest_delta_was_and_its_cosine() -> None:
    state = after(item("l0", 2.0), item("l1", 2.0), replace(item("l2", 20.0), cosine=-0.456))
    assert {name: one.times_usual for name, one in state.metrics.deltas.items()} == {"l0": 0.1, "l1": 0.1, "l2": 10.0}
    assert state.metrics.deltas["l2"].cosine == -0.46
    assert times_usual({"l0": (1.0, 4)}, [item("l0", 2.0)]) == [2.0]


def test_each_reason_has_its_words() -> None:
    assert all(one.text and one.text == one.text.strip() for one in REASONS.values())


def test_what_happens_to_honest_learners_is_not_bad() -> None:
    innocent = {"late", "superseded", "unknown_base", "data_overlap", "bad_signature", "run_over", "quarantined"}
    assert not any(map(is_bad, innocent)) and is_bad("non_finite") and not is_bad("no such word")


def test_bad_offers_count_in_a_row() -> None:
    assert bad_in_a_row(3, num_applied=0, num_bad=1) == 4
    assert bad_in_a_row(3, num_applied=1, num_bad=0) == 0
    assert bad_in_a_row(3, num_applied=1, num_bad=2) == 2


def bad(state: RunState, seq: int, reason: str = "non_finite") -> RunState:
    return follow(state, "refuse", outcomes=(Outcome("l0", 1, seq, 0, reason),))


def test_the_log_counts_them_until_one_is_merged() -> None:
    state = bad(bad(bad(genesis(), 0), 1), 2, "late")
    assert state.learner("l0").bad_in_a_row == 2 and state.learner("l1").bad_in_a_row == 0
    assert merge(state, applied("l0", 3)).learner("l0").bad_in_a_row == 0


def test_a_quarantine_and_a_readmission_begin_anew() -> None:
    state = follow(bad(genesis(), 0), "quarantine", learner="l0")
    assert state.learner("l0").bad_in_a_row == 0
    assert follow(bad(state, 1), "readmit", learner="l0").learner("l0").bad_in_a_row == 0


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
