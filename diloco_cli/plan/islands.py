"""Raw machines -> islands: which machines train together as one learner, and which cannot train at all.

Machines become one island if they share an interconnect (`fabric`), a kind of accelerator and a pace; a machine
without a fabric is an island of its own. Such a group is then split into as few equal islands as it takes

- to keep every accelerator busy: one step has at least one sequence for each;
- to stay available: a synchronous island stops with any of its machines, so its failures add up;

unless a part would no longer hold the model, or its link would no longer carry its round: then the group is split into
fewer parts. A machine that does not hold the model in any grouping is excluded. The decisions depend on (run,
inventory, model) alone, and every machine is in exactly one island or excluded.

`groups`: the machines that may train together; `island_of`: the island of some machines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Fabric, compress_hostlist, fabric_kind
from diloco_cli.config.models import ModelFacts
from diloco_cli.config.settings import (
    RESERVED_NAMES,
    Inventory,
    IslandSettings,
    MachineSettings,
    RunSettings,
)
from diloco_cli.plan.candidates import availability_of, island_speed
from diloco_cli.plan.link import load_of_round, reached
from diloco_cli.plan.memory import USABLE, Fit, fit_of_nodes
from diloco_cli.plan.plan import Excluded, Formed

SAME_PACE = 0.9  # of the fastest: slower machines stay apart, as an island runs at its slowest's pace
NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
LOWEST_AVAILABILITY = 0.95  # a group of machines with less is split, so that fewer machines fail together
MAX_NAME = 63


@dataclass(frozen=True)
class Machine:
    """One machine and the entry of the inventory it comes from."""

    name: str
    entry: MachineSettings


@dataclass(frozen=True)
class Group:
    """Machines that may become one island. `base` is the island's name, `why_apart` says why other machines of the same
    fabric are not in the group."""

    base: str
    machines: tuple[Machine, ...]
    why_apart: str = ""

    @property
    def first(self) -> MachineSettings:
        """The first machine, for the common values: region, fabric, accelerators, infra, batch_tokens."""
        return self.machines[0].entry


def groups(entries: Sequence[MachineSettings]) -> Iterator[Group]:
    """Every machine in exactly one group; a fabric's groups come at the place of its first machine."""
    fabrics: dict[str, dict[tuple[object, ...], list[Machine]]] = {}
    order: list[Machine | str] = []
    for entry in entries:
        if entry.fabric is None:
            order += _machines(entry)
            continue
        if entry.fabric not in fabrics:
            order.append(entry.fabric)
        fabrics.setdefault(entry.fabric, {}).setdefault(_kind(entry), []).extend(_machines(entry))
    for item in order:
        if isinstance(item, Machine):
            yield Group(_as_name(item.name), (item,))
        else:
            yield from _groups_of_fabric(item, list(fabrics[item].values()))


def _groups_of_fabric(fabric: str, kinds: Sequence[list[Machine]]) -> Iterator[Group]:
    base = _as_name(fabric)
    several = f"{fabric} holds {len(kinds)} kinds of machines, and one island has one kind" if len(kinds) > 1 else ""
    for machines in kinds:
        name = f"{base}-{_as_name(machines[0].entry.accelerators.name)}" if len(kinds) > 1 else base
        paces = list(_by_pace(machines))
        apart = f"differs by more than {100 * (1 - SAME_PACE):.0f} % or is unknown"
        slower = f"apart from machines of {fabric} whose pace {apart}"
        for number, members in enumerate(paces, start=1):
            if len(paces) > 1:
                yield Group(f"{name}-{number}", tuple(members), slower)
            else:
                yield Group(name, tuple(members), several)


def _kind(entry: MachineSettings) -> tuple[object, ...]:
    """The values that machines of one island must have in common."""
    return (entry.accelerators, entry.infra, entry.batch_tokens, entry.region)


def _by_pace(machines: list[Machine]) -> Iterator[list[Machine]]:
    """Fastest first, each group within `SAME_PACE` of its fastest. Machines without a stated speed count as equal;
    speeds that are stated in different ways cannot be compared."""
    comparable: dict[str, list[Machine]] = {}
    for machine in machines:
        comparable.setdefault(_stated(machine.entry), []).append(machine)
    for alike in comparable.values():
        group: list[Machine] = []
        for machine in sorted(alike, key=lambda machine: -_pace(machine.entry)):
            if group and _pace(machine.entry) < SAME_PACE * _pace(group[0].entry):
                yield group
                group = []
            group.append(machine)
        yield group


