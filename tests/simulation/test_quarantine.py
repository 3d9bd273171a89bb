"""Learners whose offers are bad again and again are kept out until somebody lets them in."""

from __future__ import annotations

import json

import pytest

from diloco_cli.protocol.actors.requests import ask
from diloco_cli.protocol.log.state import faults_for_quarantine
from diloco_cli.virtual.world import Fault, World
from tests.simulation.operated import (
    answered,
    done,
    kill_syncer,
    note_texts,
    num_commits,
    run_that_keeps,
    stand_in,
    state_of,
)  # fmt: skip
from tests.simulation.sweeps import check
from tests.simulation.toy import Fleet

RUN = run_that_keeps(merges=40, learners=3)
BAD = "l2"
AFTER_FAULTS = faults_for_quarantine(2)


def with_a_bad_one(world: World | None = None) -> tuple[Fleet, list[bool]]:
    """A fleet in which one learner's payloads are other bytes than its offers name, for as long as the list says."""
    fleet, bad = Fleet(RUN, world), [True]
    fleet._profile(BAD).corrupts = lambda: bad[0]
    return fleet.start(), bad


def quarantined(world: World | None = None) -> tuple[Fleet, list[bool]]:
    fleet, bad = with_a_bad_one(world)
    assert fleet.world.run(lambda: "quarantine" in kinds(fleet), 60)
    return fleet, bad


def log(fleet: Fleet) -> list[dict[str, object]]:
    return [json.loads(fleet.world.store.get(f"commit/{n:012d}.json") or b"") for n in range(num_commits(fleet))]


def kinds(fleet: Fleet) -> list[str]:
    return [str(commit["kind"]) for commit in log(fleet)]


def test_it_comes_after_so_many_faults_and_the_run_goes_on_without_it() -> None:
    fleet, _ = with_a_bad_one()
    fleet.finish()
    found = check(fleet)
    bad = [outcome for (learner, _, _), outcome in sorted(found.settled.items()) if learner == BAD]
    assert bad[:AFTER_FAULTS] == ["digest_mismatch"] * AFTER_FAULTS and found.kinds[-1] == "finish"
    assert found.kinds.count("quarantine") == 1 and "applied" not in bad
    assert set(bad[AFTER_FAULTS:]) <= {"digest_mismatch", "quarantined", "superseded", "run_over"}
    assert state_of(fleet).learner(BAD).quarantined == found.kinds.index("quarantine")


def test_it_is_neither_counted_as_alive_nor_waited_for() -> None:
    fleet, _ = quarantined()
    at = num_commits(fleet)
    fleet.finish()
    merges = [commit for commit in log(fleet)[at + 2 :] if commit["kind"] == "merge"]
    assert merges and {commit["alive"] for commit in merges} == {2}


def test_it_stops_stepping_says_so_and_does_not_spin() -> None:
    fleet, _ = quarantined()
    (actor,) = fleet.living(BAD)
    fleet.world.run_for(0.5)  # it hears of it
    before, offers = actor.operations, len(fleet.world.store.list(f"offer/{BAD}/"))
    fleet.world.run_for(1.0)
    if not actor.ended:
        assert len(fleet.world.store.list(f"offer/{BAD}/")) == offers
        assert actor.operations - before < 200, "one look at the log a step's time, and what that brings"


def test_a_new_process_of_the_learner_is_kept_out_too() -> None:
    fleet, _ = quarantined()
    for actor in fleet.living(BAD):
        fleet.world.kill(actor)
    fleet.finish()
    applied = {learner for (learner, _, _), outcome in check(fleet).settled.items() if outcome == "applied"}
    assert applied == {"l0", "l1"} and len(fleet.world.store.list(f"incarnation/{BAD}/")) == 2


def test_readmitted_it_takes_part_again() -> None:
    fleet, bad = quarantined()
    bad[0] = False
    state = answered(fleet, "readmit", learner=BAD)
    assert state.learner(BAD).quarantined is None and state.learner(BAD).faults == 0
    assert "let in again: wanted" in note_texts(state)
    fleet.finish()
    found = check(fleet)
    assert "applied" in {outcome for (learner, _, _), outcome in found.settled.items() if learner == BAD}


def test_readmitted_while_it_is_still_bad_it_is_kept_out_again_after_as_many_faults() -> None:
    fleet, _ = quarantined()
    answered(fleet, "readmit", learner=BAD)
    fleet.finish()
    found = check(fleet)
    assert found.kinds.count("quarantine") == 2
    bad = [outcome for (learner, _, _), outcome in found.settled.items() if learner == BAD]
    assert bad.count("digest_mismatch") >= 2 * AFTER_FAULTS


@pytest.mark.parametrize("name", ["l0", "nobody", None])
def test_readmitting_what_is_not_quarantined_is_refused_in_the_log(name: str | None) -> None:
    fleet, _ = quarantined()
    state = answered(fleet, "readmit", learner=name)
    assert f"{name or ''!a} is not quarantined" in note_texts(state)


def test_with_no_syncer_alive_the_command_readmits_it_and_may_die_at_every_operation() -> None:
    total, point = 99, -1
    while point < total:
        faults = {} if point < 0 else {("command", point): Fault.CRASH}
        fleet, bad = quarantined(World(faults=faults))  # type: ignore[arg-type]
        fleet.restart = False
        kill_syncer(fleet)
        bad[0] = False
        asked = ask(state_of(fleet), "readmit", fleet.nonce(), "then", learner=BAD)
        done(fleet, fleet.world.start("operator", asked))
        command = fleet.world.start("command", stand_in(fleet))
        assert fleet.world.run(lambda c=command: c.ended, 30)  # type: ignore[misc]
        total = command.operations if point < 0 else total
        fleet.restart = True
        fleet.syncer()
        fleet.finish()
        assert check(fleet).kinds.count("readmit") == 1 and state_of(fleet).learner(BAD).quarantined is None
        point += 1 if point < 0 else 5
    assert total > 10


def test_nobody_is_quarantined_where_too_few_would_be_left_for_the_quorum() -> None:
    run = run_that_keeps(merges=30, learners=3, quorum=3)
    fleet, bad = Fleet(run), [True]
    fleet._profile(BAD).corrupts = lambda: bad[0]
    fleet.start()
    fleet.world.run(lambda: state_of(fleet).learner(BAD).faults > AFTER_FAULTS, 60)
    assert state_of(fleet).learner(BAD).faults > AFTER_FAULTS and "quarantine" not in kinds(fleet)
    bad[0] = False
    fleet.finish(120)
    assert check(fleet).kinds[-1] == "finish"


def test_a_quarantine_outlives_the_syncer() -> None:
    fleet, _ = quarantined()
    kill_syncer(fleet)
    fleet.finish()
    assert check(fleet).kinds.count("quarantine") == 1
