"""Local steps and drift bound, the time of a slot, polling."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import ColdStartSettings, OuterSettings
from diloco_cli.protocol.log.records import Offer, RunFormat, Timings, fragment_of_slot
from diloco_cli.protocol.log.state import Window
from diloco_cli.protocol.rules.pacing import (
    DENSE,
    DENSE_BOUNDS_S,
    MAX_FASTER,
    MAX_REQUESTS,
    SHORT_SLOT_S,
    SLOWEST,
    Pacer,
    beginner,
    expected_slot_s,
    fraction_of_run,
    guessed_request_s,
    may_step,
    measured_local_steps,
    next_request_s,
    watch_every_s,
)
from diloco_cli.protocol.rules.quorum import SlotFacts
from tests.unit.protocol.integer_ports import WrittenLog
from tests.unit.protocol.living import Living
from tests.unit.protocol.records import BATCH, RUN, applied, genesis, make_run, offer, with_steps

quick = settings(max_examples=60)


def test_every_fragment_is_due_once_a_round() -> None:
    assert sorted(fragment_of_slot(slot, 5) for slot in range(15, 20)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("own_s", "round_s", "expected"),
    [
        (1.0, 24.0, 24.0),
        (2.0, 24.0, 12.0),
        (7.0, 72.0, 10.286),
        (0.75, 24.0, 24.0),
        (99.0, 24.0, 1.0),
        (23.9, 24.0, 1.004),
    ],
)
def test_an_island_makes_as_many_steps_as_fit_into_a_round_but_never_none(
    own_s: float, round_s: float, expected: float
) -> None:
    assert measured_local_steps(24, own_s, round_s) == expected


def test_a_wrong_pace_drives_nobody_to_a_sync_a_step_nor_beyond_the_drift_bound() -> None:
    assert measured_local_steps(3200, 1.0, 1e-9) == 3200 / SLOWEST
    assert measured_local_steps(3200, 1.0, 1e9) == 3200


@pytest.mark.parametrize(
    ("own_steps", "expected"), [(0, 0.5), (5, 0.5 + 0.05), (40, 0.5 + 0.4), (400, 0.5 + 0.4)]
)  # fmt: skip
def test_the_schedule_goes_on_between_merges_no_further_than_the_drift_bound(own_steps: int, expected: float) -> None:
    """500 of 1,000 tokens are merged; all together make 100 a round, this learner 10 steps; 4 rounds of drift."""
    assert fraction_of_run(500, 1000, 100, own_steps, 10, 4) == pytest.approx(expected)
    assert fraction_of_run(900, 1000, 100, 400, 10, 4) == 1.0


def test_the_drift_bound_pauses_with_a_reason() -> None:
    assert may_step(39, 10, 4).allowed
    assert not may_step(40, 10, 4).allowed and "drift" in may_step(40, 10, 4).reason


ROUNDS, FRAGMENTS = 4, 2
ENDS = ROUNDS * FRAGMENTS


def cold(fragments: int = FRAGMENTS, skip_after_s: float = 60.0, **changes: object) -> RunFormat:
    """Rounds of four steps; `l1` is the fastest of the run's islands."""
    run = make_run(fragments, skip_after_s=skip_after_s)
    start = replace(ColdStartSettings(ROUNDS), **changes)
    outer = OuterSettings(lr=0.8, momentum=0.4)
    slow, fast = run.islands
    return replace(
        run,
        islands=(slow, replace(fast, tokens_per_s=200.0)),
        settings=replace(run.settings, cold_start=start, outer=outer),
    )


def test_without_it_all_train() -> None:
    assert [beginner(run, slot) for run in (make_run(), cold(rounds=0)) for slot in (0, 1, ENDS)] == [None] * 6
    assert [beginner(cold(), slot) for slot in (0, ENDS - 1, ENDS)] == ["l1", "l1", None]


# -- alone ------------------------------------------------------------------------------------------------------


def test_the_fastest_trains_at_once_and_of_equal_ones_the_first_by_name() -> None:
    run = cold()
    equal = tuple(replace(island, tokens_per_s=100.0) for island in run.islands[::-1])
    assert beginner(run, 0) == "l1" and beginner(replace(run, islands=equal), 0) == "l0"
    living = Living(WrittenLog(replace(run, islands=equal)))
    living.until(lambda: living.training.steps > 0)


