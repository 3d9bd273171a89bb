"""Whoever is left goes on: absent peers, late zombies, refused offers, stops that nobody carried out."""

from __future__ import annotations

from collections import Counter

import pytest

from diloco_cli.protocol.actors.requests import withdraw_stop
from tests.histories.integers import NOT_FINITE
from tests.simulation.operated import asked, done, started, state_of
from tests.simulation.sweeps import check
from tests.simulation.test_requests import RUN
from tests.simulation.toy import STEP_S, LearnerProfile, ToyFleet, make_run

MIXINGS = pytest.mark.parametrize("mixing", ["replace", "rebase"])


@MIXINGS
def test_every_fragment_merges_again_when_an_absent_peer_comes_back(mixing: str) -> None:
    fleet = ToyFleet(make_run(learners=2, fragments=4, merges=200, quorum=2, mixing=mixing))
    fleet.syncer()
    fleet.learner("l0")
    fleet.world.run_for(60.0)
    before = len(fleet.records())
    fleet.learner("l1")
    fleet.world.run_for(20.0)
    merged = Counter(record["slot"] % 4 for record in fleet.records()[before:] if record["kind"] == "merge")
    assert len(merged) == 4 and min(merged.values()) >= 5, merged
    check(fleet)


@MIXINGS
@pytest.mark.parametrize("ahead_s", [0.05, 0.1, 0.2, 0.3, 0.5, 0.8])
def test_a_lone_learner_goes_on_whenever_its_zombie_was_merged(mixing: str, ahead_s: float) -> None:
    fleet = ToyFleet(make_run(learners=1, fragments=1, merges=8, mixing=mixing)).start()
    fleet.until_commits(4)
    (zombie,), (syncer,) = fleet.living("l0"), fleet.living("syncer")
    fleet.pause(zombie)
    successor = fleet.learner("l0")
    fleet.world.run(lambda: "weights/" in str(successor.pending), 10)
    fleet.pause(successor)  # it has read where its data begins when the zombie offers once more
    fleet.resume(zombie)
    published = len(fleet.published.offers)
    fleet.world.run(lambda: len(fleet.published.offers) > published, 10)
    fleet.pause(zombie)
    syncer.paused = True
    fleet.resume(successor)
    fleet.world.run_for(ahead_s)
    fleet.world.kill(zombie)
    fleet.world.resume(syncer)
    assert fleet.world.run(fleet.ended, 60)
    check(fleet)


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


def test_a_stop_that_nobody_carried_out_does_not_stop_the_resumed_run() -> None:
    fleet = started(RUN, 3)
    fleet.restart = False
    fleet.kill_all()
    asked(fleet, "stop")
    assert state_of(fleet).phase == "RUNNING"
    withdrawal = withdraw_stop(fleet.run, state_of(fleet), fleet.nonce(), "then")
    assert done(fleet, fleet.world.start("operator", withdrawal)).result is True
    fleet.restart = True
    fleet.start().finish()
    assert state_of(fleet).phase == "FINISHED"
    assert state_of(fleet).tokens(RUN.layout) >= RUN.settings.train.tokens
