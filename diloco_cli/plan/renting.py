"""What to rent: machines of a table of prices beside the hardware that is there, each number of the best of them
planned as every plan is.

A proposal is of one row of the table alone. Its machines are taken to have fast links to each other, and are grouped
into islands as `machines:` of an inventory are (islands.py): many spot machines, which would fail together, are several
islands."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators, Device, resolve
from diloco_cli.config.models import ModelFacts
from diloco_cli.config.prices import NEEDED, Rentable
from diloco_cli.config.settings import Inventory, IslandSettings, MachineSettings, RunSettings
from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.plan.candidates import availability_of, island_speed, not_launched
from diloco_cli.plan.flow import DAY_S
from diloco_cli.plan.islands import form_islands, groups, island_of
from diloco_cli.plan.plan import Goal, Plan
from diloco_cli.plan.planner import make_plan, outline
from diloco_cli.quantities import some_of

NAME = "rented"  # of the machines, and so of their islands
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of machines of one row
KINDS, REGIONS = 3, 2  # of accelerators, and of regions with each kind, that are planned: the cheapest by their speed
PASSED_OVER = 2  # numbers of machines in a row that are no better, after which larger ones are not tried
SPOT_MTBF_S = DAY_S  # of one machine, guessed
SPOT_RESTART_S = 600.0  # guessed: another machine, and what runs on it
EGRESS_PER_GB = 0.09  # of large clouds, where the inventory has no price of the region


WISH = re.compile(
    r"(?P<accelerators>[A-Za-z][\w.-]*:\d+)(?:@(?P<region>[\w-]+))?(?: x(?P<machines>\d{1,4}))?(?P<spot> spot)?"
)


@dataclass(frozen=True)
class Wish:
    """What is asked for; None: whatever is best."""

    accelerators: Accelerators | None = None
    region: str | None = None
    machines: int | None = None
    spot: bool | None = None

    def allows(self, machine: Rentable) -> bool:
        return (
            self.accelerators in (None, machine.accelerators)
            and self.region in (None, machine.region)
            and self.spot in (None, machine.spot)
        )


def read_wish(text: str, devices: Mapping[str, Device]) -> Wish:
    """`auto`, or `H100:8@us-east-2 x4 spot`. Raises UsageError for anything else."""
    if text == "auto":
        return Wish()
    match = WISH.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--add must be auto or accelerators of a machine, not '{text}'",
            hint="--add 'H100-SXM:8', and where wanted its region, how many, spot: 'H100-SXM:8@us-east-2 x4 spot'",
        )
    name, _, count = match["accelerators"].partition(":")
    machines = int(match["machines"]) if match["machines"] else None
    if machines == 0:
        raise UsageError("--add: at least one machine, not x0")
    accelerators = resolve(Accelerators(name, int(count)), devices)
    return Wish(accelerators, match["region"] and match["region"].lower(), machines, True if match["spot"] else None)


@dataclass(frozen=True)
class Rented:
    """So many machines of a row of the table, `entry` in an inventory, and a plan with them."""

    machine: Rentable
    entry: MachineSettings
    plan: Plan

    @property
    def count(self) -> int:
        return self.entry.nodes


@dataclass(frozen=True)
class Rental:
    """What machines are rented for: the run, and what there is already."""

    run: RunSettings
    inventory: Inventory
    model: ModelFacts
    origins: Mapping[str, str]

    @cached_property
    def now(self) -> Plan | None:
        """The fastest without anything rented; None if there is nothing that can train."""
        return self.planned(self.inventory, Goal())

    def planned(self, inventory: Inventory, goal: Goal) -> Plan | None:
        try:
            return outline(self.run, inventory, self.model, goal, self.origins)
        except InfeasibleError:
            return None

    def goal_without(self, goal: Goal) -> Goal:
        """Where nothing of what is there has a price, the fastest plan is the cheapest."""
        has_prices = any(item.price_per_h or item.egress_per_gb for item in self._there)
        return goal if has_prices or goal.objective != "cost" else replace(goal, objective="tokens")

    def proposals(self, machines: Sequence[Rentable], wish: Wish, goal: Goal) -> Iterator[Rented]:
        """The best number of each machine that is worth a look, but for those beyond several that are no
        better."""
        allowed = [machine for machine in machines if wish.allows(machine)]
        for machine in self.worth_a_look(allowed, wish.machines or COUNTS[-1], goal):
            best: Rented | None = None
            no_better = 0
            for count in (wish.machines,) if wish.machines else COUNTS:
                found = None if self._too_slow(machine, count, goal) else self.rented(machine, count, goal)
                if found and (best is None or rank(found.plan, goal) < rank(best.plan, goal)):
                    best, no_better = found, 0
                else:
                    no_better += best is not None
                if no_better == PASSED_OVER:
                    break
            if best is not None:
                yield best

    def worth_a_look(self, machines: Sequence[Rentable], most: int, goal: Goal) -> list[Rentable]:
        """Of those that `most` of hold the model and could meet the deadline, the kinds with the cheapest
        tokens; of these, on demand and spot, each size in the cheapest regions and the store's."""
        enough = [
            machine
            for machine in machines
            if not self._too_slow(machine, most, goal) and self._hold_the_model(machine, most)
        ]
        price = {machine: machine.price_per_h / speed for machine in enough if (speed := self._speed(machine))}
        ranked = sorted(price, key=lambda machine: (price[machine], machine.instance, machine.region))
        kinds = list(dict.fromkeys(machine.accelerators.name for machine in ranked))[:KINDS]
        taken: dict[tuple[object, ...], list[Rentable]] = {}
        for machine in ranked:
            of_kind = taken.setdefault((machine.accelerators, machine.spot), [])
            new = machine.region not in {other.region for other in of_kind}
            near = len(of_kind) < REGIONS or machine.region == self.inventory.store.region
            if machine.accelerators.name in kinds and new and near:
                of_kind.append(machine)
        return [machine for of_kind in taken.values() for machine in of_kind]

    def rented(self, machine: Rentable, count: int, goal: Goal) -> Rented | None:
        """None if no plan with all of them is within the goal's limits, or the best one does without them."""
        entry = self.entry(machine, count)
        plan = self.planned(self.with_rented(entry), goal)
        if plan is None:
            return None
        return Rented(machine, entry, plan) if self.rented_in(plan) == count else None

    def rented_in(self, plan: Plan) -> int:
        """How many rented machines take part."""
        return sum(island.nodes for island in plan.islands if island.name not in self._present)

    def why_not(self, machine: Rentable, count: int, goal: Goal) -> InfeasibleError:
        """Why these machines would not take part, whatever the limits."""
        try:
            plan = make_plan(self.run, self.with_rented(self.entry(machine, count)), self.model, goal, self.origins)
        except InfeasibleError as error:
            return error
        left_out = [item for item in plan.excluded if item.name not in self._present]
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in left_out) or "the fastest plan is without"
        ways = [way for item in left_out for way in item.suggestions]
        return InfeasibleError(f"these machines would not take part: {reasons}", hint=" or ".join(ways[:2]) or None)

    def with_rented(self, entry: MachineSettings) -> Inventory:
        return replace(self.inventory, machines=(*self.inventory.machines, entry))

    def entry(self, machine: Rentable, count: int) -> MachineSettings:
        often, name = machine.interruptions_per_day, self._free_name
        lasts_s = SPOT_MTBF_S if often is None else DAY_S / often if often else None
        priced = getattr(self.inventory.regions.get(machine.region), "egress_per_gb", None) is not None
        return MachineSettings(
            region=machine.region,
            accelerators=machine.accelerators,
            name=name,
            nodes=count,
            fabric=name,
            infra="ssh",
            mtbf_s=lasts_s if machine.spot else None,
            restart_s=SPOT_RESTART_S if machine.spot else None,
            price_per_h=machine.price_per_h,
            egress_per_gb=None if priced else EGRESS_PER_GB,
        )

    @property
    def _there(self) -> Iterator[IslandSettings | MachineSettings]:
        yield from self.inventory.islands
        yield from self.inventory.machines

    @cached_property
    def _present(self) -> set[str]:
        """The islands of what is there."""
        return {island.name for island in form_islands(self.run, self.inventory, self.model).inventory.islands}

    @cached_property
    def _free_name(self) -> str:
        taken = {item.name for item in self._there}
        taken |= {machine.fabric for machine in self.inventory.machines}
        return next(name for name in (NAME, *(f"{NAME}-{n}" for n in range(2, len(taken) + 3))) if name not in taken)

    def _speed(self, machine: Rentable) -> float:
        """Tokens a second of one machine, those of its absences taken off; 0: learners do not train on it."""
        (group,) = groups([self.entry(machine, 1)])
        island = island_of(NAME, group.machines)
        if not_launched(island, self.inventory) is not None:
            return 0.0
        try:
            return availability_of(island) * island_speed(island, self.inventory, self.model, self.run.train)[0]
        except UsageError:
            return 0.0

    def _too_slow(self, machine: Rentable, count: int, goal: Goal) -> bool:
        """Whether even undisturbed they would not meet the deadline."""
        ideal = (self.now.prediction.tokens_per_s_ideal if self.now else 0.0) + count * self._speed(machine)
        return goal.deadline_s is not None and self.run.train.tokens > ideal * goal.deadline_s

    def _hold_the_model(self, machine: Rentable, count: int) -> bool:
        alone = replace(self.inventory, islands=(), machines=(self.entry(machine, count),))
        return bool(form_islands(self.run, alone, self.model).inventory.islands)


