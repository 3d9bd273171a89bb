"""A learner's books: what it offers, what it keeps on adopting and what it gives up, and whose pace it follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from diloco_cli.protocol.actors.progress import OfferDraft, Progress
from diloco_cli.protocol.log.records import MergedOffer, Outcome, RunFormat
from diloco_cli.protocol.log.state import RunState, Window
from diloco_cli.protocol.rules.aim import TAKEN
from diloco_cli.protocol.rules.merging import max_ahead, max_steps
from tests.unit.protocol.books import adopt, hear, stepped
from tests.unit.protocol.records import BATCH, applied, follow, genesis, make_run, merge, output

RUN = make_run(fragments=1, mixing="rebase")


def took(draft: OfferDraft, learner: str = "l0") -> MergedOffer:
    """This offer, as a merge takes it."""
    return applied(
        learner, draft.seq, base=draft.base.version, data_start=draft.data_start, data_end=draft.data_end,
        tokens=draft.data_end - draft.data_start, steps=draft.steps,
    )  # fmt: skip


def merged_without(state: RunState, seq: int, run: RunFormat = RUN) -> RunState:
    """The slot is merged, and another learner's offer alone is in it."""
    before = state.learner("l1").data_end
    return merge(
        state, applied("l1", seq, base=state.outputs[0].version, data_start=before, data_end=before + 8), run=run
    )


def ready(run: RunFormat = RUN) -> tuple[Progress, RunState, OfferDraft]:
    """After its first round of four steps, its first offer on its way."""
    state = genesis(run)
    progress = Progress(run, "l0", 1, state, 0)
    (draft,) = stepped(progress, 4)
    assert (draft.seq, draft.slot, draft.steps, draft.data_start, draft.data_end) == (0, 0, 4, 0, 4 * BATCH)
    return progress, state, draft


def aged(progress: Progress, state: RunState, run: RunFormat = RUN) -> RunState:
    """The log after merges of another, of which nothing is adopted: no base is young enough for an offer any more."""
    for seq in range(max_ahead(run) + run.num_fragments):
        state = merged_without(state, seq, run)
    hear(progress, state)
    return state


# -- offering ---------------------------------------------------------------------------------------------------


def test_at_most_one_offer_of_a_fragment_is_on_its_way() -> None:
    run = make_run(fragments=2)
    progress = Progress(run, "l0", 1, genesis(run), 0)
    assert [draft.slot for draft in stepped(progress, 12)] == [0, 1]
    assert progress.awaits_outcomes() and progress.everything(0.0) == []
    state = merge(genesis(run), applied("l1"), run=run)
    hear(progress, state)
    assert [draft.fragment for draft in progress.everything(0.0)] == [0], "its slot is over, and it was not in it"


def test_an_outcome_is_known_as_soon_as_the_log_has_passed_the_slot_before_any_refusal() -> None:
    progress, state, draft = ready()
    hear(progress, follow(state, "refuse", RUN))
    assert progress.books[0].waits is draft, "nothing was said of it"
    hear(progress, follow(follow(state, "refuse", RUN), "skip", RUN, slot=0))
    assert progress.books[0].waits is None and not progress.awaits_outcomes()


def test_a_refusal_before_its_slot_is_an_outcome_too() -> None:
    progress, state, draft = ready()
    hear(progress, follow(state, "refuse", RUN, outcomes=(Outcome("l0", 1, draft.seq, 0, "digest_mismatch"),)))
    assert progress.books[0].waits is None and progress.kept_since(0) is None
    assert [draft.seq for draft in progress.everything(0.0)] == [1]


def test_once_all_its_offers_are_refused_a_learner_that_stands_offers_for_the_slots_that_are_due() -> None:
    """They were for slots far ahead. Beyond these there is none that it may name."""
    run = make_run(fragments=2)
    state = genesis(run)
    progress = Progress(run, "l0", 1, state, 0)
    progress.stepped(BATCH)
    sent = progress.everything(0.0)
    progress.aim.next_slot = max_ahead(run) + 1
    outcomes = tuple(Outcome("l0", 1, draft.seq, 0, "wrong_base") for draft in sent)
    hear(progress, follow(state, "refuse", run, outcomes=outcomes))
    assert [draft.slot for draft in progress.everything(0.0)] == [0, 1]


