"""What a syncer believes of the learners' words on their pace, beside what its own clock shows."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from diloco_cli.protocol.log.records import Timings
from diloco_cli.protocol.log.state import Window
from diloco_cli.protocol.rules.pacing import MAX_FASTER, MAX_SLOWER, TIMES_SEEN, Gap, Pacer, believed_slot_s
from diloco_cli.protocol.rules.quorum import SlotFacts
from tests.unit.protocol.records import RUN, genesis, offer, with_steps

SLOT_S = 60.0


def paced(claims_s: Iterable[float], step_s: float, grace_s: float = 0.0) -> Pacer:
    """A merge every `SLOT_S`; 4 steps of `step_s` are planned for 2 slots."""
    pacer = Pacer(with_steps(RUN, step_s))
    for k, claimed_s in enumerate(claims_s):
        now_s = k * SLOT_S
        facts = SlotFacts(1, 2, 1, now_s - grace_s, False, now_s - SLOT_S, now_s)
        pacer.merged([offer(genesis(), timings=Timings(0.1, claimed_s))], facts, now_s)
    return pacer


@pytest.mark.parametrize("step_s", [0.0, SLOT_S / 2, 1e4], ids=["no plan", "as planned", "planned too long"])
@pytest.mark.parametrize(
    ("claimed_s", "believed_s"), [(1e-9, SLOT_S / MAX_FASTER), (SLOT_S, SLOT_S), (1e6, SLOT_S * MAX_SLOWER)]
)
def test_a_word_on_the_pace_counts_beside_what_slots_take_however_often_it_is_said(
    claimed_s: float, believed_s: float, step_s: float
) -> None:
    assert paced([claimed_s] * 100, step_s).pace.slot_s == pytest.approx(believed_s)


@pytest.mark.parametrize("step_s", [1e-6, 1e6])
def test_a_plan_that_is_far_off_is_told_to_nobody_and_gone_with_the_first_word_that_can_be_compared(
    step_s: float,
) -> None:
    assert paced([SLOT_S], step_s).told_slot_s == 0.0
    assert paced([SLOT_S] * 2, step_s).told_slot_s == paced([SLOT_S] * 2, step_s).pace.slot_s == SLOT_S


def test_a_successor_begins_with_what_the_log_tells_if_it_tells_anything() -> None:
    pacer = paced([], 1e-6)
    pacer.begin(None)
    pacer.begin(Window(0.0, 0.0, 0.0))
    assert pacer.told_slot_s == 0.0
    pacer.begin(Window(1.0, SLOT_S, 5.0))
    assert pacer.told_slot_s == pacer.pace.slot_s == SLOT_S


def test_without_a_plan_the_first_word_waits_for_something_to_compare_it_with() -> None:
    assert paced([1e6], 0.0).pace.slot_s == 0.0
    assert paced([1e6, 1e6], 0.0).pace.slot_s <= SLOT_S * MAX_SLOWER


def test_grace_that_a_false_pace_has_made_long_does_not_make_the_pace_longer() -> None:
    assert paced([1e6] * 100, SLOT_S / 2, grace_s=0.9 * SLOT_S).pace.slot_s <= 0.8 * SLOT_S


def gaps(*seconds: float) -> list[Gap]:
    """Without any grace."""
    return [Gap(each_s, each_s, True) for each_s in seconds]


def test_a_grace_that_takes_all_the_time_leaves_half_of_it_to_a_slot() -> None:
    """Each slot waits for learners that come too late: the slots are as long as their grace."""
    spent = [Gap(SLOT_S, 0.0, True)] * 8
    assert believed_slot_s(SLOT_S, spent, spent) == SLOT_S / 2
    assert believed_slot_s(SLOT_S / 3, spent, spent) == SLOT_S / 3


def test_an_outage_and_the_burst_after_it_change_nobodys_honest_word() -> None:
    usual, burst = gaps(*[SLOT_S] * 7), gaps(*[0.05] * 24)
    outage = [*usual, *gaps(40 * SLOT_S)]
    assert believed_slot_s(SLOT_S, [*outage, *burst], outage) == SLOT_S
    back = gaps(3600.0, SLOT_S)
    assert believed_slot_s(SLOT_S / 2, outage, outage) == believed_slot_s(SLOT_S / 2, back, back) == SLOT_S / 2
    assert len(usual) + 1 + len(burst) == TIMES_SEEN


@pytest.mark.parametrize("piled_up", [8, TIMES_SEEN])
def test_what_has_piled_up_before_a_takeover_is_no_measure_of_its_learners(piled_up: int) -> None:
    """A new syncer merges it as fast as it can: each slot's quorum is there at once."""
    pacer, merge_s = paced([], SLOT_S / 2), 0.3
    pacer.begin(Window(0.0, SLOT_S, 0.0))
    for k in range(piled_up):
        due_s = k * merge_s
        facts = SlotFacts(1, 2, 1, due_s, True, due_s, due_s)
        pacer.merged([offer(genesis(), timings=Timings(0.1, SLOT_S))], facts, due_s + merge_s)
    assert pacer.pace.slot_s == SLOT_S


def test_where_the_syncer_is_the_slowest_words_are_held_against_what_it_does() -> None:
    pacer, merge_s = paced([], SLOT_S / 2), 10.0
    for k in range(10 * TIMES_SEEN):
        due_s = k * merge_s
        facts = SlotFacts(1, 2, 1, due_s, True, due_s, due_s)
        pacer.merged([offer(genesis(), timings=Timings(0.1, 1e6))], facts, due_s + merge_s)
    assert pacer.pace.slot_s == pytest.approx(MAX_SLOWER * merge_s)