def rank(plan: Plan, goal: Goal) -> tuple[float, ...]:
    """By the goal, the smallest is the best; those that their syncer holds come first."""
    days, money, late = plan.prediction.days_to_target, plan.money.total, plan.syncer.busy_percent > 100
    if goal.objective == "loss":
        return late, plan.prediction.loss_percent or 0.0, money, days
    return (late, money, days) if goal.objective == "cost" else (late, days, money)


@dataclass(frozen=True)
class Renting:
    """Proposals, the best first; none where what is there is better. `now`: the fastest plan of what is there;
    `inventory` and `goal`: of the plan with the best proposal."""

    proposals: tuple[Rented, ...]
    now: Plan | None
    inventory: Inventory
    goal: Goal

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        now = self.now and {"days_to_target": self.now.prediction.days_to_target, "total": self.now.money.total}
        return {"now": now, "proposals": [_plain(rented) for rented in self.proposals]}


def _plain(rented: Rented) -> dict[str, Any]:
    machine, plan = rented.machine, rented.plan
    return {
        "instance": machine.instance,
        "accelerators": f"{machine.accelerators.name}:{machine.accelerators.count}",
        "region": machine.region,
        "zone": machine.zone,
        "spot": machine.spot,
        "price_per_h": machine.price_per_h,
        "machines": rented.count,
        "days_to_target": plan.prediction.days_to_target,
        "total": plan.money.total,
        "loss_percent": plan.prediction.loss_percent,
    }


