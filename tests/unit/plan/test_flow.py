"""What links, exchanges and failures cost: against the published bandwidths, and by hand."""

from __future__ import annotations

import math
from itertools import product
from math import prod

import pytest

from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.settings import IslandSettings
from diloco_cli.plan import flow
from diloco_cli.plan.candidates import availability_of, candidates
from diloco_cli.plan.flow import busy_share, kept_in_flight, probability_at_least, run_fleet, waiting
from tests.unit.plan.fleets import IOWA, MODEL, OLD, SPOT, fleet, with_sync

UTILISATIONS = (50, 75, 90, 95, 99)
# Gbit/s needed by decoupled learners for these utilisations: arXiv 2604.21428, table 13, 5B parameters.
PUBLISHED = {
    (2, 1.0, 16): (0.58, 1.2, 1.7, 1.9, 2.2),
    (2, 1.0, 4): (0.15, 0.29, 0.43, 0.49, 0.53),
    (2, 5.0, 16): (0.12, 0.23, 0.34, 0.39, 0.43),
    (2, 5.0, 4): (0.03, 0.06, 0.08, 0.10, 0.11),
    (8, 1.0, 16): (1.0, 2.0, 3.0, 3.3, 3.8),
    (8, 1.0, 4): (0.26, 0.51, 0.75, 0.84, 0.94),
    (8, 5.0, 16): (0.21, 0.40, 0.59, 0.68, 0.75),
    (8, 5.0, 4): (0.05, 0.10, 0.15, 0.17, 0.19),
}
GRID_STEP = 0.21  # of the published search over bandwidths
EVERY, FRAGMENTS, TAU = 100, 18, 2  # the setting that reproduces the table; H = P = 24 would need more


@pytest.mark.parametrize("cell", PUBLISHED)
def test_the_published_bandwidths_are_needed_for_the_published_utilisations(cell: tuple[int, float, int]) -> None:
    """The least bandwidth at which the planner's formula gives a utilisation, by bisection."""
    sites, step_s, bits = cell
    ring = 2 * (sites - 1) / sites
    for percent, published in zip(UTILISATIONS, PUBLISHED[cell], strict=True):

        def utilisation(gbps: float) -> float:
            exchange_s = ring * 5e9 / FRAGMENTS * bits / (gbps * 1e9)
            return busy_share(EVERY / FRAGMENTS * step_s, TAU * step_s, exchange_s)

        low, high = 1e-3, 1e3
        for _ in range(60):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if 100 * utilisation(middle) >= percent else (middle, high)
        assert high == pytest.approx(published, rel=GRID_STEP)


def test_an_exchange_inside_the_overlap_costs_nothing_and_beyond_it_what_is_left() -> None:
    assert busy_share(2.0, 6.0, 5.9) == 1.0
    assert busy_share(2.0, 6.0, 8.0) == 0.5


def test_replacement_gives_up_what_was_learned_in_flight_and_rebasing_keeps_it() -> None:
    everyone = candidates(with_sync(), fleet(IOWA, SPOT, OLD), MODEL)
    replaced = run_fleet(everyone, with_sync(mixing="replace").sync, MODEL)
    rebased = run_fleet(everyone, with_sync(mixing="rebase").sync, MODEL)
    for gone, kept in zip(replaced.flows, rebased.flows, strict=True):
        share = gone.in_flight_s / replaced.schedule.round_s
        assert gone.after_link == pytest.approx(kept.after_link * (1 - share))
        assert kept.after_link == pytest.approx(kept.after_idle)
    assert kept_in_flight(0.1) == 0.9
    assert kept_in_flight(0.75) == pytest.approx(0.25)


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
    assert availability_of(island) == 0.9
    assert availability_of(IslandSettings("a", "here", Accelerators("cpu"))) == 1.0


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
    monkeypatch.setattr(flow, "MAX_TERMS", 0)
    quick = waiting(70, availabilities, rates, 1000.0)
    assert 0.01 < exact.still < 0.99 and len(set(quick.moving)) == 1 < len(set(exact.moving))
    assert quick.still == pytest.approx(exact.still, abs=0.01)
    assert quick.moving == pytest.approx(exact.moving, abs=0.03)
