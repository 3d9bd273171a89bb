"""Whoever is left goes on: absent peers, late zombies, refused offers, stops that nobody carried out."""

from __future__ import annotations

import pytest

from tests.histories.integers import NOT_FINITE
from tests.simulation.operated import state_of
from tests.simulation.toy import STEP_S, LearnerProfile, ToyFleet, make_run

MIXINGS = pytest.mark.parametrize("mixing", ["replace", "rebase"])


def test_outcomes_do_not_wait_for_a_quorum_that_does_not_come() -> None:
    fleet = ToyFleet(make_run(learners=2, fragments=2, merges=20, quorum=2, skip_after_s=1000.0))
    fleet.profile["l0"] = LearnerProfile(STEP_S, poison=lambda: NOT_FINITE)
    fleet.syncer()
    fleet.learner("l0")
    fleet.world.run_for(10.0)
    outcomes = [outcome["reason"] for record in fleet.records() for outcome in record["outcomes"]]
    assert "non_finite" in outcomes


def test_what_a_syncer_holds_in_memory_does_not_grow_with_skipped_rounds() -> None:
    fleet = ToyFleet(make_run(learners=2, fragments=2, merges=50, quorum=2, skip_after_s=0.5))
    fleet.syncer()
    fleet.learner("l0")
    fleet.world.run_for(60.0)
    assert state_of(fleet).metrics.skips > 20
    assert len(fleet.published.offers) < 4 * 60, "offers are bounded while nobody merges"