def test_a_leaver_on_a_slow_link_offers_for_slots_that_it_reaches_one_upload_after_the_other() -> None:
    """The window of slot 1 closes at 2.5 s, those after it every 2 s; the uploads are done at 3 and 6 s."""
    run = make_run(fragments=2)
    progress = Progress(run, "l0", 1, genesis(run), 0)
    state = structs.replace(
        merge(genesis(run), applied("l1"), run=run), window=Window(opens_s=2.0, slot_s=2.0, grace_s=0.5)
    )
    hear(progress, state)
    for _ in range(TAKEN):
        progress.aim.delivery.sent(-100.0)
        progress.aim.delivery.done(-100.0, 3.0)
    progress.stepped(BATCH)
    assert [(draft.slot, draft.fragment) for draft in progress.everything(0.0)] == [(2, 0), (3, 1)]


@pytest.mark.parametrize("merged", [True, False])
def test_own_progress_is_kept_on_a_version_that_holds_the_newest_offer_or_while_that_is_on_its_way(
    merged: bool,
) -> None:
    progress, state, draft = ready()
    assert progress.mixing_of(state.outputs[0], state) == "rebase", "its outcome is not known"
    state = merge(state, took(draft), run=RUN) if merged else merged_without(state, 0)
    hear(progress, state)
    assert progress.mixing_of(state.outputs[0], state) == ("rebase" if merged else "replace")


def test_nothing_is_offered_from_a_base_that_an_own_offer_has_consumed() -> None:
    """Its merge is in the log, its version is still on its way."""
    progress, state, draft = ready()
    state = merge(state, took(draft), run=RUN)
    hear(progress, state)
    assert stepped(progress, 4) == progress.everything(0.0) == []
    assert adopt(progress, state) == ("rebase", draft)
    (after,) = progress.everything(0.0)
    assert (after.steps, after.data_start, after.base.version) == (4, draft.data_end, 1)
    assert progress.kept_since(0) is None, "the next adoption goes on from this one"


def test_a_learner_that_is_ahead_offers_for_its_slots_in_their_order() -> None:
    """Two fragments: with slots 0 and 1 on their way, slot 2 waits for what becomes of slot 0."""
    run = make_run(fragments=2, mixing="rebase")
    state = genesis(run)
    progress = Progress(run, "l0", 1, state, 0)
    first, _ = stepped(progress, 10)
    assert progress.aim.next_slot == 2 and progress.aim.passed == 0
    state = merge(state, took(first), run=run)
    hear(progress, state)
    assert stepped(progress, 4) == [], "its merge is known, its version is not here yet"
    assert adopt(progress, state) == ("rebase", first)
    assert [draft.slot for draft in stepped(progress, 4)] == [2]


def test_a_version_that_cannot_be_read_holds_up_no_other_fragment() -> None:
    run = make_run(fragments=2, mixing="rebase")
    state = genesis(run)
    progress = Progress(run, "l0", 1, state, 0)
    first, _ = stepped(progress, 4)
    state = merge(merge(state, took(first), run=run), applied("l1"), run=run)
    hear(progress, state)
    adopt(progress, state, 1)
    assert stepped(progress, 6) == []
    progress.unreadable = frozenset({0})
    assert [draft.fragment for draft in stepped(progress, 6)] == [1]


@pytest.mark.parametrize("skipped", [True, False])
def test_an_offer_for_a_slot_that_was_skipped_was_not_too_late(skipped: bool) -> None:
    """It was uploaded long before its window closed. Merged without it, its way is longer than it looks."""
    run = make_run(fragments=1, mixing="rebase")
    progress, state, first = ready(run)
    progress.aim.delivered(first.slot, 0.5, 0.5)
    window = {"opens_s": 2.0, "slot_s": 2.0, "grace_s": 1.0}
    state = follow(state, "merge", run, slot=0, inputs=(took(first),), outputs=(output(0, 1, 0),), **window)
    progress.aim.heard(state, 100.0, 100.0)
    progress.heard(state)
    assert adopt(progress, state) == ("rebase", first)
    (draft,) = [draft for _ in range(5) if progress.stepped(BATCH) is None for draft in progress.due(101.5, 0.1)]
    progress.aim.delivered(draft.slot, 0.5, 102.0)
    later = follow(state, "skip", run, slot=1) if skipped else merged_without(state, 1, run)
    progress.heard(later)
    assert (progress.aim.delivery.hidden_s == 0.0) is skipped


def test_an_offer_whose_base_was_too_old_was_not_too_late() -> None:
    """Seed 16004753: refused for its base each time, its way seemed longer, and so it aimed too far."""
    run = make_run(fragments=1, mixing="replace")
    progress, state, first = ready(run)
    beyond = 2 + max_ahead(run)
    progress.books[0].waits = replace(first, slot=first.base.slot + beyond)
    settled: list[bool | None] = []
    progress.aim.settled = lambda slot, in_time: settled.append(in_time)  # type: ignore[method-assign]
    for slot in range(beyond):
        state = merged_without(state, slot, run)
    progress.heard(state)
    assert progress.books[0].waits is None and settled == [None]


