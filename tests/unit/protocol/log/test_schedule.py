"""Whose turn it is, how many steps a round has, and the drift bound: pure functions with their properties."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.protocol.log.records import fragment_of_slot
from diloco_cli.protocol.rules.schedule import EXACT_TO, SLOWEST, fraction_of_run, may_step, measured_local_steps

quick = settings(max_examples=60, deadline=None)


def test_every_fragment_is_due_once_a_round() -> None:
    assert sorted(fragment_of_slot(slot, 5) for slot in range(15, 20)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("own_s", "fastest_s", "expected"),
    [(1.0, 1.0, 24.0), (2.0, 1.0, 12.0), (1.0, 2.0, 24.0), (7.0, 3.0, 10.286), (99.0, 1.0, 1.0), (23.9, 1.0, 1.004)],
)
def test_slower_islands_make_fewer_steps_a_round_but_never_none(
    own_s: float, fastest_s: float, expected: float
) -> None:
    assert measured_local_steps(24, own_s, fastest_s) == expected


def test_a_peer_that_says_it_is_very_fast_drives_nobody_to_a_sync_a_step() -> None:
    assert measured_local_steps(3200, 1.0, 1e-9) == 3200 / SLOWEST


@quick
@given(st.integers(1, 500), st.floats(0.05, 20.0), st.floats(0.05, 20.0))
def test_all_islands_reach_a_sync_at_the_same_time(every: int, own_s: float, other_s: float) -> None:
    """Not a whole number of steps, or what rounding leaves over would add up: after 1,000 rounds they are apart by
    less than the rounding of the figure itself, as far as nobody is at the bound for the slowest."""
    fastest_s = min(own_s, other_s)
    rounds_s = [measured_local_steps(every, s, fastest_s) * s for s in (own_s, other_s)]
    if every * fastest_s / max(own_s, other_s) >= max(1.0, every / SLOWEST):
        assert abs(rounds_s[0] - rounds_s[1]) <= 10**-EXACT_TO * max(own_s, other_s)


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
