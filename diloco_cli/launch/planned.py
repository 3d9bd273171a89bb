"""What a plan makes of a run before anything is created: its islands, and its regions. No model is built for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_cli.config.hardware import find_device, in_catalogue
from diloco_cli.config.settings import Inventory
from diloco_cli.layout import Layout
from diloco_cli.plan.plan import Plan
from diloco_cli.protocol.log.records import Island, RegionStore, RunFormat
from diloco_cli.store.url import join_url


def islands_of(plan: Plan, shares: Mapping[str, float]) -> tuple[Island, ...]:
    """The islands that were planned, by name; `shares`: how much of its planned speed each has."""
    listed = {island.name: island for island in plan.inventory.islands}
    return tuple(
        Island(
            name=planned.name,
            region=planned.region,
            batch_tokens=planned.batch_tokens,
            local_steps=planned.local_steps,
            tokens_per_s=planned.tokens_per_s * shares[planned.name],
            step_s=planned.step_s / shares[planned.name],
            accelerator=device_name(listed[planned.name].accelerators.name, plan.inventory),
            num_accelerators=planned.devices,
            infra=listed[planned.name].starts_by,
            slowdown=listed[planned.name].slowdown,
            link=listed[planned.name].link,
            micro_batch_tokens=planned.micro_batch_tokens,
            nodes=planned.nodes,
            ranks=planned.ranks,
            sharding=planned.sharding,
        )
        for planned in sorted(plan.islands, key=lambda planned: planned.name)
    )


def device_name(name: str, inventory: Inventory) -> str:
    """As every learner knows the device: it does not have the inventory, which may describe devices of its own."""
    if in_catalogue(name) is not None:
        return name
    return find_device(name, inventory.devices).backend or name


def region_fields(inventory: Inventory, url: str, name: str) -> dict[str, Any]:
    """The fields of a run's FORMAT at `url` about regions; none if no region has a bucket of its own."""
    home = inventory.store
    own = {region: given for region, given in inventory.regions.items() if given.store not in (None, home.url)}
    if not own:
        return {}
    of_home = inventory.regions.get(home.region or "")
    stores = [RegionStore(n, join_url(given.store or "", name), given.egress_per_gb or 0.0) for n, given in own.items()]
    return {
        "regions": tuple(sorted(stores, key=lambda store: store.name)),
        "home_url": url,
        "home_egress_per_gb": (of_home and of_home.egress_per_gb) or 0.0,
    }


def planned_format(plan: Plan, url: str) -> RunFormat:
    """As far as what it consists of can be said of it; it has no model yet, and no id."""
    islands = islands_of(plan, {island.name: 1.0 for island in plan.islands})
    regions = region_fields(plan.inventory, url, plan.run.name)
    home = plan.inventory.store.region
    return RunFormat("", plan.run.name, "", plan.run, islands, Layout((), ""), "", home_region=home, **regions)
