"""A sample of the table of participation: a few short fleets, whose figures are the same on any machine."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.log.records import Mixing
from tests.benchmarks import participation
from tests.benchmarks.participation import LEAST, LEAST_OF_SLOW, MAX_LATE, MIXINGS, Marked, linked, play


@pytest.mark.parametrize("mixing", MIXINGS)
def test_learners_of_unequal_speed_take_part_in_nearly_every_merge(mixing: Mixing) -> None:
    found = play(participation.spread_pacings(4, 0.03), 12, mixing, steps=240)
    assert found.participation >= LEAST and found.merges >= LEAST and found.late <= MAX_LATE
    assert found.uptime == pytest.approx(1.0, abs=0.05), "nobody waits"
    if mixing == "rebase":
        assert found.merged >= LEAST


def test_what_a_slow_island_trains_is_merged() -> None:
    assert play((linked(2.0), linked(2.0), linked(12.0)), 4, "rebase", steps=240).merged_by[-1] >= LEAST_OF_SLOW


def test_learners_that_fail_are_up_for_less_than_the_whole_time() -> None:
    (row,) = list(participation.failure_rows(Marked(), ("rebase",), (4,), (2,), seeds=1, steps=240))[2:]
    uptime = float(row.split(" | ")[3])
    assert 0.3 < uptime < 0.97


def test_the_time_of_stretches_that_overlap_counts_once() -> None:
    assert participation.covered_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0)]) == 4.0


def test_a_figure_beyond_its_bound_is_marked_and_counted() -> None:
    marked = Marked()
    assert [marked.least(0.96), marked.least(0.94), marked.least(0.5, None)] == ["0.960", "**0.940**", "0.500"]
    assert [marked.late(0.01), marked.late(0.06)] == ["1.0 %", "**6.0 %**"]
    assert marked.misses == 2
