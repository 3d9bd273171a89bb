"""Islands of one machine share its cores, and so its speed."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_cli.config.devices import CPU
from diloco_cli.config.settings import Inventory, IslandSettings, LocalMachine
from diloco_cli.plan.speed import num_devices

SERVICE_CORES = 0.2  # syncer, evaluator and supervisor; beside the quickstart's learners they took 8 % of their time


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


def shares_of_the_local_machine(inventory: Inventory) -> dict[str, float]:
    """By island: what is left of its speed where the inventory describes the machine that the local islands share with
    one another and with the run's own services; empty where it does not (`launch` then counts its own cores)."""
    if inventory.local is None:
        return {}
    busy = busy_cores(inventory.islands, None)
    share = crowded_share(inventory.local, busy + SERVICE_CORES) if busy else 1.0
    return {island.name: share for island in inventory.islands if shares_cores(island, None)}


def crowded_share(local: LocalMachine, busy: float) -> float:
    """The speed of one of `busy` processes as a share of one's alone: as measured, between two counts in proportion;
    beyond the largest count measured, and where none was, as the cores are divided."""
    known = local.crowding
    if not known:
        return min(1.0, local.cores / busy)
    if busy >= len(known):
        return known[-1] * min(1.0, max(local.cores, len(known)) / busy)
    below = max(1, int(busy))
    weight = max(0.0, busy - below)
    return known[below - 1] * (1 - weight) + known[below] * weight
