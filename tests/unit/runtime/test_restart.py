"""Restarts, and the causes that units tell."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from diloco_cli.errors import DataCheckError, FencedError, RefusedError, StoreError, TakenError, TerminatedError
from diloco_cli.events.bucket import EventReader
from diloco_cli.events.cause import Cause
from diloco_cli.protocol.log.state import IllegalStateError
from diloco_cli.runtime.restart import (
    CAUSE_VARIABLE,
    Exit,
    RestartPolicy,
    cause_path,
    decide,
    hint_of,
    read_cause,
    tell,
    telling_why,
)
from diloco_cli.runtime.units import LAST_STATES, TRANSITIONS, UnitEvent, UnitState, next_state
from diloco_cli.store.open import open_store

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


pytestmark = pytest.mark.usefixtures("home")
URL = "memory://causes"


def end(error: BaseException, unit: str = "iowa", url: str = URL) -> None:
    with pytest.raises(type(error)), telling_why(url, unit):
        raise error


def told(url: str = URL) -> list[tuple[str, str]]:
    return [(event.unit, event.kind) for event in EventReader().read(open_store(url))]


def test_without_a_supervisor_the_bucket_is_told_once_in_a_while() -> None:
    url = f"{URL}/alone"
    for _ in range(3):
        end(ValueError("x"), url=url)
    end(ValueError("y"), "rhine", url)
    end(TakenError("it takes part already"), "ohio", url)  # its person was told, and the living one is well
    end(RefusedError("no consent to its code"), "delta", url)  # only there does the operator see why it is not heard
    assert sorted(told(url)) == [("delta", "error"), ("iowa", "error"), ("rhine", "error")]


def test_of_a_name_that_is_taken_the_bucket_hears_nothing_through_a_rank_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a rank told is read by its parent, which a person has started."""
    url = f"{URL}/ranks"
    with monkeypatch.context() as in_a_rank:
        in_a_rank.setenv(CAUSE_VARIABLE, f"{os.getppid()}:{cause_path('nano', 'iowa')}")
        end(TakenError("it takes part already"), url=url)
    cause = read_cause(cause_path("nano", "iowa"), os.getpid())
    assert cause is not None
    tell(url, "iowa", replace(cause, text=f"rank 0 of 2: {cause.text}"))
    assert told(url) == []


def test_a_supervisor_reads_it_from_a_file_and_tells_the_bucket_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAUSE_VARIABLE, f"{os.getppid()}:{cause_path('nano', 'iowa')}")
    url = f"{URL}/supervised"
    end(StoreError("not found"), url=url)
    cause = read_cause(cause_path("nano", "iowa"), os.getpid())
    assert cause is not None and cause.text.endswith("StoreError: not found") and told(url) == []
    assert read_cause(cause_path("nano", "iowa"), os.getpid() + 1) is None, "that of an earlier process"
    end(ValueError("of a child of the unit"), "evaluator", url)
    assert told(url) == [("evaluator", "error")]


def test_a_unit_whose_supervisor_has_died_tells_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAUSE_VARIABLE, f"1234567:{cause_path('nano', 'iowa')}")
    url = f"{URL}/orphaned"
    end(ValueError("x"), url=url)
    assert read_cause(cause_path("nano", "iowa"), os.getpid()) is not None and told(url) == [("iowa", "error")]


def test_a_supervisor_ends_with_the_hint_of_the_error_that_ended_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a lost state that is where to go back to."""
    monkeypatch.setenv(CAUSE_VARIABLE, f"{os.getppid()}:{cause_path('nano', 'syncer')}")
    end(DataCheckError("lost", hint="diloco rollback nano --to 7; then: diloco resume nano"), "syncer", f"{URL}/lost")
    cause = read_cause(cause_path("nano", "syncer"), os.getpid())
    assert cause is not None and cause.hint == "diloco rollback nano --to 7; then: diloco resume nano"
    assert hint_of("nano", "syncer", cause) == cause.hint
    assert "diloco logs syncer" in hint_of("nano", "syncer", None)


@pytest.mark.parametrize("error", [TerminatedError("asked"), FencedError("another"), SystemExit(0)])
def test_a_clean_end_is_no_error(error: BaseException) -> None:
    end(error, url=f"{URL}/clean")
    assert told(f"{URL}/clean") == []


def test_a_bucket_that_cannot_be_told_hides_no_error() -> None:
    end(ValueError("the error itself"), url="nonsense://")
