"""The plan made again with one thing changed: a setting (alternatives on the same hardware, and why they were not
chosen), or the hardware with the settings pinned (sensitivities)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from diloco_cli.config.settings import Inventory, IslandSettings, Link, RunSettings, SyncSettings
from diloco_cli.errors import InfeasibleError
from diloco_cli.plan.flow import KEEPS_IN_FLIGHT, MAX_EVERY
from diloco_cli.plan.link import CODEC_BITS, MBPS, known_codecs, load_of_round, rounded_up
from diloco_cli.plan.plan import Alternative, Plan, Sensitivity
from diloco_cli.units import format_bandwidth

MANY_ISLANDS = 200  # beyond it, only a few changes are tried
FEW_SETTINGS, FEW_CHANGES = 2, 3
MAX_CHANGES = 8  # of the hardware
WORTH_MORE = 1.005  # below this ratio of tokens/s two plans count as equal
NOTHING = 0.05  # percent: smaller gains by other hardware are not listed
LUMPY = 1.5  # times the mean fragment: then one large tensor decides how long an exchange takes
MORE_OFTEN = "but learners exchange less often"
COARSER = "but deltas and versions are rounded more"
Again = Callable[[RunSettings, Inventory], Plan]


def alternatives(plan: Plan, again: Again) -> tuple[Alternative, ...]:
    """Another codec, a longer round, fewer fragments, a larger quorum, the other way to mix, each through `again`;
    and synchronous training on the same islands."""
    changes = _settings(plan)[: FEW_SETTINGS if len(plan.inventory.islands) > MANY_ISLANDS else None]
    found = [_alternative(plan, name, sync, price, again) for name, sync, price in changes]
    p = plan.prediction
    shares = f"{100 * p.synchronous_goodput:.1f} % of ideal against {100 * p.goodput:.1f} %"
    reason = f"{shares}: every step waits for the slowest link and for every absent island"
    if len(plan.islands) == 1:
        reason = f"{shares}: a single island has no other to exchange with"
    total = p.synchronous_days_to_target * 24 * plan.money.accelerators_per_h
    return (*found, Alternative("synchronous data-parallel", p.synchronous_tokens_per_s, reason, total))


def _settings(plan: Plan) -> list[tuple[str, SyncSettings, str]]:
    """(name, settings, what a gain would cost)."""
    sync, changes = plan.run.sync, []
    for codec in (codec for codec in known_codecs() if codec not in (sync.codec, "fp32")):
        coarser = CODEC_BITS[codec] < CODEC_BITS[sync.codec]
        other = replace(sync, codec=codec, weights_codec=codec)  # type: ignore[arg-type]
        changes.append((f"sync.codec={codec}", other, COARSER if coarser else "and they are rounded less"))
    if 2 * sync.every <= MAX_EVERY:
        changes.insert(1, (f"sync.every={2 * sync.every}", replace(sync, every=2 * sync.every), MORE_OFTEN))
    if sync.mixing not in KEEPS_IN_FLIGHT:
        how = "it keeps what is learned while a fragment is in flight, which the paper gives up"
        changes.append(("sync.mixing=rebase", replace(sync, mixing="rebase"), how))
    mean = plan.model.parameters / plan.schedule.fragments
    if not sync.split_rows and plan.schedule.fragment_parameters > LUMPY * mean:
        changes.append(("sync.split_rows=true", replace(sync, split_rows=True), "as the embedding travels in parts"))
    if plan.schedule.fragments > 1:
        half = max(1, plan.schedule.fragments // 2)
        changes.append((f"sync.fragments={half}", replace(sync, fragments=half), "in larger bursts"))
    majority = (len(plan.islands) + 1) // 2
    if majority > sync.quorum:
        changes.append((f"sync.quorum={majority}", replace(sync, quorum=majority), "and merges hold more of them"))
    return changes


def _alternative(plan: Plan, name: str, sync: SyncSettings, price: str, again: Again) -> Alternative:
    try:
        other = again(replace(plan.run, sync=sync), plan.inventory)
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


def sensitivities(plan: Plan, again: Again) -> tuple[Sensitivity, ...]:
    """The changes with an effect, the largest first."""
    limit = MAX_CHANGES if len(plan.inventory.islands) <= MANY_ISLANDS else FEW_CHANGES
    found = []
    for text, inventory in islice(_hardware(plan), limit):
        try:
            rate = again(plan.run, inventory).prediction.tokens_per_s
        except InfeasibleError:
            continue
        gain = 100 * (rate / plan.prediction.tokens_per_s - 1)
        if abs(gain) >= NOTHING:
            found.append(Sensitivity(text, rate, gain))
    return tuple(sorted(found, key=lambda item: (-abs(item.gain_percent), item.change)))


def _hardware(plan: Plan) -> Iterator[tuple[str, Inventory]]:
    """Changes that let left-out islands in; faster links; fewer failures; other speeds than guessed."""
    excluded = {island.name for island in plan.excluded}
    for island in plan.inventory.islands:
        if island.name in excluded and (faster := _carrying(island.link, plan)) is not None:
            yield f"{island.name} with {_link_text(island.link, faster)}", _with(plan, replace(island, link=faster))
    failing = [i for i in plan.inventory.islands if i.mtbf_s is not None and i.name not in excluded]
    if failing:
        calmer = [replace(i, mtbf_s=2 * i.mtbf_s) for i in failing if i.mtbf_s is not None]
        yield "every island failing half as often", _with(plan, *calmer)
        quicker = [replace(i, restart_s=i.restart_s / 2) for i in failing if i.restart_s is not None]
        if quicker:
            yield "every restart in half the time", _with(plan, *quicker)
    linked = [i for i in plan.inventory.islands if i.link.up_bps or i.link.down_bps]
    if linked:
        for factor, text in ((2.0, "every link twice as fast"), (0.5, "every link half as fast")):
            yield text, _with(plan, *(replace(i, link=_times(i.link, factor)) for i in linked))
    largest = max(plan.islands, key=lambda island: island.tokens_per_s)
    doubled = next(island for island in plan.inventory.islands if island.name == largest.name)
    if doubled.tokens_per_s is None:
        more = replace(doubled, nodes=2 * doubled.nodes, hosts=(), batch_tokens=2 * largest.batch_tokens)
        yield f"{largest.name} with twice the nodes and batch", _with(plan, more)
    if len(plan.islands) > 1:
        rest = tuple(island for island in plan.inventory.islands if island.name != largest.name)
        yield f"without {largest.name}", replace(plan.inventory, islands=rest)


def _carrying(link: Link, plan: Plan) -> Link | None:
    """The link that carries the plan's round, in two digits; None if it does already."""
    need = load_of_round(plan.model, plan.run.sync.codec, plan.run.sync.weights_codec, plan.run.train.inner)
    round_s = plan.schedule.round_s
    if need.shortest_round_s(link) <= round_s:
        return None
    return replace(
        link, up_bps=_enough(link.up_bps, need.up_bps(round_s)), down_bps=_enough(link.down_bps, need.down_bps(round_s))
    )


def _enough(have: float | None, needed: float) -> float | None:
    return have if have is None or have >= needed else rounded_up(needed, 2)


def _link_text(old: Link, new: Link) -> str:
    pairs = (("up", old.up_bps, new.up_bps), ("down", old.down_bps, new.down_bps))
    return " and ".join(f"{format_bandwidth(b)} {way}" for way, a, b in pairs if b is not None and a != b)


def _times(link: Link, factor: float) -> Link:
    return replace(link, up_bps=link.up_bps and factor * link.up_bps, down_bps=link.down_bps and factor * link.down_bps)


def _with(plan: Plan, *changed: IslandSettings) -> Inventory:
    by_name = {island.name: island for island in changed}
    return replace(plan.inventory, islands=tuple(by_name.get(i.name, i) for i in plan.inventory.islands))