def test_nobody_waits_for_ever_for_one_that_is_dead() -> None:
    living = Living(WrittenLog(cold(skip_after_s=20.0)))
    living.world.run_for(19.0)
    assert living.training.steps == 0 and living.learner.doing == "WAITING" and living.offers() == []
    assert living.learner.note == f"cold start: l1 alone until slot {ENDS}, now {living.log.state.slot}"
    living.log.merge(90, applied("l1"))
    living.world.run_for(19.0)
    assert living.training.steps == 0, "there was news"
    living.world.run_for(3.0)
    assert living.training.steps > 0


SLOT_S = 60.0
STEP_S = 2 * SLOT_S / 4  # 4 steps are planned for 2 slots


class Islands:
    """Each offers once a slot, and states that it is very fast; `step_s` as planned. `alive`: others may be, too."""

    def __init__(self, step_s: float, names: str = "abc", alive: int = 0, **sync: int) -> None:
        self.alive = alive
        run = with_steps(make_run(**sync), step_s)
        self.run = replace(run, islands=tuple(replace(run.islands[0], name=name) for name in names))
        self.pacer, self.now_s, self.position = Pacer(self.run), 0.0, dict.fromkeys(names, 0)
        self.state, self.incarnation = genesis(self.run), 1

    def slot(self, seconds: float = SLOT_S, **steps: float) -> None:
        """One slot that lasts so long; steps of each island in it (default: as many as take STEP_S each)."""
        self.merge(self.offers(seconds, "".join(self.position), **steps), seconds)

    def offers(self, seconds: float, names: str, **steps: float) -> list[Offer]:
        """Of these islands, after so long."""
        self.now_s += seconds
        offers = []
        for name in names:
            self.position[name] += round(BATCH * steps.get(name, seconds / STEP_S))
            made = offer(
                self.state, learner=name, incarnation=self.incarnation, data_end=self.position[name],
                timings=Timings(1e-9, 1e-9),
            )  # fmt: skip
            self.pacer.offered(made, self.now_s, seconds > 0)
            offers.append(made)
        return offers

    def merge(self, offers: list[Offer], seconds: float) -> None:
        alive = max(len(self.position), self.alive)
        facts = SlotFacts(alive, alive, 1, self.now_s, False, self.now_s - seconds, self.now_s)
        self.pacer.merged(self.state, offers, facts, self.now_s)

    def slots(self, number: int, **steps: float) -> float:
        for _ in range(number):
            self.slot(**steps)
        return self.pacer.pace.slot_s


@pytest.mark.parametrize("step_s", [0.0, STEP_S, STEP_S / 50], ids=["no plan", "as planned", "planned too fast"])
def test_a_slot_lasts_as_long_as_its_steps_whatever_is_planned_or_stated(step_s: float) -> None:
    assert Islands(step_s).slots(100) == pytest.approx(SLOT_S)


@pytest.mark.parametrize("steps", [0.001, 320.0], ids=["slow", "fast"])
def test_one_of_three_moves_no_slot_by_what_it_states_of_its_steps(steps: float) -> None:
    assert Islands(STEP_S).slots(100, c=steps) == pytest.approx(SLOT_S)


def test_of_two_the_slower_one_sets_the_pace() -> None:
    assert Islands(STEP_S, "ab").slots(100, a=320.0) == pytest.approx(SLOT_S)


def test_a_fast_one_that_comes_first_sets_no_pace_for_those_that_are_not_seen_yet() -> None:
    """They need as long as it lasts until they are seen, or what is planned; once most are seen, what those need."""
    islands = Islands(STEP_S, alive=3)
    del islands.position["b"], islands.position["c"]
    assert islands.slots(9, a=320.0) == pytest.approx(SLOT_S, rel=0.05)
    islands = Islands(STEP_S * 100, alive=3)
    del islands.position["b"], islands.position["c"]
    assert islands.slots(9, a=320.0) < 10 * SLOT_S
    islands.position |= {"b": 0, "c": 0}
    assert islands.slots(20, a=320.0) == pytest.approx(SLOT_S, rel=0.05)
    del islands.position["b"], islands.position["c"]
    assert islands.slots(1, a=320.0) == pytest.approx(SLOT_S, rel=0.05), "they are away, the plan counts no more"


def test_islands_that_all_become_slower_or_faster_set_another_pace_within_four_rounds() -> None:
    islands = Islands(STEP_S / 2)
    islands.slots(20)
    assert islands.slots(8, a=1, b=1, c=1) == pytest.approx(2 * SLOT_S, rel=0.1)
    assert islands.slots(8) == pytest.approx(SLOT_S, rel=0.1)


