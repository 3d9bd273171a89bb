"""A learner's process that was thought dead wakes up beside its successor."""

from __future__ import annotations

import json

import pytest

from diloco_cli.virtual.world import Fault, World
from tests.simulation.sweeps import check, histories, points_around_writes
from tests.simulation.toy import ToyFleet, make_run

RUN = make_run(merges=8)
FLOOR_S = 0.12  # by then the successor's incarnation has raised the floor


def woken_beside_successor(fleet: ToyFleet, after_s: float) -> None:
    """Freeze, replace, wake up after a while; then run to the end."""
    (zombie,) = fleet.living("l0")
    threads = zombie.owner.threads
    fleet.world.run(lambda: zombie.ended or any(thread.paused for thread in threads), 60)
    fleet.pause(zombie)
    fleet.learner("l0")
    fleet.world.run_for(after_s)
    fleet.resume(zombie)
    fleet.world.run(fleet.ended, 60)


@pytest.mark.parametrize("after_s", [0.0, FLOOR_S, 0.5])
def test_no_data_is_merged_twice_beside_a_zombie_and_no_offer_gets_two_outcomes(after_s: float) -> None:
    points = points_around_writes(RUN, "l0")
    for _, fleet in histories(RUN, Fault.PAUSE, points[:9] + points[12::6] if after_s == FLOOR_S else points[::6]):
        woken_beside_successor(fleet, after_s)
        check(fleet)


def test_a_successor_begins_beyond_everything_that_was_published() -> None:
    successors = 0
    for point in points_around_writes(RUN, "l0")[3::5]:
        fleet = ToyFleet(RUN, World(faults={point: Fault.CRASH})).start()
        fleet.finish()
        check(fleet)
        store = fleet.world.store
        offers = [json.loads(store.get(key) or b"") for key in store.list("offer/l0/")]
        ends = [offer["data_end"] for offer in offers if offer["incarnation"] == 1]
        starts = [offer["data_start"] for offer in offers if offer["incarnation"] == 2]
        successors += bool(starts)
        assert min(starts, default=max(ends, default=0)) >= max(ends, default=0), point
    assert successors > 3
