"""The published table, the jump from failure to failure beside every step, the closed form: they must agree."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean, stdev
from types import FrameType
from typing import Any

import pytest

from diloco_cli.errors import UsageError
from diloco_cli.forecast import goodput
from diloco_cli.forecast.chips import (
    DAY_MS,
    ChipsLearner,
    Constants,
    Repair,
    Timeline,
    equal_learners,
    fleet_goodput,
    fleet_uptime,
    generator,
    leap,
)
from diloco_cli.forecast.goodput import (
    PUBLISHED,
    GoodputRow,
    Method,
    all_methods,
    check_work,
    fleet_of,
    published_grid,
)
from examples.quality.methods.walking import walk

POINTS = 5.0  # how far a cell may be from the published one


def apart(rows: list[GoodputRow]) -> dict[tuple[str, int, int], float]:
    return {
        (row.method, row.learners, row.chips): max(
            abs(row.goodput_percent - (row.published_goodput_percent or 0)),
            abs(row.uptime_percent - (row.published_uptime_percent or 0)),
        )
        for row in rows
    }


def test_every_published_cell_is_within_five_points_with_one_set_of_constants() -> None:
    found = apart(list(published_grid(PUBLISHED, 3.0, (0, 1, 2))))
    assert len(found) == 30
    assert {cell: points for cell, points in found.items() if points > POINTS} == {}


def test_what_was_published_stands_beside_as_many_interrupts_only() -> None:
    rarer = replace(PUBLISHED, mtbi_s=2 * PUBLISHED.mtbi_s)
    assert all(row.published_goodput_percent is None for row in published_grid(rarer, 0.01, (0,)))
    quicker = replace(PUBLISHED, repair=PUBLISHED.repair.with_mean(30.0))
    assert all(row.published_goodput_percent is not None for row in published_grid(quicker, 0.01, (0,)))


def jumped(fleet: Sequence[ChipsLearner], days: float, *seeds: int) -> list[Timeline]:
    return leap(fleet, round(days * DAY_MS), generator(*seeds))


def walked(fleet: Sequence[ChipsLearner], days: float, *seeds: int) -> list[Timeline]:
    """Every step by itself."""
    return [walk(learner, round(days * DAY_MS), generator(*seeds, index)) for index, learner in enumerate(fleet)]


def shares(made: list[list[Timeline]]) -> list[list[float]]:
    """Goodput, uptime and failures of each seed."""
    failures = [float(sum(timeline.failures for timeline in timelines)) for timelines in made]
    return [list(map(fleet_goodput, made)), list(map(fleet_uptime, made)), failures]


# three slices a learner, each failing every 200 s and away for 200 s: most failures drawn hit one that is away
FEW_SLICES = replace(PUBLISHED, mtbi_s=2048 * 200.0, repair=Repair(200.0))


@pytest.mark.parametrize(
    ("method", "chips", "learners", "constants"),
    [
        ("decoupled", 1_200_000, 8, PUBLISHED),
        ("decoupled", 4 * 3 * 2048, 4, FEW_SLICES),
        ("data_parallel_elastic", 1_200_000, 8, PUBLISHED),
        ("data_parallel_no_elasticity", 2_400_000, 2, PUBLISHED),
    ],
)
def test_the_jump_from_failure_to_failure_agrees_with_every_step_within_three_standard_errors(
    method: Method, chips: int, learners: int, constants: Constants
) -> None:
    fleet = fleet_of(method, equal_learners(chips, learners, constants), constants)
    fast, stepwise = (shares([way(fleet, 0.5, seed, len(fleet)) for seed in range(20)]) for way in (jumped, walked))
    for mine, theirs in zip(fast, stepwise, strict=True):
        error = (stdev(mine) ** 2 / len(mine) + stdev(theirs) ** 2 / len(theirs)) ** 0.5
        assert abs(fmean(mine) - fmean(theirs)) <= 3 * error + 1e-9


def test_without_failures_everything_is_good() -> None:
    never = replace(PUBLISHED, mtbi_s=1e30)
    rows = list(all_methods(equal_learners(100_000, 4, never), 100_000, never, 0.5, (0,)))
    assert [row.goodput_percent for row in rows] == [100.0] * 3


def of_fleet(chips: int, learners: int) -> float:
    return fleet_goodput(jumped(equal_learners(chips, learners, PUBLISHED), 1.0, 0, chips))


def test_goodput_falls_with_chips_and_rises_with_learners() -> None:
    for learners in (1, 8):
        assert of_fleet(100_000, learners) > of_fleet(400_000, learners) > of_fleet(1_600_000, learners)
    assert of_fleet(1_200_000, 1) < of_fleet(1_200_000, 4) < of_fleet(1_200_000, 16)


def cost(learners: Sequence[ChipsLearner], days: float) -> tuple[int, int]:
    """(lines of the simulators that the fast form runs, which is its cost whatever else the machine does; failures)"""
    count = 0

    def count_line(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal count
        count += event == "line"
        return count_line if "forecast" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(count_line)
    try:
        timelines = jumped(learners, days, 0)
    finally:
        sys.settrace(before)
    return count, sum(timeline.failures for timeline in timelines)


def test_the_cost_grows_with_failures_and_not_with_chips_or_days() -> None:
    rare = replace(PUBLISHED, mtbi_s=PUBLISHED.mtbi_s * 100)
    lines, failures = cost(equal_learners(400_000, 4, PUBLISHED), 1.0)
    assert failures > 900
    for chips, days, constants, times in (
        (40_000_000, 1.0, rare, 1),
        (400_000, 100.0, rare, 1),
        (400_000, 4.0, PUBLISHED, 4),
    ):
        longer, more = cost(equal_learners(chips, 4, constants), days)
        assert lines and more == pytest.approx(times * failures, rel=0.15)
        assert longer / more == pytest.approx(lines / failures, rel=0.1)


def lonely(learners: int) -> list[ChipsLearner]:
    """As the islands of a plan: one slice each, an hour from failure to failure, 20 minutes away."""
    constants = replace(PUBLISHED, mtbi_s=3600.0, slice_chips=1, down_s=0.0, repair=PUBLISHED.repair.with_mean(1200.0))
    return list(equal_learners(learners, learners, constants))


def test_a_data_parallel_fleet_of_two_islands_is_up_while_one_of_them_is() -> None:
    """Each is there three quarters of the time."""
    elastic = list(all_methods(lonely(2), 2, PUBLISHED, 100.0, (0,)))[1]
    assert elastic.method == "data_parallel_elastic"
    assert elastic.uptime_percent == pytest.approx(100 * (1 - 0.25**2), abs=2.0)
    assert elastic.goodput_percent == pytest.approx(75.0, abs=3.0)


def test_what_would_take_all_memory_is_refused_with_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, failing = equal_learners(1_200_000, 8, PUBLISHED), 10 * 1_200_000 / 365  # of ten days
    monkeypatch.setattr(goodput, "MAX_FAILURES", ceil(failing / 2))
    with pytest.raises(UsageError) as refused:
        check_work(fleet, 10.0)
    assert refused.value.hint == "--days 5.00"
    with pytest.raises(UsageError, match="failures"):
        list(all_methods(fleet, 1_200_000, PUBLISHED, 10.0, (0,)))
    monkeypatch.setattr(goodput, "MAX_FAILURES", round(2 * failing))
    check_work(fleet, 10.0)


def test_the_spread_of_one_seed_is_unknown() -> None:
    fleet = equal_learners(100_000, 4, PUBLISHED)
    one, two = (list(all_methods(fleet, 100_000, PUBLISHED, 0.5, s))[2] for s in ((0,), (0, 1)))
    assert one.goodput_sd is None and two.goodput_sd is not None and two.goodput_sd > 0


def test_a_plan_without_elasticity_waits_for_the_slowest_repair() -> None:
    rigid = fleet_of("data_parallel_no_elasticity", equal_learners(1_200_000, 8, PUBLISHED), Constants())
    assert len(rigid) == 1 and not rigid[0].elastic