def renting(rental: Rental, machines: Sequence[Rentable], wish: Wish, goal: Goal, where: str) -> Renting:
    """Raises UsageError where nothing is listed as wished, InfeasibleError where nothing of it meets the goal."""
    allowed = [machine for machine in machines if wish.allows(machine)]
    is_limited = goal.has_budget or goal.deadline_s is not None
    if not allowed:
        raise _not_listed(machines, wish, where)
    if wish == Wish() and not is_limited:
        raise UsageError("--add auto: until when, or for how much?", hint="--deadline '3 d', or --budget 5000/run")
    if not is_limited:
        wish = dataclasses.replace(wish, machines=wish.machines or 1)
    found = sorted(rental.proposals(allowed, wish, goal), key=lambda rented: rank(rented.plan, goal))
    own_goal = rental.goal_without(goal)
    enough = rental.planned(rental.inventory, own_goal)
    is_free = own_goal != goal
    if (
        not found
        and (wish != Wish() or not enough)
        and next(rental.proposals(allowed, wish, goal.fastest), None) is None
    ):
        raise rental.why_not(allowed[0], wish.machines or 1, goal.fastest)
    if enough and (not found or (wish == Wish() and (is_free or rank(enough, goal) <= rank(found[0].plan, goal)))):
        return Renting((), rental.now, rental.inventory, own_goal)
    if not found:
        raise _out_of_reach(rental, allowed, wish, goal)
    return Renting(tuple(found), rental.now, rental.with_rented(found[0].entry), goal)


