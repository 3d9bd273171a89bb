"""Whose turn it is, how many steps a round has, and the drift bound: pure functions with their properties.

The first rounds: one learner alone, shorter rounds, an outer optimizer that comes to its own values step by step.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import ColdStartSettings, OuterSettings
from diloco_cli.plan.planner import make_plan
from diloco_cli.protocol.log.records import RunFormat, fragment_of_slot
from diloco_cli.protocol.rules.schedule import (
    EXACT_TO,
    SLOWEST,
    beginner,
    fraction_of_run,
    may_step,
    measured_local_steps,
)
from tests.unit.plan.fleets import FAST, IOWA, MODEL, OLD, fleet
from tests.unit.plan.fleets import RUN as PLANNED
from tests.unit.protocol.integer_ports import WrittenLog
from tests.unit.protocol.living import Living
from tests.unit.protocol.records import applied, make_run

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


def test_the_plan_says_which_islands_stand_idle() -> None:
    plan = make_plan(replace(PLANNED, cold_start=ColdStartSettings(4)), fleet(replace(IOWA, link=FAST), OLD), MODEL)
    assert [warning for warning in plan.warnings if warning.startswith("cold start")] == [
        "cold start: iowa alone for 4 rounds; 1 of 2 islands stand idle"
    ]


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