@pytest.mark.parametrize("readmitted", [False, True], ids=["kept out", "readmitted since"])
def test_an_offer_that_a_quarantine_refused_was_not_too_late(readmitted: bool) -> None:
    """Seed 90004354: its way seemed longer by a round, so once readmitted it took part in every second merge."""
    progress, state, _ = ready()
    settled: list[bool | None] = []
    progress.aim.settled = lambda slot, in_time: settled.append(in_time)  # type: ignore[method-assign]
    state = follow(state, "quarantine", RUN, learner="l0")
    if readmitted:
        progress.heard(state)
        state = follow(state, "readmit", RUN, learner="l0")
    progress.heard(merged_without(state, 0))
    assert progress.books[0].waits is None and settled == [None]


def test_what_an_outgrown_stretch_held_is_not_offered_again_when_its_offer_is_merged_after_all() -> None:
    """An offer on its way stays so when the books begin anew, and nothing else of the fragment is offered meanwhile."""
    progress, state, _ = ready()
    state = aged(progress, state)
    (draft,) = progress.everything(0.0)
    for _ in range(max_steps(RUN)):
        progress.stepped(BATCH)
    assert progress.overgrown() == [0] and progress.books[0].waits is draft
    progress.stepped(BATCH)
    progress.stepped(BATCH)
    state = merge(state, took(draft), run=RUN)
    hear(progress, state)
    assert adopt(progress, state) == ("replace", None), "what it held was dropped before it was merged"
    (after,) = [*stepped(progress, 1), *progress.everything(0.0)]
    assert (after.steps, after.data_start) == (1, (max_steps(RUN) + 6) * BATCH)


def test_steps_on_smaller_batches_count_as_the_tokens_that_they_took() -> None:
    progress = Progress(RUN, "l0", 1, genesis(RUN), 100)
    assert stepped(progress, 2, tokens=1) == []
    (draft,) = stepped(progress, 2)
    assert (draft.data_start, draft.data_end, draft.steps) == (100, 100 + 2 + 2 * BATCH, 4)
    assert progress.position == draft.data_end


# -- adopting ---------------------------------------------------------------------------------------------------


def test_a_learner_knows_which_of_its_offers_was_applied_last() -> None:
    progress, state, draft = ready()
    assert draft.applied is None
    state = merge(state, took(draft), run=RUN)
    hear(progress, state)
    adopt(progress, state)
    (second,) = stepped(progress, 4)
    assert second.applied == 0
    state = merged_without(state, 0)
    hear(progress, state)
    (third,) = stepped(progress, 4)
    assert third.applied == 0, "the second was missed"


# -- the run's pace ----------------------------------------------------------------------------------------------


def paced(run: RunFormat, slot_s: float, **item: Any) -> RunState:
    """After a merge of another island, which states a slot of so long."""
    state = genesis(run)
    made = output(0, 1, 0)
    return follow(state, "merge", run, slot=0, inputs=(applied("l1", **item),), outputs=(made,), slot_s=slot_s)


def test_an_island_makes_the_steps_that_fit_into_a_round_of_the_log_whatever_another_states() -> None:
    run = make_run(fragments=1, every=24)
    progress = Progress(run, "l0", 1, genesis(run), 0)
    progress.heard(paced(run, 24.0, step_s=1e-9), own_step_s=2.0)
    assert progress.local_steps == 12


@pytest.mark.parametrize(
    ("sync", "own_step_s", "slot_s"), [({"local_steps": "planned"}, 1.0, 24.0), ({}, 0.0, 24.0), ({}, 1.0, 0.0)]
)
def test_the_pace_is_not_followed(sync: dict[str, Any], own_step_s: float, slot_s: float) -> None:
    """As planned; before a step of its own was measured; before the log has a pace."""
    run = make_run(fragments=1, every=24, **sync)
    progress = Progress(run, "l0", 1, genesis(run), 0)
    progress.heard(paced(run, slot_s), own_step_s)
    assert progress.local_steps == run.islands[0].local_steps


# -- standing still, and beginning anew -------------------------------------------------------------------------


def test_only_merges_are_news_for_the_drift_bound() -> None:
    run = make_run(fragments=1, drift_rounds=2)
    progress, state, _ = ready(run)
    stepped(progress, 4)
    assert not progress.may_step().allowed and "no merge for 8 own steps" in progress.may_step().reason
    state = follow(state, "skip", run, slot=0)
    hear(progress, state)
    assert not progress.may_step().allowed, "a skip brings nothing to adopt"
    assert hear(progress, state) is False
    hear(progress, merged_without(state, 0, run))
    assert progress.may_step().allowed


