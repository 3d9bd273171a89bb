"""Islands on one machine share its cores; islands elsewhere do not."""

from __future__ import annotations

from diloco_cli.config.settings import Accelerators, IslandSettings
from diloco_cli.plan.sharing import busy_cores, share_of_cores

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
