"""Small fleets for the planner's tests."""

from __future__ import annotations

from typing import Any

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.models import facts_from_numbers
from diloco_cli.config.settings import (
    Inventory,
    IslandSettings,
    Link,
    ModelSettings,
    RunSettings,
    StoreSettings,
    SyncSettings,
    TrainSettings,
)

FAST = Link(up_bps=2e9, down_bps=2e9, rtt_s=0.005)
SLOW_UP = Link(up_bps=30e6, down_bps=300e6, rtt_s=0.03)
MODEL = facts_from_numbers(1_000_000_000, 16, 2048, 2048)
NUMBERS = ModelSettings(parameters=1_000_000_000, layers=16, width=2048, sequence=2048)
RUN = RunSettings("worked", model=NUMBERS, train=TrainSettings(tokens=10**11), sync=SyncSettings(every=100))


def island(
    name: str, device: str = "H100-SXM", count: int = 8, batch: int = 524_288, link: Link = FAST, **more: Any
) -> IslandSettings:
    settings = {"mfu": 0.4, **more}
    return IslandSettings(name, "here", Accelerators(device, count), batch_tokens=batch, link=link, **settings)


IOWA = island("iowa", mtbf_s=388 * 60.0, restart_s=12 * 60.0, price_per_h=32.0)
SPOT = island("spot", "A100-80GB-SXM", batch=262_144, mfu=0.45, mtbf_s=2700.0, restart_s=300.0, price_per_h=14.0)
OLD = island("old", "V100-SXM2-16GB", 4, 65_536, mfu=0.3, mtbf_s=19 * 3600.0, restart_s=3600.0)
HOME = island("home", "RTX-4090", 2, 65_536, SLOW_UP, mtbf_s=49 * 3600.0, restart_s=3600.0)


def fleet(*islands: IslandSettings) -> Inventory:
    return Inventory(StoreSettings("gs://bucket"), islands or (IOWA, SPOT, OLD, HOME))


def with_sync(run: RunSettings = RUN, **changed: Any) -> RunSettings:
    return replace(run, sync=replace(run.sync, **changed))
