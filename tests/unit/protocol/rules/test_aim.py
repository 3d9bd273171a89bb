"""For which slots a learner offers, and when: by its steps, by the clock, past what it cannot reach any more."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from diloco_cli.protocol.log.state import RunState, Window
from diloco_cli.protocol.rules.aim import (
    DEVIATIONS,
    EARLY,
    FASTER,
    FASTER_UPLOADS,
    HIDDEN_LESS,
    HIDDEN_STEP,
    PROBE_AGAIN_ROUNDS,
    PROBE_ROUNDS,
    STALLED,
    TAKEN,
    TOLERATED,
    Aim,
    Delivery,
)
from tests.unit.protocol.records import output

Pace = Literal["planned", "measured"]
FRAGMENTS, SLOT_S, GRACE_S = 4, 2.0, 0.5
WINDOW = Window(opens_s=SLOT_S, slot_s=SLOT_S, grace_s=GRACE_S)
EVERY = 8.0  # two steps a slot
SOON_S = 100.0 + (1 - EARLY) * SLOT_S  # the window of the slot that is due begins soon, where the log is seen at 100 s


def log(slot: int, window: Window | None = WINDOW, merged: int | None = None) -> RunState:
    """So many slots long; the newest that was merged: the last one, or `merged`."""
    newest = slot - 1 if merged is None else merged
    outputs = tuple(output(fragment, 1, newest - fragment) for fragment in range(FRAGMENTS))
    return RunState(slot=slot, outputs=outputs, window=window)


def aim_at(head: int = 0, seen_s: float = 100.0, **changes: object) -> Aim:
    """In step with a log whose head is known to have appeared at this very moment, and that knows this learner."""
    aim = replace(Aim(FRAGMENTS, head - 1, known=True), **changes)
    aim.heard(log(head), seen_s, seen_s)
    aim.next_slot, aim.reached = head, float(head)
    return aim


def took(delivery: Delivery, *seconds: float) -> None:
    """Uploads that took so long, one after the other, a long time ago."""
    for each_s in seconds:
        delivery.sent(0.0)
        delivery.done(0.0, each_s)


def delivering(aim: Aim, seconds: float) -> Aim:
    """Uploads have always taken so long."""
    took(aim.delivery, *[seconds] * TAKEN)
    return aim


def latest_s(aim: Aim, slot: int, now_s: float, before: int = 0) -> float:
    """By when an offer has to be sent, with so many others before it."""
    return aim.closes_s(slot, now_s) - aim.delivery.expected_s(now_s, before)


def slots_after(
    aim: Aim, steps: int, now_s: float = 100.0, step_s: float = 0.0, local_steps: float = EVERY
) -> list[int]:
    """What it offers for after each of so many steps, all made at this moment."""
    found = []
    for _ in range(steps):
        aim.stepped(local_steps)
        found += aim.due(now_s, step_s)
    return found


# -- by its steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, Window(0.0, 0.0, 0.0)])
def test_a_slot_is_due_when_its_steps_have_been_made(window: Window | None) -> None:
    """Also before the first merge, which is the first to say when windows are."""
    aim = Aim(FRAGMENTS, 0, window=window)
    aim.heard(log(0, window), 100.0, 100.0)
    assert [slots_after(aim, 1) for _ in range(6)] == [[], [0], [], [1], [], [2]]


def test_fewer_steps_than_fragments_make_several_slots_a_step() -> None:
    assert slots_after(Aim(FRAGMENTS, 0), 1, local_steps=2.0) == [0, 1]


def test_what_could_not_be_offered_is_not_made_up_for_in_a_burst() -> None:
    """Of what was trained too early for the next slot one slot's worth counts."""
    aim = aim_at(10)
    assert slots_after(aim, 40, SOON_S) == [10], "the window of slot 11 begins more than a slot later"
    aim.heard(log(11), 102.0, 102.0)
    assert [slots_after(aim, 1, SOON_S + SLOT_S) for _ in range(3)] == [[11], [], []]


