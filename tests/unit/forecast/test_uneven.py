"""Mixed hardware and scavenged capacity: within four points of what was published, where its assumptions are known."""

from __future__ import annotations

import pytest

from diloco_cli.forecast.uneven import MIXED, SPEEDS, goodput_of_quorum, mixed_rows, scavenged_rows, scavenged_time

POINTS = 4.0


def test_every_cell_that_can_be_compared_is_within_four_points() -> None:
    mixed = {(row.quorum, row.window): row.difference_points for row in mixed_rows()}
    assert [rule for rule, difference in mixed.items() if difference is None] == [(8, False)]
    scavenged = [row.difference_points for row in scavenged_rows() if row.method == "decoupled"]
    differences = [*(d for d in mixed.values() if d is not None), *scavenged]
    assert len(differences) == 7 and all(d is not None and abs(d) <= POINTS for d in differences)


def test_what_depends_on_an_unpublished_speed_is_not_compared_and_what_is_not_computed_says_so() -> None:
    (barrier,) = (rule for rule in MIXED if rule.quorum == 8)
    rows = [row for row in mixed_rows() if row.quorum == barrier.quorum]
    assert [row.speed for row in rows] == list(SPEEDS) and {row.difference_points for row in rows} == {None}
    goodputs = [row.goodput_percent for row in rows]
    assert goodputs == sorted(goodputs) and goodputs[0] < barrier.goodput < goodputs[-1]
    assert all(row.time_percent is None for row in scavenged_rows() if row.method == "data_parallel")


@pytest.mark.parametrize(("quorum", "goodput"), [(1, 1.0), (2, 1.0), (3, 0.75), (4, 0.5)])
def test_learners_that_are_faster_than_the_quorum_wait(quorum: int, goodput: float) -> None:
    assert goodput_of_quorum([0.5, 1.0, 1.0, 0.25], quorum) == pytest.approx(goodput)


def test_more_learners_shorten_only_the_half_that_they_are_there_for() -> None:
    assert scavenged_time(0.0) == 1.0 and scavenged_time(1.0) == 0.75 and scavenged_time(1e9) == pytest.approx(0.5)