def test_a_learner_that_holds_as_much_as_an_offer_can_waits_and_offers_that_and_what_is_due_before_it() -> None:
    run = make_run(fragments=3)
    progress = Progress(run, "l0", 1, genesis(run), 0)
    for _ in range(4):
        progress.stepped(BATCH)
    progress.books[1].steps = max_steps(run)
    assert not progress.may_step().allowed and "fragment 1 holds as many steps as" in progress.may_step().reason
    assert [(draft.fragment, draft.steps) for draft in progress.standing(0.0)] == [(0, 4), (1, max_steps(run))]
    assert progress.standing(0.0) == progress.overgrown() == [], "its outcome is waited for"
    assert [draft.fragment for draft in progress.everything(0.0)] == [2], "who leaves keeps nothing back"


def test_with_rebase_it_fills_the_next_offer_while_one_is_on_its_way_and_drops_both_if_that_is_not_merged() -> None:
    """A syncer eight times too slow for its islands merges all that they train."""
    progress = Progress(RUN, "l0", 1, genesis(RUN), 0)
    state, most = genesis(RUN), max_steps(RUN)
    for merges in (True, False):
        while progress.may_step().allowed:
            progress.steps_since_merge = 0
            progress.stepped(BATCH)
        assert progress.full() == [0]
        (draft,) = progress.standing(0.0)
        assert draft.steps == most and progress.may_step().allowed
        for _ in range(most):
            progress.steps_since_merge = 0
            progress.stepped(BATCH)
        assert not progress.may_step().allowed and not progress.overgrown()
        state = merge(state, took(draft), run=RUN) if merges else merged_without(state, 0)
        hear(progress, state)
        if merges:
            assert adopt(progress, state) == ("rebase", draft) and progress.books[0].steps == most
    assert progress.overgrown() == [0]


def test_a_learner_whose_progress_can_be_offered_no_more_may_step_again() -> None:
    """All its offers were refused, it may not step, and what it has is too old: it starts anew."""
    run = make_run(fragments=1, drift_rounds=4)
    progress = Progress(run, "l0", 1, genesis(run), 0)
    aged(progress, genesis(run), run)
    while not progress.full():
        progress.stepped(BATCH)
    assert progress.overgrown() == [0]
    assert progress.may_step().allowed and progress.books[0].steps == 0


def test_what_is_merged_but_cannot_be_read_again_is_no_reason_to_wait_for_ever() -> None:
    progress, state, draft = ready()
    hear(progress, merge(state, took(draft), run=RUN))
    while not progress.full():
        progress.stepped(BATCH)
    assert progress.overgrown() == [], "its version will come"
    progress.unreadable = frozenset({0})
    assert progress.overgrown() == [0]


def test_a_fragment_that_is_dropped_at_the_drift_bound_takes_the_others_with_it() -> None:
    """It would have no steps until the next merge, so nothing to offer, while the others at their bound let it make
    none: of three learners that a full quorum needs, two offered one fragment for ever, and the third the other."""
    run = make_run(fragments=2)
    progress = Progress(run, "l0", 1, genesis(run), 0)
    state = aged(progress, genesis(run), run)
    progress.adopted(state.outputs[1])
    while progress.may_step().allowed:
        progress.stepped(BATCH)
    progress.books[0].steps = max_steps(run)
    assert progress.overgrown() == [0, 1] and progress.may_step().allowed
    progress.stepped(BATCH)
    assert {draft.fragment for draft in progress.everything(0.0)} == {0, 1}


def test_a_predecessors_late_offer_for_data_that_is_in_the_books_begins_them_anew() -> None:
    """Incarnation 2 is at token 24, and its next offer would begin at 8; then its predecessor's [0, 16) is merged. To
    keep its progress beyond that adoption would mean to offer what overlaps, and is refused, for ever."""
    state = genesis(RUN)
    state = merge(state, applied("l0", data_end=8, tokens=8, steps=2, weight=32.0), run=RUN)
    progress = Progress(RUN, "l0", 2, state, 8)
    for _ in range(4):
        progress.stepped(BATCH)
    late = applied("l0", 1, base=state.n, data_start=8, data_end=16, tokens=8, steps=2, weight=32.0)
    state = merge(state, late, run=RUN)
    assert hear(progress, state), "the parameters must go back to what was adopted"
    assert adopt(progress, state) == ("replace", None)
    assert (progress.books[0].data_start, progress.books[0].steps, progress.position) == (24, 0, 24)
    progress.stepped(BATCH)
    assert not hear(progress, structs.replace(state, n=state.n + 1)), "once"