def test_of_all_that_was_trained_too_early_one_slots_worth_counts_later() -> None:
    """Half a slot's steps a slot are enough for two more slots, and not for all that come: then for one a round."""
    aim = aim_at(10)
    slots_after(aim, 40, SOON_S)
    offered = []
    for head in range(11, 21):
        aim.heard(log(head), 80.0 + 2 * head, 80.0 + 2 * head)
        offered += slots_after(aim, 1, SOON_S + (head - 10) * SLOT_S)
    assert offered == [11, 12, 17]


# -- in their order ---------------------------------------------------------------------------------------------


def test_a_slot_that_is_not_ready_holds_up_those_after_it_until_it_is() -> None:
    """Or the syncer would take it for passed by, though its learner has all the time that there is."""
    aim, ready = aim_at(10), set[int]()
    for _ in range(6):
        aim.stepped(EVERY)
        assert aim.due(100.0, 0.0, is_ready=ready.__contains__) == []
    ready |= {10, 11}
    assert [slots_after(aim, 2, now_s) for now_s in (SOON_S, SOON_S + SLOT_S)] == [[10], [11]]
    assert aim.passed == 0


def test_a_slot_that_is_never_ready_is_passed_by_when_it_can_not_be_reached_any_more() -> None:
    aim = delivering(aim_at(10), 0.5)
    for now_s in (100.0, 101.0, 102.0):
        aim.stepped(EVERY)
        assert aim.due(now_s, 1.0, is_ready=lambda slot: slot != 10) == []
    aim.stepped(EVERY)
    assert aim.due(103.0, 1.0, is_ready=lambda slot: slot != 10) == [11] and aim.passed == 1


# -- by the clock -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pace", "now_s", "offers"),
    [
        ("measured", 100.0, False), ("measured", 101.12, False), ("measured", 101.13, True), ("measured", 101.5, True),
        ("planned", 101.5, False), ("planned", 101.51, True),
    ],
)  # fmt: skip
def test_an_offer_that_would_be_waited_for_after_one_more_step_is_made_now(
    pace: Pace, now_s: float, offers: bool
) -> None:
    """The window of slot 10 begins at 102 s and closes at 102.5 s. An upload of 0.25 s that is to be there a quarter of
    the grace after the beginning starts by 101.875 s; the next step would end 0.75 s from now. As planned, it is enough
    to be there when the window closes."""
    aim = delivering(aim_at(10, pace=pace), 0.25)
    assert (aim.opens_s(10, 100.0), aim.closes_s(10, 100.0)) == (102.0, 102.5)
    assert aim.opens_s(10, 100.0) + TOLERATED * GRACE_S - 0.25 == 101.875 and latest_s(aim, 10, 100.0) == 102.25
    assert slots_after(aim, 1, now_s, step_s=0.75) == ([10] if offers else [])


@pytest.mark.parametrize(("head", "offers"), [(13, False), (14, True)])
def test_who_has_missed_a_whole_round_does_not_wait_for_its_steps_any_more(head: int, offers: bool) -> None:
    """Its newest offer was for slot 9. As planned it would have time until 0.25 s before the window of the slot that is
    due closes; but nobody waits for it any more."""
    aim = delivering(aim_at(10, pace="planned"), 0.25)
    aim.heard(log(head), 106.0, 106.0)
    opens_s = aim.opens_s(head, 106.0)
    assert slots_after(aim, 1, opens_s - 0.5, step_s=0.5) == ([head] if offers else [])


@pytest.mark.parametrize("pace", ["planned", "measured"])
@pytest.mark.parametrize(("head", "offers"), [(13, False), (14, True)])
def test_who_has_missed_a_round_offers_for_the_due_slot_long_before_its_window(
    head: int, offers: bool, pace: Pace
) -> None:
    """The others come so early that slots are merged up to a slot before their windows begin."""
    aim = aim_at(10, pace=pace)
    aim.heard(log(head, Window(opens_s=1.75 * SLOT_S, slot_s=SLOT_S, grace_s=0.0)), 106.0, 106.0)
    assert slots_after(aim, 2, 106.1, step_s=0.5 * SLOT_S) == ([head] if offers else [])


