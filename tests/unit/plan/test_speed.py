"""Islands of one machine share its cores: expected shares by hand."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.settings import Inventory, IslandSettings, LocalMachine, StoreSettings
from diloco_cli.plan.candidates import busy_cores, candidates, contention, share_of_cores, shared_cores
from tests.unit.plan.fleets import MODEL, RUN

ISLANDS = [
    IslandSettings("a", "here", Accelerators("cpu", 2)),
    IslandSettings("b", "here", Accelerators("cpu", 2), slowdown=2.0),
    IslandSettings("c", "there", Accelerators("cpu", 4)),
    IslandSettings("d", "here", Accelerators("H100-SXM", 8)),
    IslandSettings("e", "here", Accelerators("cpu", 64), infra="ssh"),
]


def test_only_local_cpu_islands_of_the_region_share_this_machines_cores():
    """On two cores: a and c are awake all the time, b half of it: 7 threads in the mean, and 8 while b is awake."""
    assert busy_cores(ISLANDS, None) == 7.0
    assert busy_cores(ISLANDS, "here") == 3.0
    shares = share_of_cores(ISLANDS, None, LocalMachine(2))
    assert shares == pytest.approx({"a": 2 / 7, "b": 2 / 8, "c": 2 / 7, "d": 1.0, "e": 1.0})
    shares = share_of_cores(ISLANDS, "here", LocalMachine(2))
    assert shares == pytest.approx({"a": 2 / 3, "b": 2 / 4, "c": 1.0, "d": 1.0, "e": 1.0})


def test_enough_cores_change_nothing():
    assert set(share_of_cores(ISLANDS, None, LocalMachine(8)).values()) == {1.0}
    assert share_of_cores(ISLANDS, "nowhere", LocalMachine(1))["a"] == 1.0


@pytest.mark.parametrize(
    ("cores", "crowding", "awake", "share"),
    [
        (2, (), 1, 1.0),
        (2, (), 4, 0.5),  # nothing measured: the cores are divided
        (2, (1.0, 0.9, 0.6), 1, 1.0),
        (2, (1.0, 0.9, 0.6), 2, 0.9),
        (2, (1.0, 0.9, 0.6), 6, 0.3),  # twice as many as were measured
        (8, (1.0, 0.9), 4, 0.9),  # cores enough for all: no worse than what was measured
    ],
)
def test_the_share_in_a_crowd(cores, crowding, awake, share):
    assert contention(LocalMachine(cores, crowding), awake) == pytest.approx(share)


def test_services_take_idle_cores_first():
    assert shared_cores(LocalMachine(2), 1, 0.2) == 1.0
    assert shared_cores(LocalMachine(2), 2, 0.2) == pytest.approx(0.9)
    assert shared_cores(LocalMachine(2), 5, 0.2) == pytest.approx(0.9 * 2 / 5)
    assert shared_cores(LocalMachine(1), 1, 0.2) == pytest.approx(0.8)


def test_speeds_are_shared_only_where_the_inventory_knows_the_machine():
    inventory = Inventory(StoreSettings("file:///x"), tuple(i for i in ISLANDS if i.name in "ac"))
    assert {c.share for c in candidates(RUN, inventory, MODEL)} == {1.0}
    known = candidates(RUN, replace(inventory, local=LocalMachine(2)), MODEL)
    assert [c.share for c in known] == pytest.approx([0.9 * 2 / 6] * 2)
