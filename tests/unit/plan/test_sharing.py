"""Islands of one machine share its cores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.config.settings import Accelerators, Inventory, IslandSettings, LocalMachine, StoreSettings
from diloco_cli.plan.sharing import busy_cores, crowded_share, share_of_cores, shares_of_the_local_machine

ISLANDS = [
    IslandSettings("a", "here", Accelerators("cpu", 2)),
    IslandSettings("b", "here", Accelerators("cpu", 2), slowdown=2.0),
    IslandSettings("c", "there", Accelerators("cpu", 4)),
    IslandSettings("d", "here", Accelerators("H100-SXM", 8)),
    IslandSettings("e", "here", Accelerators("cpu", 64), infra="ssh"),
]


def test_only_local_cpu_islands_of_the_region_share_this_machines_cores():
    assert busy_cores(ISLANDS, None) == 7.0
    assert busy_cores(ISLANDS, "here") == 3.0
    assert share_of_cores(ISLANDS, None, 2) == {"a": 2 / 7, "b": 2 / 7, "c": 2 / 7, "d": 1.0, "e": 1.0}
    assert share_of_cores(ISLANDS, "here", 2) == {"a": 2 / 3, "b": 2 / 3, "c": 1.0, "d": 1.0, "e": 1.0}


def test_enough_cores_change_nothing():
    assert set(share_of_cores(ISLANDS, None, 7).values()) == {1.0}
    assert share_of_cores(ISLANDS, "nowhere", 1)["a"] == 1.0


@pytest.mark.parametrize(
    ("cores", "crowding", "busy", "share"),
    [
        (2, (), 1.0, 1.0),
        (2, (), 2.5, 0.8),  # nothing measured: the cores are divided
        (2, (1.0, 0.9, 0.6), 1.0, 1.0),
        (2, (1.0, 0.9, 0.6), 2.0, 0.9),
        (2, (1.0, 0.9, 0.6), 2.5, 0.75),  # half-way
        (2, (1.0, 0.9, 0.6), 6.0, 0.3),  # twice as many as were measured
        (8, (1.0, 0.9), 4.0, 0.9),  # cores enough for all: no worse than what was measured
        (2, (1.0, 0.9, 0.6), 0.5, 1.0),
    ],
)
def test_the_share_in_a_crowd(cores, crowding, busy, share):
    assert crowded_share(LocalMachine(cores, crowding), busy) == pytest.approx(share)


def test_only_local_cores_share_and_only_where_the_inventory_knows_the_machine():
    inventory = Inventory(StoreSettings("file:///x"), tuple(ISLANDS))
    assert shares_of_the_local_machine(inventory) == {}
    known = replace(inventory, local=LocalMachine(2))
    assert shares_of_the_local_machine(known) == pytest.approx(dict.fromkeys("abc", 2 / 7.2))