def made(rental: Rental, chosen: Renting) -> tuple[Plan, Renting]:
    """The plan by the whole search, and what is rented for it: it may leave out some or all of what the short search
    of a proposal took."""
    for place, rented in enumerate(chosen.proposals, start=1):
        count = rented.count
        while count:
            entry = rental.entry(rented.machine, count)
            inventory = rental.with_rented(entry)
            plan = make_plan(rental.run, inventory, rental.model, chosen.goal, rental.origins)
            taken = rental.rented_in(plan)
            if taken == count:
                best = Rented(rented.machine, entry, plan)
                return plan, Renting((best, *chosen.proposals[place:]), chosen.now, inventory, chosen.goal)
            count = taken
    goal = rental.goal_without(chosen.goal)
    plan = make_plan(rental.run, rental.inventory, rental.model, goal, rental.origins)
    return plan, Renting((), chosen.now, rental.inventory, goal)


def _not_listed(machines: Sequence[Rentable], wish: Wish, where: str) -> UsageError:
    """What is listed of the same kind, or at all."""
    kind = wish.accelerators and wish.accelerators.name
    same = [machine for machine in machines if machine.accelerators.name == kind]
    alike = [machine for machine in same if machine.accelerators == wish.accelerators] or same
    known = dict.fromkeys(
        f"{o.accelerators.name}:{o.accelerators.count}@{o.region}{' spot' * o.spot}" for o in alike or machines
    )
    listed = f"listed are {', '.join(known) if alike else some_of(list(known))}"
    own = f"a price of your own: --prices FILE, a CSV that begins with {','.join(NEEDED)}"
    return UsageError("no such machine is listed", where=where, hint=f"{listed}; {own}")


def _out_of_reach(rental: Rental, machines: Sequence[Rentable], wish: Wish, goal: Goal) -> InfeasibleError:
    """With a limit that something meets."""
    most = wish.machines or COUNTS[-1]
    head = f"nothing of what is listed meets the goal, with at most {most} machine{'s' * (most > 1)} of one kind"

    def plans(other: Goal) -> list[Plan]:
        return [rented.plan for rented in rental.proposals(machines, wish, other)]

    way = "a later --deadline with a larger --budget"
    if goal.deadline_s is not None and (later := plans(replace(goal, objective="tokens", deadline_s=None))):
        days = min(plan.prediction.days_to_target for plan in later)
        way = f"--deadline '{math.ceil(100 * days) / 100:g} d'"
    elif goal.has_budget and (dearer := plans(replace(goal.fastest, objective="cost", deadline_s=goal.deadline_s))):
        per = "run" if goal.budget_per_h is None else "h"
        least = min(plan.money.total if per == "run" else plan.money.per_h for plan in dearer)
        way = f"--budget {math.ceil(least)}/{per}"
    return InfeasibleError(head, hint=f"{way}, or a smaller train.tokens")
