"""Regions with a bucket of their own, when a run comes into being."""

from __future__ import annotations

from typing import Any

from diloco_cli.config.settings import Inventory
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.protocol.keys import FORMAT_KEY
from diloco_cli.protocol.log import parse_format
from diloco_cli.protocol.records import RegionStore, RunFormat
from diloco_cli.protocol.wire import MAX_RECORD_BYTES
from diloco_cli.store.open import join_url
from diloco_cli.store.port import Created, Store


def region_fields(inventory: Inventory, url: str, name: str) -> dict[str, Any]:
    """What a run's FORMAT at `url` says of regions: nothing where none has a bucket of its own."""
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


def refuse_another_run(home: Store, there: Store, run: RunFormat, region: RegionStore) -> None:
    """Before a run is created: raises UsageError if a region's bucket holds one of its name that home does not."""
    ours, theirs = (store.get(FORMAT_KEY, MAX_RECORD_BYTES) for store in (home, there))
    for data, url in ((ours, home.url), (theirs, there.url)):
        if data is not None:
            parse_format(data, url)
    if theirs is not None and theirs != ours:
        raise _another_run(run, region)


def create_in_region(home: Store, there: Store, run: RunFormat, region: RegionStore) -> None:
    """The run's format, as it lies at home, in a region's bucket: its learners can start before the syncer does."""
    data = home.get(FORMAT_KEY, MAX_RECORD_BYTES)
    if data is None:
        raise NotFoundError(f"no run at {home.url}")
    parse_format(data, home.url)  # damaged, it must not lie there for ever
    answer = there.create(FORMAT_KEY, data)
    if not isinstance(answer, Created) and answer.data != data:
        raise _another_run(run, region)


def _another_run(run: RunFormat, region: RegionStore) -> UsageError:
    return UsageError(
        f"another run named {run.name!r} lies in the bucket of region {region.name}",
        where=region.url,
        hint=f"clear that prefix, or start under another name: --set name={run.name}-2",
    )