@pytest.mark.parametrize("pace", ["planned", "measured"])
def test_one_that_steps_slower_than_slots_pass_still_offers_a_slots_worth_now_and_then(pace: Pace) -> None:
    """The others are there early, so each slot is merged before its window begins: by the clock none is due yet, and by
    its steps it has half of each slot when that is merged."""
    aim, now_s, head, offered = aim_at(pace=pace), 100.0, 0, 0
    for _ in range(60):
        now_s += 1.2
        aim.stepped(EVERY)
        while 100.0 + 1.6 * (head + 1) <= now_s:
            head += 1
            aim.heard(log(head), 100.0 + 1.6 * head, 100.0 + 1.6 * head)
        offered += len(aim.due(now_s, 0.1))
    assert 6 <= offered <= 30 + 1, "of 45 slots, in 60 steps of half a slot each"


def test_nothing_is_offered_while_earlier_ones_wait_to_be_uploaded_for_longer_than_a_step() -> None:
    """An offer that lies there for long would merge old progress."""
    aim = delivering(aim_at(10), 1.5)
    for slot in (10, 11):
        aim.sent(slot, 100.0)
    aim.next_slot = 12
    assert slots_after(aim, 2, 100.0, step_s=2.0) == slots_after(aim, 2, 100.9, step_s=2.0) == []
    assert slots_after(aim, 2, 101.0, step_s=2.0) == [12]


@pytest.mark.parametrize("slower", [1.0, 1.003, 1.01, 1.03, 1.1])
def test_a_learner_that_is_a_little_slower_than_the_others_never_falls_out_of_step(slower: float) -> None:
    """Two steps a slot by its plan; the log goes on by a slot every 2 s for ten minutes."""
    aim, step_s, now_s, head = delivering(aim_at(0, 0.0), 0.2), slower, 0.0, 0
    offered: list[int] = []
    while head < 300:
        now_s += step_s
        while (head + 1) * SLOT_S <= now_s:
            head += 1
            aim.heard(log(head), head * SLOT_S, head * SLOT_S)
        aim.stepped(EVERY)
        for slot in aim.due(now_s, step_s):
            offered.append(slot)
            assert now_s + 0.2 <= (slot + 1) * SLOT_S + GRACE_S, "too late for its window"
    assert offered == list(range(len(offered))) and len(offered) >= 299 and aim.passed == 0


def test_links_that_take_several_slots_are_no_reason_to_hold_back() -> None:
    """Uploads of 7 s at slots of 2 s: it aims at what it can reach, and leads the log by that."""
    aim = delivering(aim_at(10), 7.0)
    assert slots_after(aim, 3, 100.5) == [13], "the window of slot 12 closes in 6 s, that of slot 13 in 8 s"
    assert aim.passed == 3


def test_nobody_offers_earlier_than_a_part_of_a_slot_or_a_step_before_the_window_less_its_way() -> None:
    """What lies at the syncer is old progress, and with `replace` what is trained meanwhile is dropped."""
    for upload_s, step_s in ((0.25, 1.0), (0.25, 4.0), (8.5, 1.0)):
        aim = delivering(aim_at(10), upload_s)
        slots = slots_after(aim, 100, SOON_S, step_s)
        max_s = SOON_S + upload_s + max(step_s, EARLY * SLOT_S)
        assert slots and all(aim.opens_s(slot, SOON_S) <= max_s for slot in slots)
        assert aim.opens_s(aim.next_slot, SOON_S) > max_s


# -- passed by --------------------------------------------------------------------------------------------------


def test_what_an_offer_cannot_reach_any_more_is_passed_by_and_the_next_slot_takes_its_place() -> None:
    """The window of slot 10 closes at 102.5 s, after which an offer of 0.5 s comes too late from 102 s on."""
    for now_s, slot in ((102.0, 10), (102.01, 11), (103.99, 11), (104.01, 12)):
        assert delivering(aim_at(10), 0.5).first_reachable(now_s) == slot
    aim = delivering(aim_at(10), 0.5)
    assert slots_after(aim, 3, 103.99)[0] == 11 and aim.passed == 1


BEHIND = Window(opens_s=-1.0, slot_s=0.2, grace_s=0.2)