def test_an_outage_changes_no_pace_whether_learners_went_on_or_not() -> None:
    islands = Islands(STEP_S)
    islands.slots(20)
    islands.slot(seconds=40 * SLOT_S)
    islands.slot(seconds=40 * SLOT_S, a=1, b=1, c=1)
    islands.slots(2)
    assert islands.pacer.pace.slot_s == pytest.approx(SLOT_S, rel=0.3)
    assert islands.slots(4) == pytest.approx(SLOT_S, rel=0.1)


def test_learners_that_were_away_for_a_day_set_no_slot_of_a_day() -> None:
    """Whose syncer had seen one offer of each, as after a takeover: no median of many would leave that day out."""
    islands = Islands(STEP_S)
    islands.slot()
    islands.incarnation = 2
    islands.slot(seconds=86_400.0, a=2, b=2, c=2)
    assert islands.pacer.pace.slot_s == pytest.approx(SLOT_S)
    assert islands.slots(8) == pytest.approx(SLOT_S)


@pytest.mark.parametrize("fragments", [1, 2])
def test_who_waited_a_day_for_a_quorum_sets_no_slot_of_a_day(fragments: int) -> None:
    """Of a syncer that has merged nothing before; an offer of each fragment waits."""
    slot_s = 2 * SLOT_S / fragments
    islands = Islands(STEP_S, fragments=fragments, quorum=3)
    for _ in range(fragments):
        waiting = islands.offers(slot_s, "ab")
    islands.merge([*waiting, *islands.offers(86_400.0, "c", c=2)], 86_400.0)
    for _ in range(3):
        islands.slot(slot_s)
        assert islands.pacer.pace.slot_s == pytest.approx(slot_s)


def test_what_piled_up_shows_no_pace_and_until_one_is_seen_none_is_told() -> None:
    islands = Islands(STEP_S)
    for _ in range(8):
        islands.slot(seconds=0.0, a=2, b=2, c=2)
    assert islands.pacer.told_slot_s == 0.0
    islands.slot()
    assert islands.pacer.told_slot_s == islands.pacer.pace.slot_s == pytest.approx(SLOT_S)


def test_where_the_syncer_is_far_behind_slots_are_not_much_shorter_than_its_merges() -> None:
    assert Islands(STEP_S / 20).slots(100, a=40, b=40, c=40) == pytest.approx(SLOT_S / MAX_FASTER)


def test_who_has_left_sets_no_pace() -> None:
    islands = Islands(STEP_S / 2)
    islands.slots(20, b=1, c=1)
    del islands.position["b"], islands.position["c"]
    assert islands.slots(20) == pytest.approx(SLOT_S, rel=0.01)


def test_who_is_kept_out_sets_no_pace() -> None:
    islands = Islands(STEP_S / 2)
    kept_out = replace(islands.state.learner("c"), quarantined="bad offers")
    islands.state = replace(islands.state, learners={**islands.state.learners, "c": kept_out})
    del islands.position["a"], islands.position["b"]  # nobody else is seen at work yet
    islands.slots(9, c=1)
    assert islands.pacer.told_slot_s == 0.0


def test_a_successor_begins_with_what_the_log_tells_if_it_tells_anything() -> None:
    pacer = Pacer(with_steps(RUN, 1e-6))
    pacer.begin(None, 0.0)
    pacer.begin(Window(0.0, 0.0, 0.0), 0.0)
    assert pacer.told_slot_s == 0.0
    pacer.begin(Window(1.0, SLOT_S, 5.0), 0.0)
    assert pacer.told_slot_s == pacer.pace.slot_s == SLOT_S


slots = st.floats(SHORT_SLOT_S, 3600.0)


def asked(found_s: float | None, slot_s: float, from_s: float, to_s: float) -> list[float]:
    """Every request in a stretch of time, all in vain."""
    times, at_s = [], from_s
    while at_s < to_s:
        times.append(at_s)
        at_s = next_request_s(found_s, at_s, slot_s)
    return times


def test_after_a_find_the_next_is_asked_for_just_before_it_is_due_and_then_ever_less_often() -> None:
    """Slots of 10 s, found at 100 s: first at 108.8 s, each half second until 111.3 s; then pauses of 1.5 times what
    lies beyond 110.5 s: 1.2, 3, 7.5 s; and one slot at most."""
    times = asked(100.0, 10.0, next_request_s(100.0, 100.0, 10.0), 145.0)
    assert times == pytest.approx(
        [108.8, 109.3, 109.8, 110.3, 110.8, 111.3, 112.5, 115.5, 123.0, 133.0, 143.0], abs=1e-9
    )


