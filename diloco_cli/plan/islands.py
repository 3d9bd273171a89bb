"""Raw machines -> islands: which machines train together as one learner, and which cannot train at all.

Machines become one island if they share an interconnect (`fabric`), a kind of accelerator and a pace; a machine
without a fabric is an island of its own. Such a group is then split into as few equal islands as it takes

- to keep every accelerator busy: one step has at least one sequence for each;
- to stay available: a synchronous island stops with any of its machines, so its failures add up;

unless a part would no longer hold the model, or its link would no longer carry its round: then the group stays
together as far as it must. Whoever does not hold the model in any grouping is left out. The decisions do not depend
on anything but (run, inventory, model), and every machine ends up in exactly one place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from diloco_cli.config.hostlist import compress_hostlist
from diloco_cli.config.settings import RESERVED_NAMES, Inventory, RunSettings
from diloco_cli.plan.goodput import availability
from diloco_cli.plan.link import load_of_round
from diloco_cli.plan.machines import Group, Machine, groups, island_of
from diloco_cli.plan.memory import USABLE, Fit, fit_of_nodes
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Formed, LeftOut
from diloco_cli.plan.speed import island_speed

LOWEST_AVAILABILITY = 0.95  # below it a group of machines is split: what fails together should be small
MAX_NAME = 63

Part = tuple[Machine, ...]


@dataclass(frozen=True)
class Forming:
    """`inventory` holds no machines any more: the islands given, then those that were formed of them."""

    inventory: Inventory
    formed: tuple[Formed, ...]
    left_out: tuple[LeftOut, ...]


def form_islands(run: RunSettings, inventory: Inventory, model: ModelFacts) -> Forming:
    """Islands of all machines, in the order of the inventory. Without machines nothing changes."""
    if not inventory.machines:
        return Forming(inventory, (), ())
    islands = list(inventory.islands)
    formed: list[Formed] = []
    left_out: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    taken = {island.name for island in islands} | set(RESERVED_NAMES)
    for group in groups(inventory.machines):
        decision = _Decision(run, inventory, model, group)
        least = decision.least_machines()
        if least is None:
            left_out.setdefault(decision.why_left_out(), []).extend(machine.name for machine in group.machines)
            continue
        parts, why = decision.split(least)
        for number, part in enumerate(parts, start=1):
            name = _free_name(f"{group.base}-{number}" if len(parts) > 1 else group.base, taken)
            islands.append(island_of(name, part))
            formed.append(Formed(name, tuple(m.name for m in part), _reason(group, len(parts), least, why)))
    whole = dataclasses.replace(inventory, islands=tuple(islands), machines=())
    out = [LeftOut(compress_hostlist(names), reason, ways) for (reason, ways), names in left_out.items()]
    return Forming(whole, tuple(formed), tuple(out))


@dataclass(frozen=True)
class _Decision:
    """What becomes of one group."""

    run: RunSettings
    inventory: Inventory
    model: ModelFacts
    group: Group

    def least_machines(self) -> int | None:
        """The fewest of these machines that hold the model together; None if not even all of them do."""
        return _first(len(self.group.machines), lambda num: self._fit(num).fits)

    def _fit(self, num_machines: int) -> Fit:
        accelerators, batch_tokens = self.group.first.accelerators, self._batch_tokens()
        return fit_of_nodes(accelerators, num_machines, batch_tokens, self.run, self.inventory, self.model)

    def split(self, least: int) -> tuple[list[Part], str]:
        """(equal parts, why so many or why not more)."""
        machines = self.group.machines
        sequences = self._batch_tokens() // self.model.sequence
        largest = max(1, sequences // self.group.first.accelerators.count)  # machines that have a sequence for each
        too_few = "a step has too few sequences for more accelerators in one"
        reasons = [(math.ceil(len(machines) / largest), too_few)]
        together = availability(island_of("all", machines))
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
        tokens_per_s, _ = island_speed(island, self.inventory, self.model, self.run.train.precision)
        load = load_of_round(self.model, sync.codec, sync.broadcast, self.run.train.inner)
        return load.shortest_round_s(island.link) <= sync.every * (self._batch_tokens() / tokens_per_s)

    def why_left_out(self) -> tuple[str, tuple[str, ...]]:
        """Why not even all of the group's machines hold the model, and what would. Machines with the same answer are
        reported together."""
        first, num_machines = self.group.first, len(self.group.machines)
        have, need = num_machines * first.accelerators.count, self._fit(num_machines)
        whose = f"all of {first.fabric}" if first.fabric else "no fabric to other machines"
        reason = f"the model does not fit {have} x {first.accelerators.name} ({need.available_gb:g} GB each, {whose})"
        ways = [f"accelerators with at least {need.needed_gb / USABLE:.0f} GB"]
        if need.devices_needed:
            ways.insert(0, f"{math.ceil(need.devices_needed / first.accelerators.count)} such machines in one fabric")
        return reason, tuple(ways)


def _parts_for_availability(machines: Part) -> int:
    """The fewest equal parts that are all available often enough; one machine each if none are."""

    def enough(num: int) -> bool:
        return all(availability(island_of("part", p)) >= LOWEST_AVAILABILITY for p in _equal_parts(machines, num))

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