def behind(*heard_s: float) -> Aim:
    """All windows of the next second are over; heads after slot 10 were heard at these moments. Uploads of 0.5 s."""
    aim = delivering(aim_at(10), 0.5)
    for slot, seen_s in enumerate(heard_s, start=11):
        aim.heard(log(slot, BEHIND), seen_s, seen_s)
    return aim


def test_a_syncer_that_is_behind_takes_for_the_next_slots_what_comes_while_it_merges() -> None:
    """It makes a merge in 0.8 s: an offer of 0.5 s that is made soon reaches slot 15."""
    aim = behind(100.8, 101.6, 102.4, 103.2)
    assert [aim.first_reachable(now_s) for now_s in (103.2, 103.4, 103.6)] == [15, 15, 16]
    assert [aim.closes_s(slot, 103.2) for slot in (14, 15)] == pytest.approx([103.2, 104.0])
    aim.heard(log(15, BEHIND), 103.3, 103.3)
    assert aim.first_reachable(103.35) == 21, "six more in the next second, if it goes on like that"


def test_who_waits_for_a_syncer_that_is_behind_does_not_offer_for_many_slots_at_once() -> None:
    aim = behind(100.8, 101.6, 102.4, 103.2)
    assert slots_after(aim, 1, 103.2, step_s=0.2) == [15]
    assert slots_after(aim, 1, 103.25, step_s=0.2) == []


@pytest.mark.parametrize("heard_s", [(100.8, 101.6), (120.0,)])
def test_one_long_time_between_heads_says_nothing(heard_s: tuple[float, ...]) -> None:
    aim = behind(*heard_s)
    now_s = heard_s[-1]
    assert aim.closes_s(aim.head + 1, now_s) <= now_s + BEHIND.slot_s + BEHIND.grace_s


def test_offers_that_wait_before_it_make_the_way_longer() -> None:
    aim = delivering(aim_at(10), 0.5)
    assert [latest_s(aim, 10, 100.0, before) for before in (0, 1, 3)] == [102.0, 101.5, 100.5]
    assert aim.first_reachable(100.0, before=0) == 10
    assert aim.first_reachable(100.0, before=6) == 11


def test_what_waits_to_be_uploaded_becomes_less_with_time_and_is_counted_from_each_upload_s_end() -> None:
    delivery = Delivery()
    took(delivery, 0.5, 0.5, 0.5)
    for _ in range(3):
        delivery.sent(100.0)
    assert [delivery.expected_s(now_s) for now_s in (100.0, 101.0, 101.5, 200.0)] == [2.0, 1.0, 0.5, 0.5]
    delivery.done(101.2, 0.5)
    assert (delivery.waiting, delivery.expected_s(101.2)) == (2, 1.5), "the first took longer than it should have"
    delivery.done(101.3, None)
    assert (delivery.waiting, delivery.measured_s, delivery.expected_s(101.3)) == (1, 0.5, 1.0)


# -- a log that stands still, or skips --------------------------------------------------------------------------


def test_while_the_log_stands_still_the_slot_that_is_due_stays_open() -> None:
    """One slot beyond its time without a commit: whoever comes is waited for, since too few are there."""
    aim = delivering(aim_at(10), 0.5)
    stalled_s = 100.0 + SLOT_S + GRACE_S + STALLED * SLOT_S
    assert aim.closes_s(10, stalled_s) == 102.5
    assert aim.closes_s(10, stalled_s + 0.1) == inf
    assert slots_after(aim, 2, stalled_s + 0.1) == [10], "nobody passes by what all the others wait for"


def test_later_slots_of_a_log_that_stands_still_come_a_slot_after_each_other() -> None:
    now_s = 150.0
    assert [aim_at(10).closes_s(10 + ahead, now_s) for ahead in (1, 2)] == [152.5, 154.5]


def test_after_a_skip_all_meet_in_the_slot_that_is_due() -> None:
    """Too few were there for the one before; who passed it by must not pass the next one by, too."""
    aim = delivering(aim_at(10), 5.0)
    aim.heard(log(12, merged=9), 102.0, 102.0)
    assert aim.skipped and aim.closes_s(12, 103.0) == inf
    aim.next_slot, aim.reached = 12, 12.0
    assert slots_after(aim, 2, 104.9) == [12]
    aim.heard(log(13), 106.0, 106.0)
    assert not aim.skipped and aim.closes_s(13, 106.0) == 108.5


