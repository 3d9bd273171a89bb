"""How the answer would change with one thing: the plan is made again with it, its settings pinned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from diloco_cli.config.settings import Inventory, IslandSettings, Link
from diloco_cli.errors import InfeasibleError
from diloco_cli.plan.link import MBPS, load_of_round
from diloco_cli.plan.plan import Plan, Sensitivity
from diloco_cli.units import format_bandwidth

MOST_CHANGES = 8
MANY_ISLANDS = 200  # beyond it, only few changes are tried
FEW_CHANGES = 3
NOTHING = 0.05  # percent: smaller changes are not worth a line

Change = tuple[str, Inventory]


def sensitivities(plan: Plan, make: Callable[[Inventory], Plan]) -> tuple[Sensitivity, ...]:
    """The changes that matter, the largest first."""
    limit = MOST_CHANGES if len(plan.inventory.islands) <= MANY_ISLANDS else FEW_CHANGES
    found = []
    for (text, inventory), _ in zip(_changes(plan), range(limit), strict=False):
        try:
            rate = make(inventory).prediction.tokens_per_s
        except InfeasibleError:
            continue
        gain = 100 * (rate / plan.prediction.tokens_per_s - 1)
        if abs(gain) >= NOTHING:
            found.append(Sensitivity(text, rate, gain))
    return tuple(sorted(found, key=lambda item: (-abs(item.gain_percent), item.change)))


def _changes(plan: Plan) -> Iterator[Change]:
    """What lets left-out islands in; faster links; fewer failures; other speeds than guessed."""
    left_out = {island.name for island in plan.left_out}
    for island in plan.inventory.islands:
        if island.name in left_out and (faster := _carrying(island.link, plan)) is not None:
            yield f"{island.name} with {_link_text(island.link, faster)}", _with(plan, replace(island, link=faster))
    failing = [i for i in plan.inventory.islands if i.mtbf_s is not None and i.name not in left_out]
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
    doubled = _island(plan, largest.name)
    if doubled.tokens_per_s is None:
        more = replace(doubled, nodes=2 * doubled.nodes, hosts=(), batch_tokens=2 * largest.batch_tokens)
        yield f"{largest.name} with twice the nodes and batch", _with(plan, more)
    if len(plan.islands) > 1:
        rest = tuple(island for island in plan.inventory.islands if island.name != largest.name)
        yield f"without {largest.name}", replace(plan.inventory, islands=rest)


def _carrying(link: Link, plan: Plan) -> Link | None:
    """The link that carries the plan's round, in two digits; None if it does already."""
    need = load_of_round(plan.model, plan.run.sync.codec, plan.run.sync.broadcast, plan.run.train.inner)
    round_s = plan.schedule.round_s
    if need.shortest_round_s(link) <= round_s:
        return None
    return replace(
        link, up_bps=_enough(link.up_bps, need.up_bps(round_s)), down_bps=_enough(link.down_bps, need.down_bps(round_s))
    )


def _enough(have: float | None, needed: float) -> float | None:
    if have is None or have >= needed:
        return have
    unit = 10.0 ** (math.floor(math.log10(needed / MBPS)) - 1) * MBPS
    return math.ceil(needed / unit) * unit


def _link_text(old: Link, new: Link) -> str:
    pairs = (("up", old.up_bps, new.up_bps), ("down", old.down_bps, new.down_bps))
    return " and ".join(f"{format_bandwidth(b)} {way}" for way, a, b in pairs if b is not None and a != b)


def _times(link: Link, factor: float) -> Link:
    return replace(
        link,
        up_bps=None if link.up_bps is None else factor * link.up_bps,
        down_bps=None if link.down_bps is None else factor * link.down_bps,
    )


def _island(plan: Plan, name: str) -> IslandSettings:
    return next(island for island in plan.inventory.islands if island.name == name)


def _with(plan: Plan, *changed: IslandSettings) -> Inventory:
    by_name = {island.name: island for island in changed}
    return replace(plan.inventory, islands=tuple(by_name.get(i.name, i) for i in plan.inventory.islands))
