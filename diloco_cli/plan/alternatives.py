"""What else could be done with the same hardware, computed by the same planner, and why it was not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from diloco_cli.config.settings import RunSettings, SyncSettings
from diloco_cli.errors import InfeasibleError
from diloco_cli.plan.link import MBPS
from diloco_cli.plan.plan import Alternative, Plan
from diloco_cli.units import format_bandwidth

WORTH_MORE = 1.005  # below this ratio of tokens/s two plans count as equal


def alternatives(plan: Plan, make: Callable[[RunSettings], Plan]) -> tuple[Alternative, ...]:
    """Another codec and a longer round, each through `make`; and synchronous training on the same islands."""
    found = [_variant(plan, name, sync, make) for name, sync in _changes(plan.run.sync)]
    rate = plan.prediction.synchronous_tokens_per_s
    share = 100 * rate / plan.prediction.tokens_per_s
    reason = f"{share:.3g} % of this plan: every step waits for the slowest link and for whoever is away"
    return (*found, Alternative("synchronous data-parallel", rate, reason))


def _changes(sync: SyncSettings) -> list[tuple[str, SyncSettings]]:
    longer = (f"sync.every={2 * sync.every}", replace(sync, every=2 * sync.every))
    if sync.codec == "int8":
        return [("sync.codec=bf16", replace(sync, codec="bf16", broadcast="bf16")), longer]
    return [("sync.codec=int8", replace(sync, codec="int8", broadcast="int8")), longer]


def _variant(plan: Plan, name: str, sync: SyncSettings, make: Callable[[RunSettings], Plan]) -> Alternative:
    try:
        other = make(replace(plan.run, sync=sync))
    except InfeasibleError as error:
        return Alternative(name, 0.0, f"infeasible: {error.message}")
    need = format_bandwidth(max(island.up_mbps_needed for island in other.islands) * MBPS)
    facts = f"{len(other.islands)} islands, {need} up, overlap {other.schedule.overlap}"
    gain = other.prediction.tokens_per_s / plan.prediction.tokens_per_s
    if gain > WORTH_MORE:
        reason = f"+{100 * (gain - 1):.1f} % tokens/s, but learners exchange more coarsely or less often"
    elif gain < 1 / WORTH_MORE:
        reason = f"-{100 * (1 - gain):.1f} % tokens/s"
    else:
        reason = "no more tokens/s than this plan"
    return Alternative(name, other.prediction.tokens_per_s, f"{reason} ({facts})")
