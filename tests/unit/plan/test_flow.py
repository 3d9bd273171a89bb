"""What links and exchanges cost: against the published bandwidths, and by hand."""

from __future__ import annotations

import pytest

from diloco_cli.config.settings import SyncSettings
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.flow import busy_share, kept_in_flight, run_fleet
from diloco_cli.plan.link import FragmentSizes, fragments_of
from diloco_cli.plan.model_facts import ModelFacts
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


def test_the_mean_fragment_is_that_of_a_parameter_chosen_at_random() -> None:
    model = ModelFacts(parameters=1000, layers=2, width=1, sequence=1, embedding_parameters=400, num_tensors=9)
    four = fragments_of(SyncSettings(fragments=4), model)
    assert (four.count, four.largest) == (4, 400)
    assert four.mean == pytest.approx((400 * 400 + 3 * 200 * 200) / 1000)
    plain = ModelFacts(parameters=1000, layers=2, width=1, sequence=1, embedding_parameters=0, num_tensors=9)
    assert fragments_of(SyncSettings(fragments=4), plain) == FragmentSizes(4, 250.0, 250.0)
    assert fragments_of(SyncSettings(fragments=1), model) == FragmentSizes(1, 1000.0, 1000.0)


def test_there_are_no_more_fragments_than_pieces_and_split_rows_cuts_the_embedding_too() -> None:
    model = ModelFacts(parameters=1000, layers=2, width=1, sequence=1, embedding_parameters=400, num_tensors=9)
    assert fragments_of(SyncSettings(fragments=24), model).count == 9
    assert fragments_of(SyncSettings(fragments=24, layout="layers"), model).count == 3
    assert fragments_of(SyncSettings(fragments=20, split_rows=True), model) == FragmentSizes(20, 50.0, 50.0)