def _stated(entry: MachineSettings) -> str:
    """The key that states the machine's speed."""
    return "tokens_per_s" if entry.tokens_per_s is not None else "mfu" if entry.mfu is not None else ""


def _pace(entry: MachineSettings) -> float:
    """A relative speed within one kind."""
    return (entry.tokens_per_s or entry.mfu or 1.0) / entry.slowdown


def _machines(entry: MachineSettings) -> list[Machine]:
    """Hosts by their names; machines chosen by a scheduler as rack/1, rack/2 and so on."""
    picked = [str(entry.name)] if entry.nodes == 1 else [f"{entry.name}/{n}" for n in range(1, entry.nodes + 1)]
    return [Machine(name, entry) for name in entry.hosts or picked]


def island_of(name: str, machines: Sequence[Machine]) -> IslandSettings:
    """Failure rates and prices add up; the speed is the slowest machine's. The machine with the fastest link does the
    island's exchange and comes first among the hosts."""
    links = [machine.entry.link for machine in machines]  # one that is unknown counts as fast enough, as everywhere
    widths = [(link.up_bps or math.inf, link.down_bps or math.inf) for link in links]
    head = machines[widths.index(max(widths))]
    entry, entries = head.entry, [machine.entry for machine in machines]
    speeds = [item.tokens_per_s for item in entries if item.tokens_per_s is not None]
    mfus = [item.mfu for item in entries if item.mfu is not None]
    others = [machine.name for machine in machines if machine is not head]
    failures_per_s = math.fsum(1 / item.mtbf_s for item in entries if item.mtbf_s)  # independent: rates add up
    return IslandSettings(
        name=name,
        region=entry.region,
        accelerators=entry.accelerators,
        infra=entry.infra,
        hosts=(head.name, *others) if all(item.hosts for item in entries) else (),
        nodes=len(machines),
        fabric=Fabric(kind) if (kind := fabric_kind(entry.fabric)) else None,
        link=entry.link,
        mtbf_s=1 / failures_per_s if failures_per_s else None,
        restart_s=max((item.restart_s for item in entries if item.restart_s is not None), default=None),
        price_per_h=math.fsum(item.price_per_h for item in entries),
        egress_per_gb=entry.egress_per_gb,
        slowdown=max(item.slowdown for item in entries),
        batch_tokens=entry.batch_tokens,
        mfu=min(mfus) if len(mfus) == len(entries) else None,
        tokens_per_s=len(entries) * min(speeds) if len(speeds) == len(entries) else None,
    )


def _as_name(text: str) -> str:
    """`user@Box_1.lan` -> box-1-lan; the user is no part of it."""
    return NOT_IN_NAMES.sub("-", text.rpartition("@")[2].lower()).strip("-") or "island"


Part = tuple[Machine, ...]


@dataclass(frozen=True)
class Forming:
    """`inventory` without machines: the given islands, then those formed of machines."""

    inventory: Inventory
    formed: tuple[Formed, ...]
    excluded: tuple[Excluded, ...]


def form_islands(run: RunSettings, inventory: Inventory, model: ModelFacts) -> Forming:
    """Islands of all machines, in the order of the inventory. Without machines nothing changes."""
    if not inventory.machines:
        return Forming(inventory, (), ())
    islands = list(inventory.islands)
    formed: list[Formed] = []
    excluded: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    taken = {island.name for island in islands} | set(RESERVED_NAMES)
    for group in groups(inventory.machines):
        decision = _Decision(run, inventory, model, group)
        least = decision.least_machines()
        if least is None:
            excluded.setdefault(decision.why_excluded(), []).extend(machine.name for machine in group.machines)
            continue
        parts, why = decision.split(least)
        for number, part in enumerate(parts, start=1):
            name = _free_name(f"{group.base}-{number}" if len(parts) > 1 else group.base, taken)
            islands.append(island_of(name, part))
            formed.append(Formed(name, tuple(m.name for m in part), _reason(group, len(parts), least, why)))
    whole = replace(inventory, islands=tuple(islands), machines=())
    out = [Excluded(compress_hostlist(names), reason, ways) for (reason, ways), names in excluded.items()]
    return Forming(whole, tuple(formed), tuple(out))


