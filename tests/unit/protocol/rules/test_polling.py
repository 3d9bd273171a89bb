"""When to ask again: few requests, found soon. By hand and by counting."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.protocol.rules.pacing import (
    DENSE,
    MAX_REQUESTS,
    SHORT_SLOT_S,
    expected_slot_s,
    next_request_s,
    watch_every_s,
)

quick = settings(max_examples=60, deadline=None)
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