def test_one_that_has_missed_a_round_comes_to_a_slot_that_is_open_without_its_steps() -> None:
    """The slots go on as fast as its steps, so it would be one step short of each for ever."""
    aim = aim_at(10, pace="planned")
    aim.heard(log(14, merged=11), 106.0, 106.0)
    assert aim.skipped and slots_after(aim, 1, 106.1, local_steps=100.0) == [14]
    aim = aim_at(10, pace="planned")
    aim.heard(log(13, merged=10), 106.0, 106.0)
    assert slots_after(aim, 1, 106.1, local_steps=100.0) == [], "it has not missed a whole round"


def test_no_slot_is_named_that_is_further_ahead_than_a_base_may_be_old() -> None:
    """However much it has trained. The version of the slot before the head is too old for slot 16."""
    assert slots_after(aim_at(10, max_ahead=6), 40, step_s=100.0) == [10, 11, 12, 13, 14, 15]


def out_of_reach(pace: Pace = "measured") -> Aim:
    """Uploads have always taken longer than any slot that it may name."""
    return delivering(aim_at(10, max_ahead=6, pace=pace), 100 * SLOT_S)


def at(aim: Aim, head: int) -> float:
    """The others have merged every slot before this one, on time."""
    now_s = 100.0 + (head - 10) * SLOT_S
    aim.heard(log(head), now_s, now_s)
    return now_s


FIRST_PROBE = 10 + PROBE_ROUNDS * FRAGMENTS


@pytest.mark.parametrize("pace", ["measured", "planned"])
def test_one_that_reaches_no_slot_offers_for_the_last_one_that_is_ready_once_rounds_have_passed(pace: Pace) -> None:
    """Otherwise it would never measure that uploads have become shorter, and would be in no merge for good."""
    aim = out_of_reach(pace)
    assert slots_after(aim, 40) == []
    for head in range(11, FIRST_PROBE):
        assert aim.due(at(aim, head), 0.0) == []
    now_s, ready = at(aim, FIRST_PROBE), {FIRST_PROBE, FIRST_PROBE + 2}
    assert aim.due(now_s, 0.0, ready.__contains__) == [FIRST_PROBE + 2]


@pytest.mark.parametrize(("in_time", "after"), [(True, PROBE_ROUNDS), (False, PROBE_AGAIN_ROUNDS)])
def test_a_probe_that_was_not_in_time_is_repeated_after_more_rounds(in_time: bool, after: int) -> None:
    aim = out_of_reach()
    (slot,) = aim.due(at(aim, FIRST_PROBE), 0.0)
    aim.sent(slot, at(aim, FIRST_PROBE))
    assert aim.due(at(aim, slot), 0.0) == []
    aim.delivered(slot, 1.0, at(aim, slot))
    aim.settled(slot, in_time)
    delivering(aim, 100 * SLOT_S)
    for head in range(slot + 1, slot + 1 + after * FRAGMENTS):
        assert aim.due(at(aim, head), 0.0) == []
    assert len(aim.due(at(aim, slot + 1 + after * FRAGMENTS), 0.0)) == 1


@pytest.mark.parametrize("away", [PROBE_ROUNDS, 5, 50])
def test_one_that_was_away_needs_no_probe_and_passes_nothing_by_that_it_reaches(away: int) -> None:
    """A frozen process hears of the rounds without it all at once. It offers for the due slot as soon as it may."""
    aim = delivering(aim_at(10), 0.1 * GRACE_S)
    head = 10 + away * FRAGMENTS
    now_s = at(aim, head)
    assert aim.due(now_s, 0.0, lambda slot: slot > head) == [], "an offer for a later slot would pass this one by"
    assert slots_after(aim, 2, now_s) == [head]


