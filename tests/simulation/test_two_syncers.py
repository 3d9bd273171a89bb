"""Two syncers at once: one chain, one of them leaves."""

from __future__ import annotations

import pytest

from diloco_cli.errors import FencedError
from diloco_cli.virtual.world import Actor, Fault, World
from tests.simulation.sweeps import Point, check, histories, points_around_writes
from tests.simulation.toy import ToyFleet, make_run

RUN = make_run(merges=6)
CLAIM_EPOCH = 2  # operation numbers of a syncer on an empty bucket: hint, commit 0, epoch, ...


def until_others_ended(fleet: ToyFleet, actor: Actor) -> bool:
    return fleet.world.run(lambda: all(other.ended for other in fleet.world.actors if other is not actor), 60)


def frozen(fleet: ToyFleet) -> Actor:
    (syncer,) = fleet.living("syncer")
    assert fleet.world.run(lambda: syncer.paused, 60)
    return syncer


def points(stop: int | None = None) -> list[Point]:
    """Where the older syncer freezes: from its first write on, before its last commit."""
    fleet = ToyFleet(RUN).start()
    fleet.finish()
    finish = max(n for name, n, key in fleet.world.writes if key.startswith("commit/"))
    return [point for point in points_around_writes(RUN, "syncer") if CLAIM_EPOCH < point[1] <= finish][:stop]


def test_a_syncer_that_wakes_up_after_its_successor_is_fenced_and_changes_nothing() -> None:
    for point, fleet in histories(RUN, Fault.PAUSE, points()[::2]):
        older = frozen(fleet)
        newer = fleet.syncer("newer")
        assert until_others_ended(fleet, older), point
        before = fleet.records()
        fleet.world.resume(older)
        assert fleet.ended_within(older, 10), point
        assert isinstance(older.error, FencedError) and newer.error is None, (point, older.error)
        assert fleet.records() == before
        assert check(fleet).kinds.count("finish") == 1


def test_a_syncer_that_wakes_up_in_the_middle_is_fenced() -> None:
    for point, fleet in histories(RUN, Fault.PAUSE, points()[::3]):
        older = frozen(fleet)
        fleet.syncer("newer")
        fleet.world.run(lambda f=fleet, n=fleet.num_commits(): f.num_commits() >= n + 2, 60)  # type: ignore[misc]
        fleet.world.resume(older)
        fleet.finish()
        assert [type(error) for error in fleet.errors()] == [FencedError], point
        assert check(fleet).kinds.count("finish") == 1


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.002, 0.003, 0.0045, 0.01, 0.3])
def test_two_syncers_from_the_start_leave_one_chain(delay_s: float) -> None:
    fleet = ToyFleet(RUN)
    fleet.syncer("a")
    fleet.syncer("b", delay_s)
    fleet.start_learners()
    fleet.finish()
    assert [type(error) for error in fleet.errors()] == [FencedError]
    assert check(fleet).kinds.count("finish") == 1


def test_a_syncer_that_starts_while_the_run_finishes_leaves_it_finished() -> None:
    for point in range(4, 12):
        fleet = ToyFleet(RUN, World(faults={("late", point): Fault.PAUSE})).start().until_commits(4)
        late = fleet.syncer("late")
        until_others_ended(fleet, late)
        fleet.world.resume(late)
        fleet.ended_within(late, 60)
        assert check(fleet).kinds.count("finish") == 1, point


def test_an_idle_syncer_notices_its_successor() -> None:
    fleet = ToyFleet(RUN)
    older = fleet.syncer("older")
    fleet.syncer("newer", delay_s=0.5)
    assert fleet.ended_within(older, 120)
