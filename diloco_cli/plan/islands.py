"""Raw machines -> islands: which machines train together as one learner, and which cannot train at all.

Machines become one island if they share an interconnect (`fabric`), a kind of accelerator and a pace; a machine
without a fabric is an island of its own. Such a group is then split into as few equal islands as it takes

- to keep every accelerator busy: one step has at least one sequence for each;
- to stay available: a synchronous island stops with any of its machines, so its failures add up;

unless a part would no longer hold the model, or its link would no longer carry its round: then the group is split into
fewer parts. A machine that does not hold the model in any grouping is excluded. The decisions depend on (run,
inventory, model) alone, and every machine is in exactly one island or excluded.

`groups`: the machines that may train together; `island_of`: the island of some machines.

Which islands, which codec, H, fragments and quorum: exact while there are few combinations, greedy beyond.

Only settings that the user did not pin are searched. Every combination is evaluated by `flow.run_fleet`, as the plan
itself is; the evaluations of single islands are bounded, so that ten thousand islands take no longer than ten."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import compress_hostlist
from diloco_cli.config.models import ModelFacts
from diloco_cli.config.settings import (
    RESERVED_NAMES,
    Inventory,
    IslandSettings,
    Link,
    MachineSettings,
    RunSettings,
    SyncSettings,
)
from diloco_cli.plan.candidates import Candidate, availability_of, island_speed
from diloco_cli.plan.flow import MAX_EVERY, Fleet, costs, run_fleet
from diloco_cli.plan.link import CODEC_BITS, Need, load_of_round, reached
from diloco_cli.plan.memory import USABLE, Fit, fit_of_nodes
from diloco_cli.plan.plan import Excluded, Formed, Goal

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
    head = max(machines, key=lambda machine: _width(machine.entry.link))
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


def _width(link: Link) -> tuple[float, float]:
    """An unknown link counts as fast enough, as everywhere in planning."""
    return (link.up_bps or math.inf, link.down_bps or math.inf)


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
        load = load_of_round(self.model, sync.codec, sync.weights_codec, self.run.train.inner)
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


SEARCHED = ("codec", "weights_codec", "every", "fragments", "quorum")  # keys of `sync`
MAX_WORK = 30_000  # evaluations of one island
MAX_FOR_SETTINGS = 0.5  # of the work of the greedy search; the rest goes into choosing islands
LEAST_EVALUATIONS = 8  # of a whole fleet, however large
MAX_EXACT = 16  # islands of which every set may be tried
MANY_ISLANDS = 32  # beyond it, the quorum is not searched: of so many islands one is always present
WORTH_A_CHANGE = 1.002
"""A setting other than the first one, and a fleet of fewer islands, must be better by this factor."""
LONGER = (1, 2, 4, 8, 16, 32)
FEWER_FRAGMENTS = (1.0, 0.5, 0.25, 2.0)
NUMBERS_AT_ONCE = 16
PACE_SETTERS = (1, 2, 4, 8)  # how many islands with the shortest steps the greedy search tries to leave out


@dataclass(frozen=True)
class Space:
    """The values to choose from, the run's own first. `everys` None: those that the links need."""

    codecs: tuple[tuple[str, str], ...]
    everys: tuple[int, ...] | None
    fragments: tuple[int, ...]
    quorum_free: bool

    def quorums(self, num_islands: int, pinned: int) -> tuple[int, ...]:
        if not self.quorum_free:
            return (pinned,)
        if num_islands > MANY_ISLANDS:
            return (1,)
        return tuple(dict.fromkeys((1, (num_islands + 1) // 2, num_islands)))


def space_of(sync: SyncSettings, free: frozenset[str], model: ModelFacts) -> Space:
    """The search space; `free`: names of `SEARCHED` that the user did not pin."""
    smaller = [codec for codec in CODEC_BITS if codec != "fp32"]
    ups = dict.fromkeys((sync.codec, *smaller)) if "codec" in free else (sync.codec,)
    downs = dict.fromkeys((sync.weights_codec, *smaller)) if "weights_codec" in free else (sync.weights_codec,)
    both = {"codec", "weights_codec"} <= free
    pairs = [(up, up) for up in ups] if both else list(product(ups, downs))
    counts = [max(1, round(sync.fragments * factor)) for factor in FEWER_FRAGMENTS] if "fragments" in free else []
    fragments = dict.fromkeys((sync.fragments, *(count for count in counts if model.fragments(count).count == count)))
    return Space(
        codecs=tuple(dict.fromkeys(((sync.codec, sync.weights_codec), *pairs))),
        everys=None if "every" in free else (sync.every,),
        fragments=tuple(fragments),
        quorum_free="quorum" in free,
    )


def score(fleet: Fleet, run: RunSettings, model: ModelFacts, goal: Goal) -> float | None:
    """A fleet's score by the goal, larger is better; None if it breaks a limit."""
    days_s = run.train.tokens / fleet.tokens_per_s
    if goal.deadline_s is not None and days_s > goal.deadline_s:
        return None
    if goal.objective == "tokens" and goal.budget_per_h is None and goal.budget_total is None:
        return fleet.effective_tokens_per_s
    money = costs(fleet, run, model)
    if goal.budget_per_h is not None and money.per_h > goal.budget_per_h:
        return None
    if goal.budget_total is not None and money.total > goal.budget_total:
        return None
    if goal.objective == "tokens":
        return fleet.effective_tokens_per_s
    return fleet.effective_tokens_per_s / (money.total * fleet.tokens_per_s) if money.total else None


def search(
    everyone: Sequence[Candidate],
    run: RunSettings,
    model: ModelFacts,
    free: frozenset[str],
    goal: Goal,
    max_work: int = MAX_WORK,
    start: frozenset[str] = frozenset(),
) -> Fleet | None:
    """The best fleet among those that fit their memory; None if there is none. `everyone`: fastest step first;
    `start`: names of islands that the greedy search tries first."""
    fitting = [candidate for candidate in everyone if candidate.can_train]
    attempt = _Search(run, model, space_of(run.sync, free, model), goal, max_work)
    if attempt.is_small(len(fitting)):
        attempt.exact(fitting)
    elif fitting:
        attempt.greedy(fitting, [candidate for candidate in fitting if candidate.island.name in start])
    return attempt.best


@dataclass
class _Search:
    """One search: the space, the best fleet so far, the work done (evaluations of one island)."""

    run: RunSettings
    model: ModelFacts
    space: Space
    goal: Goal
    max_work: int
    best: Fleet | None = None
    best_score: float = 0.0
    work: int = 0
    evaluations: int = 0

    def is_small(self, num_islands: int) -> bool:
        settings = len(self.space.codecs) * len(self.space.fragments)
        settings *= 2 if self.space.everys is None else 1
        settings *= 3 if self.space.quorum_free else 1
        return num_islands <= MAX_EXACT and 2**num_islands * settings * num_islands / 2 <= self.max_work

    def exact(self, fitting: Sequence[Candidate]) -> None:
        """Every set of islands, the largest first, under every setting that their links carry."""
        for fragments, pair in product(self.space.fragments, self.space.codecs):
            need = self._load(pair)
            for size in range(len(fitting), 0, -1):
                for kept in combinations(fitting, size):
                    least = max(candidate.least_every(need, kept[0].step_s) for candidate in kept)
                    base = max(self.run.sync.every, least)
                    for every in self.space.everys or (base, 2 * base):
                        if every >= least:
                            self._consider_quorums(kept, pair, every, fragments)

    def greedy(self, fitting: Sequence[Candidate], start: Sequence[Candidate]) -> None:
        """Settings first, each with all islands that it can carry; then, under the best, fewer islands."""
        everys = self.space.everys or tuple(self.run.sync.every * n for n in LONGER)
        for pool in (start, fitting):
            for fragments, pair, every in product(self.space.fragments, self.space.codecs, everys):
                if pool and not self._spent(MAX_FOR_SETTINGS):
                    self._consider_quorums(carried(pool, every, self._load(pair)), pair, every, fragments)
        sync = self.best.sync if self.best else self.run.sync
        pair = (sync.codec, sync.weights_codec)
        for pool in _pools(fitting, self.goal):
            for every in dict.fromkeys((sync.every, *everys)):
                if not self._spent(1.0):
                    kept = carried(pool, every, self._load(pair))
                    self._consider_quorums(kept, pair, every, sync.fragments)
        self._other_numbers_of_the_largest(fitting)

    def _other_numbers_of_the_largest(self, fitting: Sequence[Candidate]) -> None:
        """If the best fleet is the n largest islands: tries numbers from n / 4 to 2 n, and then ever closer to the
        best. The score has more than one peak: an exchange that takes a slot more costs more than an island adds."""
        ranked = sorted(fitting, key=_by_size)
        if self.best is None or _names(self.best.kept) != _names(ranked[: len(self.best.kept)]):
            return
        sync, count = self.best.sync, len(self.best.kept)
        low, high = count // 4, 2 * count
        step = high - low
        while step > 1:
            step = max(1, (high - low) // NUMBERS_AT_ONCE)
            for pool in _first_of(ranked, range(low + step, min(high, len(ranked)) + 1, step)):
                if not self._spent(1.0):
                    kept = carried(pool, sync.every, self._load((sync.codec, sync.weights_codec)))
                    self._consider_quorums(kept, (sync.codec, sync.weights_codec), sync.every, sync.fragments)
            low, high = len(self.best.kept) - step, len(self.best.kept) + step

    def _load(self, pair: tuple[str, str]) -> Need:
        return load_of_round(self.model, *pair, self.run.train.inner)

    def _spent(self, share: float) -> bool:
        return self.work > share * self.max_work and self.evaluations >= share * LEAST_EVALUATIONS

    def _consider_quorums(self, kept: Sequence[Candidate], pair: tuple[str, str], every: int, fragments: int) -> None:
        if self.space.everys is None and every > MAX_EVERY:
            return
        for quorum in self.space.quorums(len(kept), self.run.sync.quorum):
            if 1 <= quorum <= len(kept):
                changed = {"codec": pair[0], "weights_codec": pair[1], "every": every}
                self._consider(kept, _with(self.run.sync, fragments=fragments, quorum=quorum, **changed))

    def _consider(self, kept: Sequence[Candidate], sync: SyncSettings) -> None:
        self.work += len(kept)
        self.evaluations += 1
        fleet = run_fleet(kept, sync, self.model)
        value = score(fleet, self.run, self.model, self.goal)
        if value is None:
            return
        best = self.best
        as_many = best is not None and best.sync == sync and len(kept) >= len(best.kept)
        if best is None or value > self.best_score * (1.0 if as_many else WORTH_A_CHANGE):
            self.best, self.best_score = fleet, value


def _with(sync: SyncSettings, **changed: Any) -> SyncSettings:
    """`sync` with other values; the same object if nothing changes, so that settings compare fast."""
    return sync if all(getattr(sync, key) == value for key, value in changed.items()) else replace(sync, **changed)


def _by_size(candidate: Candidate) -> tuple[float, str]:
    """The largest first."""
    return (-candidate.tokens_per_s, candidate.island.name)


def _pools(fitting: Sequence[Candidate], goal: Goal) -> Iterator[Sequence[Candidate]]:
    """The best value for money, if the goal asks for it; the largest islands; all but those that set the pace."""
    if goal.objective == "cost" or goal.budget_per_h is not None or goal.budget_total is not None:
        by_value = sorted(fitting, key=lambda c: (c.island.price_per_h / c.tokens_per_s, c.island.name))
        yield from _first_of(by_value, [*_within_budget(by_value, goal), *_halvings(len(fitting))])
    yield from _first_of(sorted(fitting, key=_by_size), _halvings(len(fitting)))
    for count in PACE_SETTERS:
        if count < len(fitting):
            yield fitting[count:]


def _names(islands: Sequence[Candidate]) -> set[str]:
    return {candidate.island.name for candidate in islands}


def _first_of(ranked: Sequence[Candidate], counts: Sequence[int]) -> Iterator[Sequence[Candidate]]:
    """The best of a ranking, fastest step first again."""
    for count in dict.fromkeys(counts):
        if count >= 1:
            yield sorted(ranked[:count], key=lambda c: (c.step_s, c.island.name))


def _within_budget(by_value: Sequence[Candidate], goal: Goal) -> list[int]:
    """How many of the cheapest islands the hourly budget pays for, and slightly smaller numbers."""
    spent = 0.0
    for count, candidate in enumerate(by_value):
        spent += candidate.island.price_per_h
        if goal.budget_per_h is not None and spent > goal.budget_per_h:
            return [count, count * 95 // 100]
    return [len(by_value)]


def _halvings(count: int) -> list[int]:
    counts = []
    while count > 1:
        count //= 2
        counts.append(count)
    return counts


def carried(pool: Sequence[Candidate], every: int, need: Need) -> list[Candidate]:
    """The islands of `pool` (fastest step first) whose links carry the round that the fastest of them sets; islands
    whose link cannot carry even the round that they would set themselves are removed first."""
    first = 0
    while first < len(pool) and not pool[first].carries(need, every * pool[first].step_s):
        first += 1
    if first == len(pool):
        return []
    round_s = every * pool[first].step_s
    return [candidate for candidate in pool[first:] if candidate.carries(need, round_s)]
