"""A learner's books: what it keeps on rebasing, and whose pace it follows."""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.protocol.eligibility import most_steps
from diloco_cli.protocol.progress import Draft, Progress
from diloco_cli.protocol.state import LearnerRecord
from tests.unit.protocol.records import BATCH, applied, genesis, make_run, merge

RUN = make_run(fragments=1, mixing="rebase")


def stepped(progress: Progress, steps: int) -> list[Draft]:
    """Take so many steps; the offers that came due on the way."""
    drafts = []
    for _ in range(steps):
        progress.stepped()
        drafts += progress.due()
    return drafts


def test_progress_that_a_later_version_holds_is_not_kept_when_an_earlier_one_is_adopted() -> None:
    """Steps 1-4 are offered and applied in version 2, of which the learner has heard; version 1 arrives first.

    Of its six steps the learner keeps the two after the send, on version 1 and then on version 2.
    """
    state = genesis(RUN)
    progress = Progress(RUN, "l0", 1, state, 0)
    (draft,) = stepped(progress, 4)
    stepped(progress, 2)
    state = merge(state, applied("l1"), run=RUN)
    first = state.outputs[0]
    state = merge(state, applied("l0", draft.seq, data_end=16, tokens=16, steps=4, weight=64.0), run=RUN)
    progress.heard(state)
    assert progress.kept_since(first, state) == draft
    progress.rebased(first, draft)
    assert (progress.books[0].steps, progress.books[0].data_start) == (2, 4 * BATCH)
    second = state.outputs[0]
    progress.rebased(second, progress.kept_since(second, state))
    assert (progress.books[0].steps, progress.books[0].data_start) == (2, 4 * BATCH)


def test_an_island_that_left_long_ago_sets_no_pace() -> None:
    """Ten times as fast, but its last offer went into version 1: `drift_rounds` rounds later nobody follows it."""
    run = make_run(fragments=1, every=24, drift_rounds=4)
    state = genesis(run)
    state = merge(state, applied("l1", step_s=0.1), run=run)
    progress = Progress(run, "l0", 1, state, 0)
    progress.log_n -= 1
    progress.heard(state, own_step_s=1.0)
    assert progress.local_steps == 2, "24 steps of 0.1 s last as long as 2 of 1 s"
    for seq in range(4):
        mine = applied("l0", seq, base=state.n, data_start=8 * seq, data_end=8 * seq + 8, step_s=1.0)
        state = merge(state, mine, run=run)
    progress.heard(state, own_step_s=1.0)
    assert progress.local_steps == 24


def test_only_merges_make_a_pace_known() -> None:
    state = replace(genesis(), learners={"l1": LearnerRecord(step_s=0.1)})
    assert state.recent_paces(100) == []


def test_a_learner_whose_progress_was_dropped_at_the_drift_bound_may_step_again() -> None:
    """All its offers were refused, it may not step, and what it has is more than an offer may claim: it starts anew."""
    run = make_run(fragments=1, drift_rounds=4)
    progress = Progress(run, "l0", 1, genesis(run), 0)
    while progress.may_step().allowed or not progress.books[0].steps >= most_steps(run):
        progress.stepped()
    assert progress.overgrown() == [0]
    assert progress.may_step().allowed and progress.books[0].steps == 0


def test_a_predecessors_late_offer_for_data_that_is_in_the_books_begins_them_anew() -> None:
    """Incarnation 2 is at token 24, and its next offer would begin at 8; then its predecessor's [0, 16) is merged. To
    keep its progress beyond that adoption would mean to offer what overlaps, and is refused, for ever."""
    state = genesis(RUN)
    state = merge(state, applied("l0", data_end=8, tokens=8, steps=2, weight=32.0), run=RUN)
    progress = Progress(RUN, "l0", 2, state, 8)
    for _ in range(4):
        progress.stepped()
    late = applied("l0", 1, base=state.n, data_start=8, data_end=16, tokens=8, steps=2, weight=32.0)
    state = merge(state, late, run=RUN)
    progress.rebased(state.outputs[0], progress.kept_since(state.outputs[0], state))
    assert progress.heard(state), "the parameters must go back to what was adopted"
    assert (progress.books[0].data_start, progress.books[0].steps, progress.position) == (24, 0, 24)
    progress.stepped()
    assert not progress.heard(replace(state, n=state.n + 1)), "once"