def test_a_rollback_forgets_the_probe() -> None:
    """An ordinary offer for the same slot tells nothing new about the way."""
    aim = out_of_reach()
    (slot,) = aim.due(at(aim, FIRST_PROBE), 0.0)
    measured_s = aim.delivery.measured_s
    aim.begin_at(FIRST_PROBE)
    aim.sent(slot, at(aim, FIRST_PROBE))
    aim.settled(slot, True)
    assert aim.delivery.measured_s == measured_s


def test_nothing_is_probed_while_an_offer_is_on_its_way() -> None:
    aim = out_of_reach()
    aim.sent(9, 100.0)
    assert aim.due(at(aim, 2 * FIRST_PROBE), 0.0) == []


def test_a_probe_that_was_in_time_ends_what_was_believed_of_the_way() -> None:
    aim = out_of_reach()
    aim.delivery.hidden_s, aim.delivery.sure = 4.0, True
    now_s = at(aim, FIRST_PROBE)
    (slot,) = aim.due(now_s, 0.0)
    aim.sent(slot, now_s)
    aim.delivered(slot, 1.0, now_s + 1.0)
    aim.settled(slot, True)
    assert aim.delivery.measured_s == 0.0 and aim.delivery.hidden_s == (4.0 - HIDDEN_LESS * SLOT_S) / 2


def test_a_rollback_begins_at_the_slot_that_is_due() -> None:
    aim = aim_at(10)
    slots_after(aim, 4)
    aim.begin_at(10)
    assert slots_after(aim, 2, SOON_S) == [10]


# -- what is known of time --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since_s", "seen_s", "appeared_s"), [(101.9, 102.1, 102.0), (102.3, 102.4, 102.3), (101.5, 101.7, 101.7)]
)
def test_when_a_head_appeared_is_as_expected_within_what_was_seen(
    since_s: float, seen_s: float, appeared_s: float
) -> None:
    """It was not there at `since_s` and is there at `seen_s`; by the one before, it is expected at 102 s."""
    aim = aim_at(10)
    aim.heard(log(11), since_s, seen_s)
    assert aim.head_since_s == pytest.approx(appeared_s)


def test_the_same_head_heard_again_changes_nothing() -> None:
    aim = aim_at(10)
    aim.heard(log(10), 101.0, 101.5)
    assert aim.head_since_s == 100.0


def test_one_hiccup_changes_nothing_of_what_an_upload_takes() -> None:
    delivery = Delivery()
    took(delivery, 0.25)
    for seconds in (0.25, 0.25, 60.0, 0.25):
        took(delivery, seconds)
        assert delivery.expected_s(100.0) == 0.25


def test_the_first_upload_alone_may_have_been_a_hiccup() -> None:
    delivery = Delivery()
    took(delivery, 20.0)
    assert delivery.expected_s(100.0) == 0.0
    took(delivery, 19.0)
    assert delivery.expected_s(100.0) >= 19.0


