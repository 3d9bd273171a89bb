"""What else could be done with the same hardware, computed by the same planner, and why it was not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from diloco_cli.config.settings import RunSettings, SyncSettings
from diloco_cli.errors import InfeasibleError
from diloco_cli.plan.flow import KEEPS_IN_FLIGHT, MOST_EVERY
from diloco_cli.plan.link import CODEC_BITS, MBPS, known_codecs
from diloco_cli.plan.plan import Alternative, Plan
from diloco_cli.units import format_bandwidth

WORTH_MORE = 1.005  # below this ratio of tokens/s two plans count as equal
MANY_ISLANDS = 200  # beyond it, fewer alternatives are computed

LUMPY = 1.5  # times the mean fragment: then one large tensor decides how long an exchange takes
MORE_OFTEN = "but learners exchange less often"
COARSER = "but deltas and versions are rounded more"


def alternatives(plan: Plan, make: Callable[[RunSettings], Plan]) -> tuple[Alternative, ...]:
    """Another codec, a longer round, fewer fragments, a larger quorum, the other way to mix, each through `make`; and
    synchronous training on the same islands."""
    few = len(plan.inventory.islands) <= MANY_ISLANDS
    changes = _changes(plan) if few else _changes(plan)[:2]
    found = [_variant(plan, name, sync, price, make) for name, sync, price in changes]
    rate = plan.prediction.synchronous_tokens_per_s
    p = plan.prediction
    shares = f"{100 * p.synchronous_goodput:.1f} % of ideal against {100 * p.goodput:.1f} %"
    reason = f"{shares}: every step waits for the slowest link and for whoever is away"
    if len(plan.islands) == 1:
        reason = f"{shares}: a single island has nobody to exchange with"
    days = plan.prediction.synchronous_days_to_target
    total = days * 24 * plan.money.accelerators_per_h
    return (*found, Alternative("synchronous data-parallel", rate, reason, total))


def _changes(plan: Plan) -> list[tuple[str, SyncSettings, str]]:
    """(name, settings, what a gain would cost)."""
    sync, changes = plan.run.sync, []
    for codec in (codec for codec in known_codecs() if codec not in (sync.codec, "fp32")):
        coarser = CODEC_BITS[codec] < CODEC_BITS[sync.codec]
        other = replace(sync, codec=codec, broadcast=codec)  # type: ignore[arg-type]
        changes.append((f"sync.codec={codec}", other, COARSER if coarser else "and they are rounded less"))
    if 2 * sync.every <= MOST_EVERY:
        changes.insert(1, (f"sync.every={2 * sync.every}", replace(sync, every=2 * sync.every), MORE_OFTEN))
    if sync.mixing not in KEEPS_IN_FLIGHT:
        how = "it keeps what is learned while a fragment is in flight, which the paper gives up"
        changes.append(("sync.mixing=rebase", replace(sync, mixing="rebase"), how))
    if (
        not sync.split_rows
        and plan.schedule.fragment_parameters > LUMPY * plan.model.parameters / plan.schedule.fragments
    ):
        changes.append(("sync.split_rows=true", replace(sync, split_rows=True), "as the embedding travels in parts"))
    if plan.schedule.fragments > 1:
        half = max(1, plan.schedule.fragments // 2)
        changes.append((f"sync.fragments={half}", replace(sync, fragments=half), "in larger bursts"))
    majority = (len(plan.islands) + 1) // 2
    if majority > sync.quorum:
        changes.append((f"sync.quorum={majority}", replace(sync, quorum=majority), "and merges hold more of them"))
    return changes


def _variant(plan: Plan, name: str, sync: SyncSettings, price: str, make: Callable[[RunSettings], Plan]) -> Alternative:
    try:
        other = make(replace(plan.run, sync=sync))
    except InfeasibleError as error:
        return Alternative(name, 0.0, f"infeasible: {error.message}")
    need = format_bandwidth(max(island.up_mbps_needed for island in other.islands) * MBPS)
    islands = "1 island" if len(other.islands) == 1 else f"{len(other.islands)} islands"
    facts = f"{islands}, {need} up, overlap {other.schedule.overlap}"
    gain = other.prediction.tokens_per_s / plan.prediction.tokens_per_s
    if gain > WORTH_MORE:
        reason = f"+{100 * (gain - 1):.1f} % tokens/s, {price}"
    elif gain < 1 / WORTH_MORE:
        reason = f"-{100 * (1 - gain):.1f} % tokens/s"
    else:
        reason = "no more tokens/s than this plan"
    return Alternative(name, other.prediction.tokens_per_s, f"{reason} ({facts})", other.money.total)
