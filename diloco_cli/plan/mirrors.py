"""What crosses between the home bucket and the buckets of regions, and what it costs.

A round carries every fragment's new version once to each region with a bucket of its own, however many islands read it
there, and every delta of such a region's islands once to the home bucket. Saved moments stay where they are. Records
are small beside both. What leaves a bucket is charged where it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.plan.flow import Fleet
from diloco_cli.plan.link import CODEC_BITS
from diloco_cli.plan.model_facts import ModelFacts

DAY_S = 86_400.0
GB = 1e9


@dataclass(frozen=True)
class MirrorTraffic:
    """GB a day out of the home bucket and out of the regions' buckets, and what they cost a day."""

    regions: int = 0
    islands: int = 0
    home_gb_per_day: float = 0.0
    regions_gb_per_day: float = 0.0
    per_day: float = 0.0

    @property
    def gb_per_day(self) -> float:
        return self.home_gb_per_day + self.regions_gb_per_day


def mirror_traffic(fleet: Fleet, model: ModelFacts) -> MirrorTraffic:
    crossings = [kept.crossing for kept in fleet.kept if kept.crossing is not None]
    if not crossings:
        return MirrorTraffic()
    version, delta = (
        model.parameters * CODEC_BITS[codec] / 8 / GB * DAY_S / fleet.schedule.round_s
        for codec in (fleet.sync.broadcast, fleet.sync.codec)
    )
    regions = {crossing.region: crossing.home_per_gb for crossing in crossings}
    cost = version * sum(regions.values()) + delta * sum(crossing.per_gb for crossing in crossings)
    return MirrorTraffic(len(regions), len(crossings), len(regions) * version, len(crossings) * delta, cost)