def test_uploads_that_differ_are_reckoned_with_by_their_deviation() -> None:
    delivery = Delivery()
    took(delivery, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert delivery.measured_s == 3.0 + DEVIATIONS * 1.0, "deviations from the median 3: 0, 1, 1, 2, 2"


def test_a_link_that_has_become_slower_is_soon_reckoned_with() -> None:
    delivery = Delivery()
    took(delivery, *[0.25] * TAKEN, *[3.0] * TAKEN)
    assert delivery.measured_s == 3.0


@pytest.mark.parametrize(("share", "forgets"), [(0.99, True), (1.0, False)])
def test_a_link_that_has_become_much_faster_is_reckoned_with_after_a_few_uploads(share: float, forgets: bool) -> None:
    """One after an outage is expected to be slow for no longer than that: a learner that names slots far ahead, because
    its uploads took long, offers so rarely that many offers are many slots."""
    delivery = Delivery()
    took(delivery, *[8.0] * TAKEN)
    took(delivery, *[8.0 * FASTER * share] * (FASTER_UPLOADS - 1))
    assert delivery.measured_s == 8.0
    took(delivery, 8.0 * FASTER * share)
    assert delivery.measured_s == (8.0 * FASTER * share if forgets else 8.0)


def test_a_short_upload_now_and_then_is_no_faster_link() -> None:
    delivery = Delivery()
    took(delivery, *[8.0] * TAKEN)
    for _ in range(TAKEN):
        took(delivery, *[0.1] * (FASTER_UPLOADS - 1), *[8.0] * FASTER_UPLOADS)
        assert delivery.measured_s == 8.0


# -- what cannot be seen of an offer's way ----------------------------------------------------------------------


MERGED = structs.replace(WINDOW, opens_s=SLOT_S - GRACE_S)  # of the next slot, after a merge at the end of the grace


def shot(aim: Aim, took_s: float, in_time: bool, late_s: float = 0.0) -> None:
    """One offer for the slot that is due, from its sending to its outcome: the merge when the grace is over, or so much
    before."""
    slot, sent_s = aim.head, aim.head_since_s
    closes_s = aim.closes_s(slot, sent_s)
    aim.sent(slot, sent_s)
    aim.delivered(slot, took_s, sent_s + took_s)
    merged_s = sent_s + SLOT_S + GRACE_S if closes_s == inf else closes_s - late_s
    aim.heard(log(slot + 1, MERGED), merged_s, merged_s)
    aim.settled(slot, in_time)


def test_a_miss_that_nothing_explains_makes_the_way_longer() -> None:
    """Uploaded 1.25 s before half of its grace was over, and late all the same: a relay, or a mirror that lags. The way
    is at least so much longer than it looks."""
    aim = delivering(aim_at(10), 1.0)
    shot(aim, 1.0, in_time=False)
    assert aim.delivery.hidden_s == 1.25 + HIDDEN_STEP * SLOT_S
    assert aim.delivery.expected_s(110.0) == 1.0 + aim.delivery.hidden_s


@pytest.mark.parametrize(("late_s", "hides"), [(1.0, True), (1.5, False), (2.4, False)])
def test_a_window_that_began_before_it_was_expected_explains_a_miss(late_s: float, hides: bool) -> None:
    """Others were faster than the log had said. The commit tells when the window really began."""
    aim = aim_at(10)
    shot(aim, 1.0, in_time=False, late_s=late_s)
    assert (aim.delivery.hidden_s > 0) == hides


def test_an_offer_that_arrives_after_its_slot_was_merged_must_come_so_much_earlier() -> None:
    """A syncer that does not expect this learner merges as soon as the others are there, long before the window closes.
    The rest of the window is no delay."""
    aim = aim_at(10)
    aim.sent(10, 100.0)
    aim.delivered(10, 0.4, 100.4)
    aim.heard(log(11), 100.25, 100.25)
    aim.settled(10, in_time=False)
    assert aim.delivery.hidden_s == pytest.approx(0.15)


def test_a_learner_that_nobody_waits_for_comes_earlier_until_it_is_in_time() -> None:
    """Its uploads take so long that the syncer does not hear it for a while, and the others always come early."""
    aim, misses = delivering(aim_at(10), 1.0), 0
    while misses < 20:
        slot, sent_s = aim.head, aim.head_since_s - aim.delivery.hidden_s
        over_s = aim.head_since_s + 0.4 * SLOT_S
        aim.sent(slot, sent_s)
        aim.delivered(slot, 1.0, sent_s + 1.0)
        aim.heard(log(slot + 1), over_s, over_s)
        if sent_s + 1.0 <= over_s:
            break
        aim.settled(slot, in_time=False)
        misses += 1
    assert 0 < misses < 5


def test_a_way_that_stays_too_long_goes_on_growing_up_to_a_round() -> None:
    aim, ways = aim_at(10), []
    for _ in range(20):
        shot(aim, 1.0, in_time=False)
        ways.append(aim.delivery.hidden_s)
    assert ways == sorted(ways) and ways[-1] == FRAGMENTS * SLOT_S


def test_what_a_single_late_offer_made_believe_is_forgotten_soon() -> None:
    """The syncer may have stalled with its window closed. An offer that was on its way meanwhile is the same stall."""
    aim = aim_at(10)
    aim.sent(10, 100.0)
    aim.sent(11, 100.5)
    for slot in (10, 11):
        aim.delivered(slot, 0.5, 101.0)
    aim.heard(log(12, MERGED), 104.0, 104.0)
    for slot in (10, 11):
        aim.settled(slot, in_time=False)
    assert aim.delivery.hidden_s > SLOT_S / 2 and not aim.delivery.sure
    for _ in range(30):
        shot(aim, 1.0, in_time=True)
    assert aim.delivery.hidden_s == 0.0


def test_a_way_that_has_become_shorter_is_found_out_little_by_little() -> None:
    aim = aim_at(10)
    for _ in range(2):
        shot(aim, 1.0, in_time=False)
    assert aim.delivery.sure
    before_s = aim.delivery.hidden_s
    for _ in range(50):
        shot(aim, 1.0, in_time=True)
    assert aim.delivery.hidden_s == pytest.approx(before_s - 50 * HIDDEN_LESS * SLOT_S)
    for _ in range(100):
        shot(aim, 1.0, in_time=True)
    assert aim.delivery.hidden_s == 0.0 and not aim.delivery.sure


@pytest.mark.parametrize("took_s", [2.4, 2.6, 30.0])
def test_a_miss_that_the_upload_explains_changes_nothing_hidden(took_s: float) -> None:
    aim = aim_at(10)
    shot(aim, took_s, in_time=False)
    assert aim.delivery.hidden_s == 0.0


def test_other_outcomes_say_nothing_of_the_way() -> None:
    """Of an offer that is still being uploaded when its slot is over, of a skipped slot, of one from before a rollback;
    of an incarnation for which the syncer does not look yet, and where no window was known."""
    uploading, skipped, gone_back, unknown = aim_at(10), aim_at(10), aim_at(10), aim_at(10, known=False)
    windowless = Aim(FRAGMENTS, 0, known=True)
    for aim in (uploading, skipped, gone_back):
        aim.sent(10, 100.0)
    uploading.settled(10, in_time=False)
    uploading.delivered(10, 40.0, 140.0)
    for aim in (skipped, gone_back):
        aim.delivered(10, 1.0, 101.0)
    skipped.settled(10, None)
    gone_back.begin_at(10)
    gone_back.settled(10, in_time=False)
    for aim in (unknown, windowless):
        shot(aim, 1.0, in_time=False)
    assert [aim.delivery.hidden_s for aim in (uploading, skipped, gone_back, unknown, windowless)] == [0.0] * 5


# -- any history ------------------------------------------------------------------------------------------------

happens = st.one_of(
    st.tuples(st.just("step"), st.floats(0.01, 20.0)),
    st.tuples(st.just("commit"), st.integers(1, 3)),
    st.tuples(st.just("upload"), st.floats(0.0, 20.0)),
    st.tuples(st.just("pause"), st.floats(0.0, 60.0)),
)


@settings(max_examples=100)
@given(st.lists(happens, max_size=60), st.floats(0.5, 40.0), st.floats(0.05, 5.0), st.floats(0.0, 2.0))
def test_slots_rise_are_never_behind_the_log_and_never_beyond_the_bound(
    history: list[tuple[str, float]], local_steps: float, slot_s: float, grace_s: float
) -> None:
    aim, head, now_s, newest = Aim(FRAGMENTS, 0), 0, 100.0, -1
    for what, amount in history:
        if what == "commit":
            head += int(amount)
            aim.heard(log(head, Window(slot_s, slot_s, min(grace_s, slot_s))), now_s - 0.1, now_s)
        elif what == "upload":
            if aim.delivery.waiting:
                aim.delivery.done(now_s, amount)
        else:
            now_s += amount
        if what == "step":
            aim.stepped(local_steps)
            way_s = aim.delivery.expected_s(now_s)
            slots = aim.due(now_s, amount)
            assert slots == sorted(set(slots)) and all(slot > newest and slot >= head for slot in slots)
            reach = (way_s + amount) / slot_s + 1 + EARLY
            assert all(slot - head <= max(reach, 2 * FRAGMENTS) for slot in slots)
            late = [slot for place, slot in enumerate(slots) if latest_s(aim, slot, now_s, place) < now_s]
            assert late == [], "they would come too late"
            for slot in slots:
                aim.sent(slot, now_s)
            newest = max([newest, *slots])
