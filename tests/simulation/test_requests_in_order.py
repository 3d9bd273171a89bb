"""Requests of several operators that wait for one syncer: each gets its own answer, and a resume withdraws every stop
before it, whatever was asked between them."""

from __future__ import annotations

from diloco_cli.protocol.actors.requests import withdraw_stop
from diloco_cli.protocol.log.records import RequestKind
from tests.simulation import operated
from tests.simulation.operated import asked, command, done, started, state_of
from tests.simulation.sweeps import finished
from tests.simulation.toy import ToyFleet, make_run

RUN = make_run(merges=30)


def unserved(*kinds: RequestKind) -> ToyFleet:
    """A run whose syncer died, and what operators asked for since."""
    fleet = started(RUN, 8)
    fleet.restart = False
    fleet.kill("syncer")
    for kind in kinds:
        asked(fleet, kind, learner="l0", to=3)
    return fleet


def answers(fleet: ToyFleet) -> list[tuple[int, str]]:
    """(number of the request, kind of the commit that names it), in the order of the log."""
    return [(one["request"], one["kind"]) for one in fleet.records() if one.get("request") is not None]


def resumed(fleet: ToyFleet) -> ToyFleet:
    steps = withdraw_stop(RUN, state_of(fleet), fleet.nonce(), "then")
    assert done(fleet, fleet.world.start("operator", steps)).result is True
    fleet.restart = True
    fleet.syncer()
    finished(fleet)
    return fleet


def test_a_resume_withdraws_a_stop_with_other_requests_between_them() -> None:
    fleet = resumed(unserved("stop", "readmit"))
    assert answers(fleet) == [(0, "refuse"), (1, "refuse"), (2, "refuse")]


def test_a_resume_finds_a_stop_behind_other_requests() -> None:
    fleet = resumed(unserved("rollback", "stop"))
    assert answers(fleet) == [(0, "rollback"), (2, "refuse")]


def test_a_stop_that_came_after_a_resume_holds() -> None:
    fleet = unserved("stop", "resume", "readmit", "stop")
    assert done(fleet, command(fleet)).result.phase == "STOPPED"
    assert answers(fleet) == [(1, "refuse"), (2, "refuse"), (3, "stop")]


def test_a_stop_from_the_command_swallows_nothing_that_was_asked_before_it() -> None:
    fleet = unserved("rollback", "stop", "stop")
    state = done(fleet, command(fleet)).result
    assert (state.phase, state.rolled_back_to, state.next_request) == ("STOPPED", 3, 3)
    assert answers(fleet) == [(0, "rollback"), (2, "stop")]


def test_a_command_that_comes_too_late_to_answer_leaves_the_log_alone() -> None:
    fleet = unserved()
    before = state_of(fleet)
    assert done(fleet, command(fleet)).result == before == state_of(fleet)


def test_what_a_stop_found_open_behind_it_does_not_act_when_the_run_goes_on() -> None:
    fleet = unserved("stop", "rollback", "readmit")
    assert done(fleet, command(fleet)).result.phase == "STOPPED"
    assert answers(fleet) == [(2, "stop")]
    assert operated.resumed(fleet)
    fleet.kill_all()
    fleet.restart = True
    fleet.start()
    finished(fleet)
    assert "rollback" not in fleet.kinds()


def test_what_was_asked_of_a_stopped_run_and_left_open_is_settled_when_it_goes_on() -> None:
    """A command that asked for a rollback of a stopped run died before it could carry that out."""
    fleet = unserved("stop")
    done(fleet, command(fleet))
    fleet.finish()  # who leaves saves the moments first
    number = asked(fleet, "rollback", to=3).result
    assert operated.resumed(fleet)
    fleet.restart = True
    fleet.start()
    finished(fleet)
    assert "rollback" not in fleet.kinds() and answers(fleet)[-1] == (number + 1, "epoch_start")
