"""Failures in closed form."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from diloco_cli.config.settings import Accelerators, IslandSettings
from diloco_cli.plan.goodput import availability, probability_at_least

AVAILABILITIES = (0.97, 0.90, 0.95, 0.98)


def test_the_worked_availabilities_give_the_worked_probabilities():
    assert probability_at_least(4, AVAILABILITIES) == pytest.approx(0.813, abs=5e-4)
    assert probability_at_least(3, AVAILABILITIES) == pytest.approx(0.988, abs=5e-4)


@pytest.mark.parametrize("quorum", [1, 2, 3, 4, 5])
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
