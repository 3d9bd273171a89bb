"""Schedule, weights, quorum and grace: pure functions with their properties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.protocol.quorum import (
    MIN_ALIVE_S,
    Grace,
    Pace,
    SlotFacts,
    Watch,
    decide_slot,
    grace_window,
    late_offers_count_after_s,
    longest_exchange_s,
    measured_pace,
    moving_average,
    overlap_slots,
)
from diloco_cli.protocol.schedule import (
    fragment_of_slot,
    may_step,
    measured_local_steps,
    most_ahead,
    slot_to_offer,
    slots_reached,
)
from diloco_cli.protocol.weights import token_weight

seconds = st.floats(0.0, 1e4)
paces = st.builds(Pace, st.floats(1e-3, 1e4), seconds, seconds)
overlaps = st.one_of(st.integers(0, 50), st.just("auto"))
quick = settings(max_examples=60, deadline=None)


# -- schedule ---------------------------------------------------------------------------------------------------


def test_every_fragment_is_due_once_a_round() -> None:
    assert sorted(fragment_of_slot(slot, 5) for slot in range(15, 20)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("local_steps", "fragments"), [(24, 24), (10, 4), (7, 3), (3, 8), (1, 5), (100, 7)])
def test_a_round_of_own_steps_reaches_each_fragment_exactly_once(local_steps: int, fragments: int) -> None:
    credit, due = 0, []
    for _ in range(3 * local_steps):
        slots, credit = slots_reached(credit, local_steps, fragments)
        due.append(slots)
    assert [sum(due[:rounds]) for rounds in (local_steps, 3 * local_steps)] == [fragments, 3 * fragments]
    assert set(due) <= {fragments // local_steps, fragments // local_steps + 1}


@pytest.mark.parametrize(
    ("own_s", "fastest_s", "expected"), [(1.0, 1.0, 24), (2.0, 1.0, 12), (1.0, 2.0, 24), (99.0, 1.0, 1)]
)
def test_slower_islands_make_fewer_steps_a_round_but_never_none(own_s: float, fastest_s: float, expected: int) -> None:
    assert measured_local_steps(24, own_s, fastest_s) == expected


def test_after_falling_behind_the_heads_slot_is_offered() -> None:
    assert slot_to_offer(3, 9, 4, ahead=2, in_touch=True) == 9


def test_who_is_too_far_ahead_lets_the_occasion_go() -> None:
    """Head 9, at most 2 ahead: for slot 11 it offers, for slot 12 it does not."""
    assert [slot_to_offer(own, 9, 4, ahead=2, in_touch=True) for own in (9, 11, 12, 50)] == [9, 11, None, None]


def test_who_hears_nothing_offers_every_fragment_for_its_next_slot() -> None:
    """Head 9, 4 fragments: slot 12 is due within the round; 13, 14, 20 are those of slots 9, 10, 12."""
    assert [slot_to_offer(own, 9, 4, ahead=2, in_touch=False) for own in (11, 12, 13, 14, 20)] == [11, 12, 9, 10, 12]


@pytest.mark.parametrize(
    ("exchange_s", "slot_s", "expected"),
    [(0.0, 10.0, 2), (9.5, 10.0, 2), (9.6, 10.0, 3), (70.0, 10.0, 9), (0.0, 0.1, 6), (1.0, 0.0, 1_000_000)],
)
def test_a_learner_may_lead_by_its_exchange_and_one_slot_of_grace(
    exchange_s: float, slot_s: float, expected: int
) -> None:
    """By hand, with the half second that it cannot see: 0.5 / 10, 10 / 10, 10.1 / 10, 70.5 / 10, 0.5 / 0.1; rounded
    up, and one more. Without a pace there is no bound."""
    assert most_ahead(exchange_s, slot_s) == expected


def test_the_drift_bound_pauses_with_a_reason() -> None:
    assert may_step(39, 10, 4).allowed
    assert not may_step(40, 10, 4).allowed and "drift" in may_step(40, 10, 4).reason


# -- weights ----------------------------------------------------------------------------------------------------


def test_half_the_batch_at_equal_steps_weighs_a_quarter() -> None:
    assert token_weight(400, 10, "tokens2/steps") == 4 * token_weight(200, 10, "tokens2/steps") == 16_000
    assert token_weight(200, 10, "tokens") == 200


def test_equal_batches_weigh_in_proportion_to_steps() -> None:
    assert token_weight(800, 20, "tokens2/steps") == 2 * token_weight(400, 10, "tokens2/steps")


@pytest.mark.parametrize("rule", ["tokens2/steps", "tokens"])
@pytest.mark.parametrize(("tokens", "steps"), [(0, 0), (0, 5), (5, 0), (-4, 2), (4, -2)])
def test_no_tokens_or_no_steps_weigh_nothing(rule: Any, tokens: int, steps: int) -> None:
    assert token_weight(tokens, steps, rule) == 0.0


@quick
@given(st.integers(0, 1 << 53), st.integers(0, 1 << 53), st.sampled_from(["tokens2/steps", "tokens"]))
def test_a_weight_is_finite_and_zero_only_for_nothing(tokens: int, steps: int, rule: Any) -> None:
    weight = token_weight(tokens, steps, rule)
    assert 0.0 <= weight < float("inf") and (weight == 0.0) == (tokens == 0 or steps == 0)


def test_mixed_batches_and_speeds_by_hand() -> None:
    """A: 10 steps of 400 tokens; B: 10 of 800; C: 5 of 800 (half as fast): quantity x quality."""
    a, b, c = (token_weight(steps * batch, steps, "tokens2/steps") for steps, batch in ((10, 400), (10, 800), (5, 800)))
    assert (a, b, c) == (1_600_000.0, 6_400_000.0, 3_200_000.0)


# -- grace ------------------------------------------------------------------------------------------------------


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
    assert longest_exchange_s(Pace(2.0), 8) == 16.0 + MIN_ALIVE_S
    assert longest_exchange_s(Pace(2.0), 0) == 2.0 + MIN_ALIVE_S


def test_overlap_of_an_unknown_pace_is_one() -> None:
    assert overlap_slots("auto", Pace(0.0)) == 1 and grace_window("auto", Pace(0.0), 0.5).seconds == 0.0


def test_the_first_value_of_a_moving_average_is_the_value() -> None:
    assert moving_average(None, 3.0) == 3.0 and moving_average(1.0, 3.0) == 2.0


# -- the decision -----------------------------------------------------------------------------------------------

FACTS = SlotFacts(
    present=1, alive=3, quorum=1, first_offer_s=10.0, quorum_reached_s=10.0, later_offers=False,
    waiting_since_s=9.0, now_s=10.5,
)  # fmt: skip
ONE_SECOND = Grace(1.0, "test")


def test_grace_is_waited_out_from_the_quorum_on() -> None:
    waiting = decide_slot(FACTS, ONE_SECOND, 60)
    assert (waiting.action, waiting.until_s) == ("wait", 11.0)
    assert decide_slot(replace(FACTS, now_s=11.0), ONE_SECOND, 60).action == "merge"


def test_it_merges_early_when_everybody_alive_is_here() -> None:
    assert decide_slot(replace(FACTS, present=3), ONE_SECOND, 60).action == "merge"
    assert decide_slot(replace(FACTS, alive=1), ONE_SECOND, 60).action == "merge"
    assert decide_slot(replace(FACTS, alive=0), ONE_SECOND, 60).action == "merge"


def test_it_merges_at_once_without_slack() -> None:
    assert decide_slot(FACTS, Grace(0.0, "no slack"), 60).action == "merge"


def test_a_quorum_above_those_alive_waits_with_a_reason_and_never_merges() -> None:
    facts = replace(FACTS, quorum=5, present=3, quorum_reached_s=None, now_s=1e6)
    decision = decide_slot(facts, ONE_SECOND, 60)
    assert decision.action == "wait" and "3 of the 5" in decision.reason


def test_one_learner_alone_is_everybody() -> None:
    alone = replace(FACTS, present=1, alive=1, quorum=1, now_s=10.0)
    assert decide_slot(alone, ONE_SECOND, 60).reason == "all 1 learners alive are here"


def test_offers_without_weight_leave_the_slot_waiting_with_a_reason() -> None:
    """They are refused before they count as present."""
    decision = decide_slot(replace(FACTS, present=0, quorum_reached_s=None), ONE_SECOND, 60)
    assert (decision.action, decision.reason) == ("wait", "0 of the 1 offers that the quorum needs")


def test_a_quorum_above_those_alive_is_skipped_once_later_offers_wait() -> None:
    facts = replace(FACTS, quorum=5, present=3, quorum_reached_s=None, later_offers=True, now_s=69.0)
    assert decide_slot(facts, ONE_SECOND, 60).action == "skip"


def test_a_slot_is_skipped_only_while_later_offers_wait_and_only_after_the_bound() -> None:
    empty = replace(FACTS, present=0, quorum_reached_s=None)
    assert decide_slot(replace(empty, now_s=69.0), ONE_SECOND, 60).action == "wait"
    assert decide_slot(replace(empty, now_s=68.9, later_offers=True), ONE_SECOND, 60).action == "wait"
    assert decide_slot(replace(empty, now_s=69.0, later_offers=True), ONE_SECOND, 60).action == "skip"


@quick
@given(
    st.builds(
        SlotFacts, st.integers(0, 5), st.integers(0, 5), st.integers(1, 5), st.none(), st.one_of(st.none(), seconds),
        st.booleans(), seconds, seconds,
    ),
    seconds,
)  # fmt: skip
def test_a_decision_has_a_reason_and_a_merge_has_its_quorum(facts: SlotFacts, grace_s: float) -> None:
    decision = decide_slot(facts, Grace(grace_s, "drawn"), 60)
    assert decision.reason
    assert (decision.action == "merge") <= (facts.present >= facts.quorum)
    assert (decision.action == "skip") <= (facts.present < facts.quorum and facts.later_offers)


# -- offers that missed their slot ------------------------------------------------------------------------------


def looked(watch: Watch, offered_for: list[int], now_s: float, quorum: int = 1, later: bool = False) -> SlotFacts:
    """Slot 8 with three learners alive; late offers count after 6 s."""
    return watch.look(8, offered_for, 3, quorum, later, 6.0, now_s)


def test_an_offer_that_missed_its_slot_makes_the_quorum_only_later() -> None:
    """Slot 8 is due at 100 s. An offer for slot 4 lies there: it waits until 106 s, then its grace runs."""
    watch = Watch(100.0)
    waiting = decide_slot(looked(watch, [4], 100.0), ONE_SECOND, 60)
    assert (waiting.action, waiting.until_s) == ("wait", 106.0)
    assert waiting.reason == "0 of the 1 offers that the quorum needs, and 1 late for an earlier slot"
    assert decide_slot(looked(watch, [4], 105.9), ONE_SECOND, 60).action == "wait"
    in_grace = decide_slot(looked(watch, [4], 106.0), ONE_SECOND, 60)
    assert (in_grace.action, in_grace.until_s) == ("wait", 107.0)
    assert decide_slot(looked(watch, [4], 107.0), ONE_SECOND, 60).action == "merge"


def test_it_joins_the_merge_of_whoever_comes_in_time() -> None:
    """The offer for slot 8 makes the quorum at 103 s; its grace ends at 104 s, with both in the merge."""
    watch = Watch(100.0)
    looked(watch, [4], 100.0)
    facts = looked(watch, [4, 8], 103.0)
    assert (facts.present, facts.counted, facts.first_offer_s, facts.quorum_reached_s) == (2, 1, 103.0, 103.0)
    assert decide_slot(facts, ONE_SECOND, 60).until_s == 104.0
    assert decide_slot(looked(watch, [4, 8], 104.0), ONE_SECOND, 60).action == "merge"
    assert decide_slot(looked(Watch(100.0), [4, 4, 8], 103.0), ONE_SECOND, 60).action == "merge", "all alive are here"


def test_offers_for_the_due_slot_and_for_later_ones_count_at_once() -> None:
    """After an outage learners may be ahead of the head."""
    assert [looked(Watch(100.0), made_for, 100.0).counted for made_for in ([8], [12], [8, 12, 4])] == [1, 1, 2]


def test_with_everybody_late_the_slot_is_merged_all_the_same() -> None:
    """K = M = 3, all from the slot before: nothing else will come, and after 6 s they count."""
    watch = Watch(100.0)
    assert decide_slot(looked(watch, [4, 4, 4], 105.0, quorum=3), ONE_SECOND, 60).action == "wait"
    assert decide_slot(looked(watch, [4, 4, 4], 106.0, quorum=3), ONE_SECOND, 60).action == "merge"


def test_late_offers_count_before_the_slot_could_be_skipped() -> None:
    """A slot and a half; never longer than until the skip, and then merging goes first."""
    assert late_offers_count_after_s(Pace(4.0), 60.0) == 6.0
    assert late_offers_count_after_s(Pace(1e6), 60.0) == 60.0
    watch = Watch(100.0)
    facts = watch.look(8, [4], 1, 1, True, late_offers_count_after_s(Pace(1e6), 60.0), 160.0)
    assert decide_slot(facts, ONE_SECOND, 60).action == "merge"
