"""Histories with one fault each, at every operation that matters."""

from __future__ import annotations

from collections.abc import Iterator

from diloco_cli.protocol.log.records import RunFormat
from tests.faulty_world import Fault, FaultyWorld
from tests.histories.replayer import Replayer
from tests.simulation.toy import ToyFleet

Point = tuple[str, int]


def histories(run: RunFormat, fault: Fault, points: list[Point]) -> Iterator[tuple[Point, ToyFleet]]:
    for point in points:
        fleet = ToyFleet(run, FaultyWorld(faults={point: fault}))
        yield point, fleet.start()


def finished(fleet: ToyFleet, within_s: float = 60.0) -> Replayer:
    """The run comes to its end, nobody ends with an error, and the bucket is sound."""
    fleet.finish(within_s)
    assert fleet.errors() == []
    found = check(fleet)
    assert found.kinds[-1] == "finish"
    return found


def check(fleet: ToyFleet) -> Replayer:
    return Replayer(fleet.world.store, fleet.run).read().check_published(fleet.published.offers)
