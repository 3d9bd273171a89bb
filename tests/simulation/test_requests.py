"""Operators' requests: carried out once, by whoever serves the log."""

from __future__ import annotations

import pytest

from diloco_cli.errors import FencedError
from diloco_cli.protocol.actors.requests import withdraw_stop
from diloco_cli.protocol.actors.syncer import DisplacedError
from diloco_cli.virtual.world import Actor
from tests.faulty_world import Fault, FaultyWorld
from tests.simulation.operated import asked, command, done, resumed, stand_in, started, state_of
from tests.simulation.sweeps import check
from tests.simulation.toy import ToyFleet, make_run

RUN = make_run(merges=8)


def stop_alone(fleet: ToyFleet) -> Actor:
    """As `diloco stop` does after the syncer did not answer it."""
    asked(fleet, "stop")
    return fleet.world.start("stopper", stand_in(fleet))


def test_asking_twice_stops_once_and_a_stopped_run_is_resumed_to_its_end() -> None:
    fleet = started(RUN, 3)
    assert [asked(fleet, "stop").result for _ in range(2)] == [0, 1]
    fleet.finish()
    assert resumed(fleet)
    fleet.start().finish()
    kinds = check(fleet).kinds
    assert kinds[-1] == "finish" and kinds.count("stop") == 1 and state_of(fleet).phase == "FINISHED"


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"number":0,"kind":"launch","nonce":"","time":""}'])
def test_a_malformed_request_is_refused_in_the_log_and_the_next_one_carried_out(raw: bytes) -> None:
    fleet = ToyFleet(RUN)
    fleet.world.store.create("request/0000000000.json", raw)
    fleet.start()
    fleet.until_commits(3)
    assert asked(fleet, "stop").result == 1
    fleet.finish()
    assert {"refuse", "stop"} <= set(check(fleet).kinds)


def test_with_no_syncer_alive_the_command_stops_the_run_itself() -> None:
    fleet = started(RUN, 3)
    fleet.restart = False
    fleet.kill("syncer")
    stopper = stop_alone(fleet)
    fleet.finish()
    assert stopper.result.phase == "STOPPED" and check(fleet).kinds[-2:] == ["epoch_start", "stop"]


def test_a_stop_that_races_a_living_syncer_fences_it_whatever_the_moment() -> None:
    for point in range(44, 144, 7):  # once the learners have joined
        fleet = ToyFleet(RUN, FaultyWorld(faults={("syncer", point): Fault.PAUSE})).start()
        (syncer,) = fleet.living("syncer")
        assert fleet.world.run(lambda s=syncer: s.paused, 30)  # type: ignore[misc]
        stopper = stop_alone(fleet)
        fleet.until_commits(fleet.num_commits() + 1)
        fleet.world.resume(syncer)
        fleet.finish()
        assert isinstance(syncer.error, FencedError), point
        assert stopper.result.phase == "STOPPED"
        assert check(fleet).kinds[-1] == "stop"


def test_a_syncer_that_a_command_took_for_dead_serves_again_when_it_wakes_whatever_the_moment() -> None:
    for point in range(30, 130, 7):
        fleet = ToyFleet(make_run(merges=20), FaultyWorld(faults={("syncer", point): Fault.PAUSE})).start()
        (syncer,) = fleet.living("syncer")
        assert fleet.world.run(lambda s=syncer: s.paused, 30)  # type: ignore[misc]
        asked(fleet, "gc")
        before = state_of(fleet)
        done(fleet, command(fleet))
        fleet.world.resume(syncer)
        fleet.finish()
        epochs = [record for record in fleet.records() if record["kind"] == "epoch_start"]
        if before.n >= 0:  # else there was nothing yet that a command could serve
            assert isinstance(syncer.error, DisplacedError) and syncer.error.exit_status == 75, point
            assert [record["serves"] for record in epochs] == [True, False, True]
        assert check(fleet).kinds[-1] == "finish"


def test_a_run_stopped_before_its_first_commit_can_be_resumed() -> None:
    fleet = ToyFleet(RUN)
    done(fleet, stop_alone(fleet))
    done(fleet, fleet.world.start("operator", withdraw_stop(fleet.run, state_of(fleet), fleet.nonce(), "then")))
    fleet.start()
    assert fleet.world.run(fleet.ended, 30)
    assert fleet.errors() == []
    assert check(fleet).kinds[-1] == "finish"
