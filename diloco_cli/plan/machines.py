"""Machines that may train together: those of one interconnect, one kind, one pace; and the island that some make."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diloco_cli.config.settings import IslandSettings, Link, MachineSettings

SAME_PACE = 0.9  # a synchronous island goes at its slowest's pace: machines slower than this share stay apart
NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Machine:
    """One machine and the entry of the inventory it comes from."""

    name: str
    entry: MachineSettings


@dataclass(frozen=True)
class Group:
    """Machines that may become one island. `base` is the island's name, `why_apart` says why others of the same
    fabric are not among them."""

    base: str
    machines: tuple[Machine, ...]
    why_apart: str = ""

    @property
    def first(self) -> MachineSettings:
        """Stands for all in what they have in common: region, fabric, accelerators, infra, batch_tokens."""
        return self.machines[0].entry


def groups(entries: Sequence[MachineSettings]) -> Iterator[Group]:
    """Every machine in exactly one group; a fabric's groups where its first machine stands."""
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
    """What machines of one island have in common."""
    return (entry.accelerators, entry.infra, entry.batch_tokens, entry.region)


def _by_pace(machines: list[Machine]) -> Iterator[list[Machine]]:
    """Fastest first, each group within `SAME_PACE` of its fastest. Where no speed is stated all are alike; speeds that
    are stated in different ways cannot be compared."""
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
    """The key that says how fast the machine is."""
    return "tokens_per_s" if entry.tokens_per_s is not None else "mfu" if entry.mfu is not None else ""


def _pace(entry: MachineSettings) -> float:
    """A relative speed within one kind."""
    return (entry.tokens_per_s or entry.mfu or 1.0) / entry.slowdown


def _machines(entry: MachineSettings) -> list[Machine]:
    """Hosts by their names; machines that a scheduler picks as rack/1, rack/2 and so on."""
    picked = [str(entry.name)] if entry.nodes == 1 else [f"{entry.name}/{n}" for n in range(1, entry.nodes + 1)]
    return [Machine(name, entry) for name in entry.hosts or picked]


def island_of(name: str, machines: Sequence[Machine]) -> IslandSettings:
    """Rates of failure and prices add up; speed is the slowest's; the machine with the fastest link speaks for all
    and stands first among the hosts."""
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
