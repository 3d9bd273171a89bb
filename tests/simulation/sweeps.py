"""Histories with one fault each, at every operation that matters."""

from __future__ import annotations

from collections.abc import Iterator

from diloco_cli.protocol.records import RunFormat
from diloco_cli.simulate.histories.replayer import Replayer
from diloco_cli.simulate.world import Fault, World
from tests.simulation.toy import Fleet


def points_around_writes(run: RunFormat, actor: str) -> list[int]:
    """Operation numbers at which dying differs: before each create, and after it (before whatever comes next).

    Dying between two reads is dying after the create before them.
    """
    fleet = Fleet(run).start()
    fleet.finish()
    writes = [number for name, number, _ in fleet.world.writes if name == actor]
    return sorted({0, *writes, *(number + 1 for number in writes)})


def histories(run: RunFormat, actor: str, fault: Fault, points: list[int]) -> Iterator[tuple[int, Fleet]]:
    for point in points:
        fleet = Fleet(run, World(faults={(actor, point): fault}))
        yield point, fleet.start()


def check(fleet: Fleet) -> Replayer:
    return Replayer(fleet.world.store, fleet.run).read().check_published(fleet.published.offers)
