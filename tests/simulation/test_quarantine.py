"""Learners whose offers are bad again and again are kept out until somebody lets them in."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.log.health import QUARANTINE_AFTER
from diloco_cli.protocol.log.records import RunFormat
from tests.faulty_world import FaultyWorld
from tests.simulation.operated import answered, note_texts, run_that_keeps, state_of, where_the_command_dies
from tests.simulation.sweeps import finished
from tests.simulation.toy import ToyFleet

RUN = run_that_keeps(merges=40, learners=3)
BAD = "l2"


def with_a_bad_one(world: FaultyWorld | None = None, run: RunFormat = RUN) -> tuple[ToyFleet, list[bool]]:
    """A fleet in which one learner's payloads are other bytes than its offers name, for as long as the list says."""
    fleet, bad = ToyFleet(run, world), [True]
    fleet._profile(BAD).corrupts = lambda: bad[0]
    return fleet.start(), bad


def quarantined(world: FaultyWorld | None = None) -> tuple[ToyFleet, list[bool]]:
    fleet, bad = with_a_bad_one(world)
    assert fleet.world.run(lambda: "quarantine" in fleet.kinds(), 60)
    return fleet, bad


def test_it_comes_after_so_many_bad_offers_and_the_run_goes_on_without_it() -> None:
    fleet, _ = with_a_bad_one()
    found = finished(fleet)
    bad = [outcome for (learner, _, _), outcome in sorted(found.settled.items()) if learner == BAD]
    assert bad[:QUARANTINE_AFTER] == ["digest_mismatch"] * QUARANTINE_AFTER and found.kinds[-1] == "finish"
    assert found.kinds.count("quarantine") == 1 and "applied" not in bad
    assert set(bad[QUARANTINE_AFTER:]) <= {"digest_mismatch", "quarantined", "superseded", "run_over"}
    assert state_of(fleet).learner(BAD).quarantined == found.kinds.index("quarantine")


def test_it_is_neither_counted_as_alive_nor_waited_for() -> None:
    fleet, _ = quarantined()
    at = fleet.num_commits()
    fleet.finish()
    merges = [commit for commit in fleet.records()[at + 2 :] if commit["kind"] == "merge"]
    assert merges and {commit["alive"] for commit in merges} == {2}


def test_readmitted_it_takes_part_again() -> None:
    fleet, bad = quarantined()
    bad[0] = False
    state = answered(fleet, "readmit", learner=BAD)
    assert state.learner(BAD).quarantined is None and state.learner(BAD).bad_in_a_row == 0
    assert "readmitted: wanted" in note_texts(state)
    found = finished(fleet)
    assert "applied" in {outcome for (learner, _, _), outcome in found.settled.items() if learner == BAD}


def test_an_operator_keeps_a_learner_out_and_lets_it_in_again() -> None:
    fleet = ToyFleet(RUN).start()
    assert fleet.world.run(lambda: fleet.kinds().count("merge") > 4, 60)
    state = answered(fleet, "quarantine", learner=BAD)
    assert state.learner(BAD).quarantined is not None and "quarantined: wanted" in note_texts(state)
    fleet.world.run_for(1.0)
    state = answered(fleet, "readmit", learner=BAD)
    found = finished(fleet)
    back = found.kinds.index("readmit")
    merges = [commit for commit in fleet.records() if commit["kind"] == "merge"]
    assert any(item["learner"] == BAD for one in merges if one["n"] > back for item in one["inputs"])


@pytest.mark.parametrize("name", [BAD, "nobody", None])
def test_a_quarantine_that_cannot_be_is_refused_in_the_log(name: str | None) -> None:
    fleet, _ = quarantined()
    state = answered(fleet, "quarantine", learner=name)
    assert any(f"{name or ''!a} is" in text for text in note_texts(state))


def mended(world: FaultyWorld) -> ToyFleet:
    fleet, bad = quarantined(world)
    bad[0] = False
    return fleet


def test_with_no_syncer_alive_the_command_readmits_it_and_may_die_at_every_operation() -> None:
    fleets = list(where_the_command_dies(mended, 5, "readmit", BAD))
    for fleet in fleets:
        assert finished(fleet).kinds.count("readmit") == 1 and state_of(fleet).learner(BAD).quarantined is None
    assert len(fleets) > 3
