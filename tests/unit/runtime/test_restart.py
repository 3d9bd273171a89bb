"""When a unit that ended is started again."""

from __future__ import annotations

import pytest

from diloco_cli.events.cause import Cause
from diloco_cli.protocol.log.state import IllegalStateError
from diloco_cli.runtime.restart import Exit, RestartPolicy, decide
from diloco_cli.runtime.units import LAST_STATES, TRANSITIONS, UnitEvent, UnitState, next_state

POLICY = RestartPolicy()


def lives(count: int, status: int | None = 1, lived_s: float = 1.0, gap_s: float = 2.0) -> list[Exit]:
    return [Exit(at_s=i * gap_s, status=status, lived_s=lived_s) for i in range(count)]


def delay_s(exits: list[Exit]) -> float:
    now_s = exits[-1].at_s
    return round(decide(exits, now_s, POLICY).at_s - now_s, 6)


def test_the_first_restart_is_fast_then_delays_double_to_a_bound():
    delays = [delay_s(lives(count)) for count in range(1, 12)]
    assert delays == [0.2, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]


def test_a_healthy_life_resets_the_delay():
    assert delay_s([*lives(6), Exit(100, 1, 60.0)]) == 0.2
    assert delay_s([*lives(6), Exit(100, 1, 59.0)]) == 16


@pytest.mark.parametrize("status", [-9, -15])
def test_being_killed_again_and_again_from_outside_does_not_slow_a_settled_unit(status):
    storm = lives(40, status=status, lived_s=14.0, gap_s=15.0)
    assert delay_s(storm) == 0.2
    assert decide(storm, storm[-1].at_s, POLICY).action == "restart"


def test_a_unit_that_is_killed_at_birth_is_given_up():
    assert decide(lives(21, status=-9, lived_s=0.5), 42.0, POLICY).action == "give_up"


def test_restarts_in_a_row_without_a_healthy_life_are_bounded():
    assert decide(lives(20), 40.0, POLICY).action == "restart"
    decision = decide(lives(21), 42.0, POLICY)
    assert decision.action == "give_up"
    assert "restarts exhausted: 20 in a row" in decision.reason
    assert decide([*lives(20), Exit(100, 1, 60.0), *lives(5)], 142.0, POLICY).action == "restart"


@pytest.mark.parametrize(("status", "part"), [(0, "done"), (9, "newer process")])
def test_done_and_fenced_are_not_restarted(status, part):
    decision = decide(lives(1, status=status), 0.0, POLICY)
    assert (decision.action, decision.at_s) == ("done", None)
    assert part in decision.reason


@pytest.mark.parametrize("status", [2, 3, 8, 12])
def test_what_a_restart_cannot_heal_gets_few_tries(status):
    assert decide(lives(2, status=status), 4.0, POLICY).action == "restart"
    assert decide(lives(3, status=status), 4.0, POLICY).action == "give_up"
    assert decide([*lives(2, status=status), *lives(1)], 4.0, POLICY).action == "restart"


def ended_for_good(exits: list[Exit], *, status: int, lived_s: float) -> list[Exit]:
    """The lives from the first death until the unit is given up, each started when the policy says."""
    exits, action, now_s = [*exits], "restart", 0.0
    while action == "restart":
        now_s += lived_s
        exits.append(Exit(now_s, status, lived_s))
        decision = decide(exits, now_s, POLICY)
        action, now_s = decision.action, decision.at_s or now_s
    return exits


@pytest.mark.parametrize("status", [1, 4, 11])
@pytest.mark.parametrize("lived_s", [0.5, 6.0, 59.0])
def test_a_unit_that_reads_what_is_wrong_is_given_up_after_deaths_over_five_minutes(status, lived_s):
    exits = ended_for_good([], status=status, lived_s=lived_s)
    assert 300 <= exits[-1].at_s - exits[0].at_s <= 1800


def test_a_unit_that_reads_for_longer_than_a_healthy_life_is_given_up_too():
    exits = ended_for_good([], status=11, lived_s=61.0)
    assert 300 <= exits[-1].at_s - exits[0].at_s <= 600


def test_what_ends_a_life_of_weeks_now_and_then_is_not_hopeless():
    """A non-finite gradient every two weeks, which a restart heals."""
    fortnight = 14 * 86_400.0
    exits = [Exit(at_s=n * fortnight, status=12, lived_s=fortnight - 1) for n in range(1, 9)]
    assert decide(exits, exits[-1].at_s, POLICY).action == "restart"
    at_once = [Exit(at_s=exits[-1].at_s + n, status=12, lived_s=1.0) for n in (1, 2, 3)]
    assert decide([*exits, *at_once[:2]], at_once[1].at_s, POLICY).action == "restart"
    assert decide([*exits, *at_once], at_once[2].at_s, POLICY).action == "give_up"


@pytest.mark.parametrize("status", [6, 13, 75])
def test_the_outside_world_gets_an_hour_to_heal(status):
    exits = lives(110, status=status, gap_s=30.0)
    assert decide(exits, exits[-1].at_s, POLICY).action == "restart"
    exits = lives(130, status=status, gap_s=30.0)
    assert decide(exits, exits[-1].at_s, POLICY).action == "give_up"


@pytest.mark.parametrize(
    ("status", "part"),
    [
        (None, "adopted"),
        (-9, "killed by SIGKILL after 1.0 s"),
        (6, "the store failed"),
        (1, "status 1"),
        (-99, "99"),
    ],
)
def test_the_reason_tells_how_it_ended(status, part):
    assert part in decide(lives(1, status=status), 0.0, POLICY).reason


def test_every_state_but_the_last_ones_can_be_left_and_no_last_one_can():
    left = {state for state, _ in TRANSITIONS}
    assert left == set(UnitState) - LAST_STATES
    assert {*TRANSITIONS.values()} == set(UnitState)
    with pytest.raises(IllegalStateError, match="DONE"):
        next_state(UnitState.DONE, UnitEvent.DUE)


def failing(*causes: Cause | None) -> list[Exit]:
    return [Exit(at_s=i * 2.0, status=1 if cause else -9, lived_s=20.0, cause=cause) for i, cause in enumerate(causes)]


def at(position: int | None, place: str = "model.py:41", lasting: bool = True) -> Cause:
    return Cause("your code: ...", place, lasting, position)


def test_an_error_of_the_users_code_that_repeats_without_progress_ends_the_restarts():
    for exits in ((at(None), at(None), at(None)), (at(500), at(500), at(100)), (at(500), None, at(500), at(500))):
        decision = decide(failing(*exits), 10.0, POLICY)
        assert decision.action == "give_up"
        assert "3 times at the same place without progress" in decision.reason
    assert decide(failing(at(500), at(500)), 10.0, POLICY).action == "restart"


def test_progress_another_place_and_the_world_outside_do_not_count_as_repeated():
    for exits in (
        (at(500), at(500), at(501)),
        (at(500), at(500), at(500, "model.py:42")),
        (at(500, lasting=False),) * 3,
        (None, None, None),
    ):
        assert decide(failing(*exits), 10.0, POLICY).action == "restart"