def test_with_nothing_known_it_is_asked_for_eight_times_a_slot() -> None:
    assert next_request_s(None, 50.0, 8.0) == 51.0
    assert next_request_s(None, 0.0, 1.4) == pytest.approx(0.175), "also where slots are short"
    assert next_request_s(None, 0.0, 0.1) == 0.02, "but no oftener than this"


def test_while_the_slot_is_a_guess_the_pauses_grow_with_the_wait() -> None:
    """So what comes a hundred times earlier than planned is found nearly as soon as it is there, and next to nothing is
    asked for what comes as planned."""
    at_s, times = 100.0, []
    while at_s < 1100.0:
        times.append(at_s)
        at_s = guessed_request_s(100.0, at_s, 1000.0)
    assert len(times) < 80
    assert all(later_s - at_s <= max(DENSE_BOUNDS_S[1], (at_s - 100.0) / 8) + 1e-9 for at_s, later_s in pairwise(times))
    assert guessed_request_s(0.0, 1e6, 8.0) == 1e6 + 1.0, "not less often than where nothing is known"


@quick
@given(slots, st.floats(0.0, 1e6))
def test_no_stretch_of_a_slot_has_more_requests_than_the_bound(slot_s: float, found_s: float) -> None:
    times = asked(found_s, slot_s, found_s, found_s + 6 * slot_s)
    assert max(sum(start <= at < start + slot_s for at in times) for start in times) <= MAX_REQUESTS
    unknown = asked(None, slot_s, 0.0, 6 * slot_s)
    assert max(sum(start <= at < start + slot_s * 0.999 for at in unknown) for start in unknown) <= MAX_REQUESTS


@quick
@given(slots, st.floats(0.9, 1.1))
def test_what_comes_about_when_it_is_due_is_found_within_a_twentieth_of_a_slot(slot_s: float, after: float) -> None:
    times = asked(0.0, slot_s, 0.0, 3 * slot_s)
    found_s = next(at for at in times if at >= after * slot_s)
    assert found_s - after * slot_s <= slot_s * DENSE * 1.0001


@quick
@given(st.floats(1e-6, SHORT_SLOT_S, exclude_max=True), st.floats(0.0, 1.05))
def test_short_slots_are_looked_at_all_the_time_until_something_is_late(slot_s: float, at_slots: float) -> None:
    at_s = at_slots * slot_s
    assert 0.019 <= next_request_s(0.0, at_s, slot_s) - at_s <= 0.0751


@quick
@given(st.floats(1e-6, SHORT_SLOT_S, exclude_max=True))
def test_what_is_late_in_short_slots_is_looked_for_ever_less_often(slot_s: float) -> None:
    """At most 60 times in a minute, in which it was looked for 1,200 times before, and at least each SHORT_SLOT_S."""
    times = asked(0.0, slot_s, 1.05 * slot_s, 60.0)
    assert len(times) <= 60
    pauses = [later - at for at, later in pairwise(times)]
    assert max(pauses) <= SHORT_SLOT_S + 1e-6 and pauses == pytest.approx(sorted(pauses))


@quick
@given(st.one_of(st.none(), st.floats(0.0, 1e6)), st.floats(0.0, 1e6), st.floats(1e-3, 1e6))
def test_time_goes_on(found_s: float | None, asked_s: float, slot_s: float) -> None:
    asked_s = max(asked_s, found_s or 0.0)
    assert next_request_s(found_s, asked_s, slot_s) > asked_s


@pytest.mark.parametrize(("claimed_s", "expected"), [(0.0, 10.0), (9.0, 9.0), (1e-9, 5.0), (1e6, 40.0)])
def test_a_learners_word_for_its_pace_counts_within_bounds(claimed_s: float, expected: float) -> None:
    assert expected_slot_s(claimed_s, 10.0) == expected


@pytest.mark.parametrize(("slot_s", "every_s"), [(0.1, 1.0), (5.0, 5.0), (60.0, 10.0)])
def test_what_comes_unannounced_is_looked_for_once_a_slot_within_bounds(slot_s: float, every_s: float) -> None:
    assert watch_every_s(slot_s) == every_s
