"""Grace, pace, the decision on a slot and the windows: pure functions with their properties."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.protocol.rules.quorum import (
    FOLLOWS,
    FOLLOWS_WITHIN,
    MIN_ALIVE_S,
    Grace,
    Pace,
    SlotFacts,
    Watch,
    decide_slot,
    grace_window,
    max_exchange_s,
    measured_pace,
    moving_average,
    next_window_s,
    overlap_slots,
    patience_s,
    window_start_s,
)

seconds = st.floats(0.0, 1e4)
paces = st.builds(Pace, st.floats(1e-3, 1e4), seconds, seconds)
overlaps = st.one_of(st.integers(0, 50), st.just("auto"))
quick = settings(max_examples=60)


@pytest.mark.parametrize(
    ("skip_after_s", "slot_s", "found_s"), [(60.0, 1.0, 60.0), (60.0, 600.0, 2400.0), (5.0, 0.0, 5.0)]
)
def test_a_slot_is_not_skipped_for_later_offers_before_some_slots_have_passed(
    skip_after_s: float, slot_s: float, found_s: float
) -> None:
    assert patience_s(skip_after_s, slot_s) == found_s


# -- grace ------------------------------------------------------------------------------------------------------------


@quick
@given(overlaps, paces, st.floats(0.0, 0.99))
def test_grace_is_never_negative_nor_above_one_slot_nor_above_its_share_of_the_slack(
    overlap: int | Literal["auto"], pace: Pace, gamma: float
) -> None:
    grace = grace_window(overlap, pace, gamma)
    slack_s = overlap_slots(overlap, pace) * pace.slot_s - pace.quorum_s - pace.sync_s
    assert 0.0 <= grace.seconds <= pace.slot_s
    assert grace.seconds <= max(0.0, slack_s)
    assert grace.reason


@quick
@given(paces, st.floats(0.01, 0.99))
def test_auto_overlap_always_leaves_slack(pace: Pace, gamma: float) -> None:
    assert grace_window("auto", pace, gamma).seconds > 0
    tau = overlap_slots("auto", pace)
    assert (tau - 1) * pace.slot_s >= (pace.quorum_s + pace.sync_s) * (1 - 1e-12) - 1e-300


def test_without_slack_there_is_no_grace_and_the_reason_names_the_overlap_needed() -> None:
    grace = grace_window(2, Pace(1.13, 0.0, 4.7), 0.5)
    assert grace.seconds == 0.0 and "6 are needed" in grace.reason


@quick
@given(st.integers(0, 50), paces, st.floats(0.01, 0.99))
def test_the_window_never_eats_up_what_the_exchange_needs(overlap: int, pace: Pace, gamma: float) -> None:
    """With slack >= 0, tau x slot >= quorum + grace + sync; without, there is no window, with a reason."""
    grace = grace_window(overlap, pace, gamma)
    if overlap * pace.slot_s >= pace.quorum_s + pace.sync_s:
        assert overlap * pace.slot_s >= (pace.quorum_s + grace.seconds + pace.sync_s) * (1 - 1e-12)
    else:
        assert grace.seconds == 0.0 and "no slack" in grace.reason


def test_the_pace_is_averaged_and_kept_where_nobody_tells_it() -> None:
    assert measured_pace(Pace(1.0, 0.0, 2.0), 3.0, 1.0, 4.0) == Pace(2.0, 0.5, 3.0)
    assert measured_pace(Pace(1.0), None, 0.0, 0.0).slot_s == 1.0


@pytest.mark.parametrize(("claimed_s", "believed_s"), [(1e6, 4.0), (4.0, 4.0), (0.25, 0.25), (1e-9, 0.25)])
def test_one_merge_changes_the_pace_by_a_factor_at_most(claimed_s: float, believed_s: float) -> None:
    assert measured_pace(Pace(1.0), claimed_s, 0.0, 0.0).slot_s == (1.0 + believed_s) / 2
    assert measured_pace(Pace(0.0), claimed_s, 0.0, 0.0).slot_s == claimed_s / 2, "nothing to compare it with"


def test_an_exchange_is_believed_as_long_as_its_offer_can_count() -> None:
    assert max_exchange_s(Pace(2.0), 8) == 16.0 + MIN_ALIVE_S
    assert max_exchange_s(Pace(2.0), 0) == 2.0 + MIN_ALIVE_S


def test_overlap_of_an_unknown_pace_is_one() -> None:
    assert overlap_slots("auto", Pace(0.0)) == 1 and grace_window("auto", Pace(0.0), 0.5).seconds == 0.0


def test_the_first_value_of_a_moving_average_is_the_value() -> None:
    assert moving_average(None, 3.0) == 3.0 and moving_average(1.0, 3.0) == 2.0


# -- the decision -----------------------------------------------------------------------------------------------------

FACTS = SlotFacts(present=1, alive=3, quorum=1, window_from_s=10.0, later_offers=False, waiting_since_s=9.0, now_s=10.5)
EMPTY = replace(FACTS, present=0, window_from_s=None)
ONE_SECOND = Grace(1.0, "test")


@pytest.mark.parametrize(
    ("facts", "action"),
    [
        (replace(FACTS, now_s=10.9), "wait"),  # until the grace is over
        (replace(FACTS, now_s=11.0), "merge"),
        (replace(FACTS, present=3), "merge"),  # everybody alive is here
        (replace(FACTS, alive=1), "merge"),
        (replace(FACTS, alive=0), "merge"),
        (replace(FACTS, present=2, alive=2, beside=1), "wait"),  # for one alive, beside one with steps of many slots
        (replace(FACTS, present=3, alive=2, beside=1), "merge"),
        (replace(FACTS, later_offers=True, passed=1), "wait"),
        (replace(FACTS, later_offers=True, passed=2), "merge"),  # the two others will not come to this slot any more
        (replace(EMPTY, now_s=69.0), "wait"),  # nobody waits for a later slot
        (replace(EMPTY, now_s=68.9, later_offers=True), "wait"),
        (replace(EMPTY, now_s=69.0, later_offers=True), "skip"),
        (replace(EMPTY, now_s=69.0, later_offers=True, quorum=5, present=3), "skip"),
        (replace(EMPTY, alive=1, quorum=2, later_offers=True, passed=1), "wait"),  # who is dead may come back
    ],
)
def test_what_is_decided_on_a_slot(facts: SlotFacts, action: str) -> None:
    assert decide_slot(facts, ONE_SECOND, 60).action == action


def test_grace_is_waited_out_from_the_quorum_on_and_without_slack_there_is_none() -> None:
    assert decide_slot(FACTS, ONE_SECOND, 60).until_s == 11.0
    assert decide_slot(FACTS, Grace(0.0, "no slack"), 60).action == "merge"


def test_a_quorum_above_those_alive_waits_with_a_reason_and_never_merges() -> None:
    facts = replace(FACTS, quorum=5, present=3, window_from_s=None, now_s=1e6)
    decision = decide_slot(facts, ONE_SECOND, 60)
    assert decision.action == "wait" and "3 of the 5" in decision.reason


def test_one_learner_alone_is_everybody() -> None:
    alone = replace(FACTS, present=1, alive=1, quorum=1, now_s=10.0)
    assert decide_slot(alone, ONE_SECOND, 60).reason == "all 1 learners are here that may come"


def test_offers_without_weight_leave_the_slot_waiting_with_a_reason() -> None:
    """They are refused before they count as present."""
    decision = decide_slot(replace(FACTS, present=0, window_from_s=None), ONE_SECOND, 60)
    assert (decision.action, decision.reason) == ("wait", "0 of the 1 offers that the quorum needs")


def test_a_slot_that_too_few_can_still_come_to_is_skipped_at_once() -> None:
    """Three alive, two needed: with two of them past it the slot cannot be filled any more."""
    facts = replace(FACTS, quorum=2, present=1, window_from_s=None, later_offers=True)
    assert decide_slot(replace(facts, passed=1), ONE_SECOND, 60).action == "wait"
    early = decide_slot(replace(facts, passed=2, opens_s=facts.now_s + 1.0), ONE_SECOND, 60)
    assert early.action == "wait", "skips go no faster than the pace"
    skipped = decide_slot(replace(facts, passed=2), ONE_SECOND, 60)
    assert (skipped.action, skipped.until_s) == ("skip", None)
    assert skipped.reason == "1 of the 2 offers that the quorum needs, and 2 of 3 alive have passed this slot by"


@quick
@given(
    st.builds(
        SlotFacts, st.integers(0, 5), st.integers(0, 5), st.integers(1, 5), st.one_of(st.none(), seconds),
        st.booleans(), seconds, seconds, seconds, st.integers(0, 5), st.integers(0, 5),
    ),
    seconds,
)  # fmt: skip
def test_a_decision_has_a_reason_and_a_merge_has_its_quorum(facts: SlotFacts, grace_s: float) -> None:
    decision = decide_slot(facts, Grace(grace_s, "drawn"), 60)
    assert decision.reason
    assert (decision.action == "merge") <= (facts.present >= facts.quorum)
    assert (decision.action == "skip") <= (facts.present < facts.quorum and (facts.later_offers or facts.passed > 0))


# -- a slot as its syncer sees it happen ------------------------------------------------------------------------------


def looked(watch: Watch, present: int, now_s: float, quorum: int = 1, passed: int = 0) -> SlotFacts:
    """Three learners alive."""
    return watch.look(present, 3, quorum, passed > 0, now_s, passed)


def test_an_offer_that_lies_there_before_its_time_does_not_open_the_window() -> None:
    """Slot 8 is due at 100 s, its window begins at 106 s at the earliest. An island whose step lasts for several slots
    has offered for it long ago: it is merged alone at 107 s, when its grace is over, and not at once."""
    watch = Watch(100.0, 106.0)
    waiting = decide_slot(looked(watch, 1, 100.0), ONE_SECOND, 60)
    assert (waiting.action, waiting.until_s) == ("wait", 107.0)
    assert decide_slot(looked(watch, 1, 106.9), ONE_SECOND, 60).action == "wait"
    assert decide_slot(looked(watch, 1, 107.0), ONE_SECOND, 60).action == "merge"
    assert decide_slot(looked(Watch(100.0, 106.0), 3, 100.0), ONE_SECOND, 60).action == "merge", "all are here"


def test_the_grace_runs_from_the_moment_at_which_enough_are_there() -> None:
    watch = Watch(100.0, 101.0)
    assert looked(watch, 1, 100.0, quorum=2).window_from_s is None
    facts = looked(watch, 2, 103.0, quorum=2)
    assert (facts.window_from_s, facts.quorum_took_s) == (103.0, 2.0), "the first was there before the window could be"
    assert decide_slot(facts, ONE_SECOND, 60).until_s == 104.0
    assert looked(watch, 2, 104.0, quorum=2).window_from_s == 103.0


@pytest.mark.parametrize("begins_s", [0.0, 100.0])
def test_the_time_to_the_quorum_is_measured_on_any_clock(begins_s: float) -> None:
    """A virtual clock begins at 0, and that is a moment like all others."""
    watch = Watch(begins_s)
    assert looked(watch, 1, begins_s, quorum=2).quorum_took_s == 0.0
    assert looked(watch, 1, begins_s + 1.0, quorum=2).quorum_took_s == 1.0
    assert looked(watch, 2, begins_s + 3.0, quorum=2).quorum_took_s == 3.0
    at_once = Watch(begins_s)
    assert looked(at_once, 2, begins_s, quorum=2).quorum_took_s == 0.0
    assert looked(at_once, 2, begins_s + 5.0, quorum=2).quorum_took_s == 0.0


def test_an_offer_that_turns_out_to_be_bad_closes_the_window_again() -> None:
    watch = Watch(100.0)
    assert looked(watch, 2, 100.0, quorum=2).window_from_s == 100.0
    assert looked(watch, 1, 100.5, quorum=2).window_from_s is None
    assert looked(watch, 2, 102.0, quorum=2).window_from_s == 102.0


@pytest.mark.parametrize(
    ("now_s", "came", "expected_s"),
    [
        (10.0, 3, 12.0),  # all came just then
        (10.05, 3, 12.0 + FOLLOWS * 0.05),  # a little later: the next window, too
        (9.95, 3, 12.0 - FOLLOWS * 0.05),  # all were there before it
        (15.0, 3, 12.0 + FOLLOWS * FOLLOWS_WITHIN * 2.0),  # who comes much later does not set the pace
        (2.0, 3, 12.0 - FOLLOWS * FOLLOWS_WITHIN * 2.0),
        (10.9, 2, 12.0),  # one did not come: it ran to its end
    ],
)
def test_the_next_window_begins_a_slot_after_this_one_and_follows_the_learners(
    now_s: float, came: int, expected_s: float
) -> None:
    """A window from 10 s on, slots of 2 s."""
    facts = replace(FACTS, window_from_s=10.0, present=came, now_s=now_s)
    assert next_window_s(facts, 2.0) == pytest.approx(expected_s)


def test_who_has_passed_a_slot_by_is_not_missed_when_its_window_is_measured() -> None:
    facts = replace(FACTS, window_from_s=10.0, present=2, passed=1, now_s=10.05)
    assert next_window_s(facts, 2.0) == pytest.approx(12.0 + FOLLOWS * 0.05)


def test_a_window_began_at_the_latest_when_its_slot_was_merged() -> None:
    assert window_start_s(replace(FACTS, window_from_s=10.0, now_s=10.5)) == 10.0
    assert window_start_s(replace(FACTS, window_from_s=12.0, now_s=10.5)) == 10.5, "all came before it could begin"
    assert window_start_s(replace(FACTS, window_from_s=None, now_s=10.5)) == 10.5
