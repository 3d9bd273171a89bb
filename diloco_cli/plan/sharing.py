"""Islands of one machine share its cores, and so its speed."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_cli.config.devices import CPU
from diloco_cli.config.settings import IslandSettings
from diloco_cli.plan.speed import num_devices


def shares_cores(island: IslandSettings, region: str | None) -> bool:
    """Does `launch --region REGION` (None: all) start this island on cores of the machine it runs on?"""
    on_cpu = island.accelerators.name.lower() == CPU
    return on_cpu and island.infra == "local" and region in (None, island.region)


def busy_cores(islands: Sequence[IslandSettings], region: str | None) -> float:
    """How many cores are busy on average: an emulated slowdown is sleep."""
    return sum(num_devices(island) / island.slowdown for island in islands if shares_cores(island, region))


def share_of_cores(islands: Sequence[IslandSettings], region: str | None, cores: int) -> dict[str, float]:
    """By island: the share of its planned speed that is left to it, 1 for all that start elsewhere."""
    busy = busy_cores(islands, region)
    share = min(1.0, cores / busy) if busy else 1.0
    return {island.name: share if shares_cores(island, region) else 1.0 for island in islands}