@dataclass(frozen=True)
class _Decision:
    """The decision on one group."""

    run: RunSettings
    inventory: Inventory
    model: ModelFacts
    group: Group

    def least_machines(self) -> int | None:
        """The fewest of these machines that hold the model together; None if not even all of them do."""
        return _first(len(self.group.machines), lambda num: self._fit(num).fits)

    def _fit(self, num_machines: int) -> Fit:
        accelerators, batch_tokens = self.group.first.accelerators, self._batch_tokens()
        ranks = num_machines * accelerators.num_ranks
        return fit_of_nodes(accelerators, num_machines, ranks, batch_tokens, self.run, self.inventory, self.model)

    def split(self, least: int) -> tuple[list[Part], str]:
        """(equal parts, why so many or why not more)."""
        machines = self.group.machines
        sequences = self._batch_tokens() // self.model.sequence
        largest = max(1, sequences // self.group.first.accelerators.count)  # machines that have a sequence for each
        too_few = "a step has too few sequences for more accelerators in one"
        reasons = [(math.ceil(len(machines) / largest), too_few)]
        together = availability_of(island_of("all", machines))
        if together < LOWEST_AVAILABILITY:
            why = f"failing together, all {len(machines)} would be available {100 * together:.0f} % of the time"
            reasons.append((_parts_for_availability(machines), why))
        wanted, why = max(reasons, key=lambda reason: reason[0])
        if wanted == 1:
            return [machines], ""
        num = min(wanted, len(machines) // least)
        if num < wanted:
            why += f", but {least} are needed to hold the model"
        parts = _equal_parts(machines, num)
        if num > 1 and not all(map(self._link_carries, parts)):
            return [machines], f"together, although {why}: the links of smaller islands would not carry their rounds"
        return parts, why

    def _batch_tokens(self) -> int:
        return self.group.first.batch_tokens or self.run.train.batch_tokens

    def _link_carries(self, part: Part) -> bool:
        """Does the part's link carry the round that the part itself would set?"""
        island, sync = island_of("part", part), self.run.sync
        tokens_per_s, _ = island_speed(island, self.inventory, self.model, self.run.train)
        load = load_of_round(self.model, sync, self.run.train.inner)
        link = reached(island.link, self.inventory.store.url)
        return load.shortest_round_s(link) <= sync.every * (self._batch_tokens() / tokens_per_s)

    def why_excluded(self) -> tuple[str, tuple[str, ...]]:
        """Why all of the group's machines together do not hold the model, and what would. Machines with the same answer
        are reported together."""
        first, num_machines = self.group.first, len(self.group.machines)
        have, need = num_machines * first.accelerators.count, self._fit(num_machines)
        whose = f"all of {first.fabric}" if first.fabric else "no fabric to other machines"
        reason = f"the model does not fit {have} x {first.accelerators.name} ({need.available_gb:g} GB each, {whose})"
        ways = [f"accelerators with at least {need.needed_gb / USABLE:.0f} GB"]
        if need.devices_needed:
            ways.insert(0, f"{math.ceil(need.devices_needed / first.accelerators.count)} such machines in one fabric")
        return reason, tuple(ways)


def _parts_for_availability(machines: Part) -> int:
    """The fewest equal parts that all have LOWEST_AVAILABILITY; one machine each if there are none."""

    def enough(num: int) -> bool:
        return all(availability_of(island_of("part", p)) >= LOWEST_AVAILABILITY for p in _equal_parts(machines, num))

    return _first(len(machines), enough) or len(machines)


def _first(most: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest number from 1 to `most` for which `holds`, if it holds from there on; None if it never does."""
    if not holds(most):
        return None
    low, high = 0, most  # holds(high), not holds(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _equal_parts(machines: Part, num: int) -> list[Part]:
    """Neighbours in order; sizes differ by one at most."""
    size, larger = divmod(len(machines), num)
    cuts = [index * size + min(index, larger) for index in range(num + 1)]
    return [machines[low:high] for low, high in pairwise(cuts)]


def _reason(group: Group, num_parts: int, least: int, why_split: str) -> str:
    """Why these machines are one island, for people."""
    fabric, count = group.first.fabric, len(group.machines)
    if fabric is None:
        parts = ["an island of its own: no fabric joins it to others"]
    elif num_parts > 1:
        parts = [f"one of {num_parts} islands of {count} machines in {fabric}"]
    else:
        parts = [
            f"all {count} machines of one kind in {fabric}" if count > 1 else f"the only one of its kind in {fabric}"
        ]
    if least > 1 and "hold the model" not in why_split:
        parts.append(f"{least} are needed to hold the model")
    return "; ".join([*parts, *filter(None, (why_split, group.why_apart))])


def _free_name(wanted: str, taken: set[str]) -> str:
    """The name, or the first with a number behind it that is not taken; from now on it is."""
    name, number = wanted[:MAX_NAME], 1
    while name in taken:
        number += 1
        name = f"{wanted[: MAX_NAME - 6]}-{number}"
    taken.add(name)
    return name
