"""The published table, the three forms of the simulation, the closed form: they must agree."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev

import pytest

from diloco_cli.simulate.chips import DAY_MS, Constants, equal_learners
from diloco_cli.simulate.goodput import Form, Row, all_methods, closed_form, fleet_of, published_grid, run_fleet
from diloco_cli.simulate.published import PUBLISHED
from diloco_cli.simulate.slots import MergeRules, SlotMemory, merge_all
from diloco_cli.simulate.timeline import fleet_goodput, fleet_uptime

POINTS = 5.0  # how far a cell may be from the published one
CLOSED_POINTS = 1.5


def apart(rows: list[Row]) -> dict[tuple[str, int, int], float]:
    return {
        (row.method, row.learners, row.chips): max(
            abs(row.goodput_percent - (row.published_goodput_percent or 0)),
            abs(row.uptime_percent - (row.published_uptime_percent or 0)),
        )
        for row in rows
    }


def test_every_published_cell_is_within_five_points_with_one_set_of_constants() -> None:
    found = apart(list(published_grid(PUBLISHED, 3.0, (0, 1, 2), "fast")))
    assert len(found) == 30
    assert {cell: points for cell, points in found.items() if points > POINTS} == {}


@pytest.mark.long
def test_every_published_cell_is_within_five_points_step_by_step() -> None:
    found = apart(list(published_grid(PUBLISHED, 2.0, (0, 1, 2), "stepwise")))
    assert {cell: points for cell, points in found.items() if points > POINTS} == {}


def shares(form: Form, chips: int, learners: int, days: float, seeds: int) -> tuple[list[float], list[float]]:
    fleets = [
        run_fleet(equal_learners(chips, learners, PUBLISHED), round(days * DAY_MS), form, (seed, chips))
        for seed in range(seeds)
    ]
    return [fleet_goodput(fleet) for fleet in fleets], [fleet_uptime(fleet) for fleet in fleets]


@pytest.mark.parametrize(("chips", "learners"), [(1_200_000, 8), (2_400_000, 2), (20_000, 2)])
def test_the_fast_form_agrees_with_every_step_within_three_standard_errors(chips: int, learners: int) -> None:
    fast, stepwise = (shares(form, chips, learners, days=0.5, seeds=20) for form in ("fast", "stepwise"))
    for mine, theirs in zip(fast, stepwise, strict=True):
        error = (stdev(mine) ** 2 / len(mine) + stdev(theirs) ** 2 / len(theirs)) ** 0.5
        assert abs(fmean(mine) - fmean(theirs)) <= 3 * error + 1e-9


@pytest.mark.parametrize(("quorum", "at_most"), [(1, 0.1), (2, 1.0)])  # with K > 1 the averages hardly ever repeat
def test_remembered_decisions_change_nothing(quorum: int, at_most: float) -> None:
    timelines = run_fleet(equal_learners(2_400_000, 4, PUBLISHED), DAY_MS // 2, "stepwise", (3,))
    anew = merge_all(timelines, MergeRules(quorum=quorum), SlotMemory(remember=False))
    remembered = merge_all(timelines, MergeRules(quorum=quorum), SlotMemory())
    assert anew.at_ms == remembered.at_ms and anew.present == remembered.present
    assert (anew.skips, anew.shares) == (remembered.skips, remembered.shares)
    assert anew.decided == len(anew.at_ms) + anew.skips > 1000
    assert remembered.decided <= at_most * anew.decided


def test_without_failures_everything_is_good() -> None:
    never = replace(PUBLISHED, mtbi_s=1e30)
    for form in ("fast", "stepwise"):
        rows = list(
            all_methods(equal_learners(100_000, 4, never), 100_000, never, 0.5, (0,), form, MergeRules())  # type: ignore[arg-type]
        )
        assert [row.goodput_percent for row in rows] == [100.0] * 3
        assert [row.closed_form_goodput_percent for row in rows] == [pytest.approx(100.0)] * 3


def test_the_closed_form_is_within_a_point_and_a_half_of_the_simulation() -> None:
    for row in published_grid(PUBLISHED, 3.0, (0, 1), "fast"):
        assert row.closed_form_goodput_percent == pytest.approx(row.goodput_percent, abs=CLOSED_POINTS)
        assert row.closed_form_uptime_percent == pytest.approx(row.uptime_percent, abs=CLOSED_POINTS)


def of_fleet(chips: int, learners: int) -> tuple[float, float]:
    """(simulated, closed form)."""
    fleet = equal_learners(chips, learners, PUBLISHED)
    return fleet_goodput(run_fleet(fleet, DAY_MS, "fast", (0, chips))), closed_form(fleet)[0]


def test_goodput_falls_with_chips_and_rises_with_learners() -> None:
    for learners in (1, 8):
        for values in zip(*(of_fleet(chips, learners) for chips in (100_000, 400_000, 1_600_000)), strict=True):
            assert values[0] > values[1] > values[2]
    for values in zip(*(of_fleet(1_200_000, learners) for learners in (1, 4, 16)), strict=True):
        assert values[0] < values[1] < values[2]


def test_goodput_depends_on_chips_per_learner() -> None:
    small, large = of_fleet(300_000, 2), of_fleet(1_200_000, 8)
    assert small[0] == pytest.approx(large[0], abs=0.01)
    assert small[1] == pytest.approx(large[1])


def test_a_straggler_slows_data_parallel_down_and_only_itself_when_decoupled() -> None:
    learners = equal_learners(10_000, 4, PUBLISHED, slowdowns=(10.0,))
    rows = list(all_methods(learners, 10_000, PUBLISHED, 1.0, (0,), "stepwise", MergeRules()))
    assert rows[1].goodput_percent == pytest.approx(10.0, abs=1.0)  # a tenth
    assert rows[2].goodput_percent == pytest.approx(100 * (3 + 0.1) / 4, abs=2.0)


def test_the_cost_grows_with_failures_and_not_with_chips() -> None:
    """Ten times the chips, each failing a tenth as often: as many stretches to go through."""
    few = run_fleet(equal_learners(100_000, 4, PUBLISHED), DAY_MS, "fast", (0,))
    rare = replace(PUBLISHED, mtbi_s=PUBLISHED.mtbi_s * 100, slice_chips=PUBLISHED.slice_chips * 100)
    many = run_fleet(equal_learners(10_000_000, 4, rare), DAY_MS, "fast", (0,))
    assert sum(len(t.steps) for t in many) == pytest.approx(sum(len(t.steps) for t in few), rel=0.05)


def test_a_plan_without_elasticity_waits_for_the_slowest_repair() -> None:
    rigid = fleet_of("data_parallel_no_elasticity", equal_learners(1_200_000, 8, PUBLISHED), Constants())
    assert len(rigid) == 1 and not rigid[0].elastic
