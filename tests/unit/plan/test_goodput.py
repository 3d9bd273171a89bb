"""Failures in closed form."""

from __future__ import annotations

import math
from itertools import product
from math import prod

import pytest

from diloco_cli.config.settings import Accelerators, IslandSettings
from diloco_cli.plan import goodput
from diloco_cli.plan.goodput import availability, probability_at_least, waiting

AVAILABILITIES = (0.97, 0.90, 0.95, 0.98)


@pytest.mark.parametrize("quorum", [0, 1, 2, 3, 4, 5])
def test_probabilities_equal_an_enumeration_of_all_outcomes(quorum):
    expected = sum(
        prod(p if here else 1 - p for p, here in zip(AVAILABILITIES, outcome, strict=True))
        for outcome in product((0, 1), repeat=4)
        if sum(outcome) >= quorum
    )
    assert probability_at_least(quorum, AVAILABILITIES) == pytest.approx(expected, abs=1e-12)


def test_availability_is_mtbf_over_mtbf_and_restart():
    island = IslandSettings("a", "here", Accelerators("cpu"), mtbf_s=900.0, restart_s=100.0)
    assert availability(island) == 0.9
    assert availability(IslandSettings("a", "here", Accelerators("cpu"))) == 1.0


def test_who_waits_for_merges_works_while_enough_of_the_others_are_there():
    """Of three islands that are there for 75 % of the time, one has at least one of the others beside it for 15/16."""
    assert waiting(2, [0.75] * 3, [1e-3] * 3, drift_s=0.0).moving == pytest.approx([15 / 16] * 3)
    assert waiting(3, [0.75] * 3, [1e-3] * 3, drift_s=0.0).moving == pytest.approx([9 / 16] * 3)
    assert waiting(2, [0.5, 1.0, 1.0], [1e-3, 0.0, 0.0], drift_s=0.0).moving == (1.0, 1.0, 1.0)
    assert waiting(1, [0.75] * 3, [1e-3] * 3, drift_s=0.0).moving == (1.0, 1.0, 1.0)


def test_who_steps_on_up_to_a_drift_bound_loses_only_the_long_absences():
    """Two islands, an hour up, 20 minutes away: the quorum of both is lost 2 x 0.75^2 times an hour and missing
    for 7/16 of the time, so for 7/16 / (2 x 9/16) h = 1400 s on average."""
    short, mean = (waiting(2, [0.75] * 2, [1 / 3600] * 2, drift_s) for drift_s in (0.0, 1400.0))
    assert short.still == 1 and short.moving == pytest.approx([0.75] * 2)
    assert mean.still == pytest.approx(math.exp(-1))
    assert mean.moving == pytest.approx([1 - 0.25 * math.exp(-1)] * 2)
    assert waiting(2, [0.75] * 2, [1 / 3600] * 2, math.inf).moving == (1.0, 1.0)


def test_for_many_islands_who_exactly_is_left_out_makes_no_difference(monkeypatch):
    availabilities, rates = [0.5 + 0.004 * i for i in range(100)], [1e-4] * 100
    exact = waiting(70, availabilities, rates, 1000.0)
    monkeypatch.setattr(goodput, "MAX_TERMS", 0)
    quick = waiting(70, availabilities, rates, 1000.0)
    assert 0.01 < exact.still < 0.99 and len(set(quick.moving)) == 1 < len(set(exact.moving))
    assert quick.still == pytest.approx(exact.still, abs=0.01)
    assert quick.moving == pytest.approx(exact.moving, abs=0.03)
