"""Checks across keys of an inventory: names given once, regions and devices that exist, hosts against nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from diloco_cli.config.build import Origins
from diloco_cli.config.codec import replace
from diloco_cli.config.devices import CPU, in_catalogue, resolve
from diloco_cli.config.settings import RESERVED_NAMES, Accelerators, Device, Inventory, IslandSettings, MachineSettings
from diloco_cli.config.yaml_tree import Node
from diloco_cli.errors import UsageError, suggestion

MAX_ISLANDS = 10_000
MAX_MACHINES = 100_000
PEAKS = ("bf16_tflops", "fp16_tflops", "fp32_tflops")
Hardware = IslandSettings | MachineSettings


@dataclass(frozen=True)
class Places:
    """The place of each key of the inventory."""

    tree: Node
    origins: Origins

    def of(self, path: str, default: str) -> str:
        return self.origins.get(path, default)

    def entries(self, key: str) -> list[Node]:
        """The items of a list at the top."""
        found = self.tree.value.get(key) if isinstance(self.tree.value, dict) else None
        return found.value if found is not None and isinstance(found.value, list) else []

    def paths(self, inventory: Inventory) -> Iterator[tuple[str, Node, Hardware]]:
        """`islands.iowa` or `machines[2]`, its entry, its settings."""
        for island, entry in zip(inventory.islands, self.entries("islands"), strict=True):
            yield f"islands.{island.name}", entry, island
        yield from self.machines(inventory)

    def machines(self, inventory: Inventory) -> Iterator[tuple[str, Node, MachineSettings]]:
        for index, (machine, entry) in enumerate(zip(inventory.machines, self.entries("machines"), strict=True)):
            yield f"machines.{machine.name}" if machine.name else f"machines[{index}]", entry, machine

    def require_facts_of_own_devices(self, inventory: Inventory) -> None:
        """A device that the catalogue does not know needs its memory and a peak; any other is only corrected."""
        for name, device in inventory.devices.items():
            if in_catalogue(name) is not None:
                continue
            entry = self._device(name)
            what = "describe a device that the catalogue does not know as: {bf16_tflops: 120, memory_gb: 24}"
            if "memory_gb" not in (entry.value if isinstance(entry.value, dict) else {}):
                raise UsageError(f"devices.{name}: the key 'memory_gb' is missing", where=entry.where, hint=what)
            if not any(getattr(device, peak) for peak in PEAKS):
                raise UsageError(f"devices.{name}: needs one of {', '.join(PEAKS)}", where=entry.where, hint=what)

    def _device(self, name: str) -> Node:
        devices = self.tree.value["devices"].value if isinstance(self.tree.value, dict) else None
        return devices[name] if isinstance(devices, dict) else self.tree


def with_own_names(inventory: Inventory, places: Places) -> Inventory:
    """Accelerators by the names of their devices. Raises UsageError for a device that is not known."""
    known: dict[Accelerators, Accelerators] = {}
    found: list[Hardware] = []
    for path, entry, hardware in places.paths(inventory):
        written = hardware.accelerators
        if written not in known:
            place = places.of(f"{path}.accelerators", entry.where)
            known[written] = _resolved(written, inventory.devices, f"{path}.accelerators", place)
        found.append(replace(hardware, accelerators=known[written]))
    return _with_hardware(inventory, found)


def _resolved(written: Accelerators, own: dict[str, Device], path: str, place: str) -> Accelerators:
    try:
        return resolve(written, own)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", where=place, hint=error.hint) from None


def with_whole_hosts(inventory: Inventory, places: Places) -> Inventory:
    """Hosts without `nodes`: one node a host. With both, they must agree."""
    found = [_with_nodes(hardware, path, entry, places) for path, entry, hardware in places.paths(inventory)]
    return _with_hardware(inventory, found)


def _with_nodes(hardware: Hardware, path: str, entry: Node, places: Places) -> Hardware:
    if not hardware.hosts:
        return hardware
    if f"{path}.nodes" in places.origins and hardware.nodes != len(hardware.hosts):
        raise UsageError(
            f"{path}.nodes: {hardware.nodes}, but hosts names {len(hardware.hosts)}",
            where=places.of(f"{path}.nodes", entry.where),
            hint="leave `nodes` out: every host is one node",
        )
    return replace(hardware, nodes=len(hardware.hosts))


def _with_hardware(inventory: Inventory, found: list[Hardware]) -> Inventory:
    islands = tuple(item for item in found if isinstance(item, IslandSettings))
    machines = tuple(item for item in found if isinstance(item, MachineSettings))
    return replace(inventory, islands=islands, machines=machines)


def check_inventory(inventory: Inventory, places: Places) -> None:
    """All checks that need more than one key. Raises UsageError at the first error."""
    _check_sizes(inventory, places.tree.where)
    _check_islands(inventory, places)
    _check_machines(inventory, places)
    _check_regions(inventory, places)
    if inventory.store.link.emulate:
        raise UsageError(
            "store.link is the syncer's own link, which is not emulated",
            where=places.of("store.link.emulate", places.tree.where),
            hint="leave `emulate` out of it; the link of an island can be emulated",
        )


def _check_sizes(inventory: Inventory, where: str) -> None:
    num_islands, num_machines = len(inventory.islands), sum(machine.nodes for machine in inventory.machines)
    if not inventory.islands and not inventory.machines:
        raise UsageError("the file lists no hardware: give islands, machines or both", where=where)
    if num_islands > MAX_ISLANDS:
        raise UsageError(f"islands: at most {MAX_ISLANDS} islands, not {num_islands}", where=where)
    if num_machines > MAX_MACHINES:
        raise UsageError(f"machines: at most {MAX_MACHINES} machines, not {num_machines}", where=where)


def _check_islands(inventory: Inventory, places: Places) -> None:
    seen: dict[str, str] = {}
    for island, entry in zip(inventory.islands, places.entries("islands"), strict=True):
        if island.name in RESERVED_NAMES:
            raise UsageError(
                f"islands.{island.name}: no island can be called so; reserved are {' and '.join(RESERVED_NAMES)}",
                where=entry.where,
                hint="give it another name, for example that of its place",
            )
        if island.name in seen:
            raise UsageError(
                f"two islands are called '{island.name}' (the other: {seen[island.name]})",
                where=entry.where,
                hint="an island's name is its learner's: give each its own",
            )
        seen[island.name] = entry.where
        on_cpu, count = island.accelerators.name.lower() == CPU, island.accelerators.count
        if island.ranks not in (None, count) and not on_cpu:
            raise UsageError(
                f"islands.{island.name}.ranks: {island.ranks}, but each of its {count} {island.accelerators.name}"
                " has one rank",
                where=places.of(f"islands.{island.name}.ranks", entry.where),
                hint=f"leave `ranks` out, or list fewer: accelerators: {island.accelerators.name}:{island.ranks}",
            )


def _check_machines(inventory: Inventory, places: Places) -> None:
    """Each machine has one name and lies once in the list; an interconnect joins machines of one region."""
    seen: dict[str, str] = {}
    regions: dict[str, tuple[str, str]] = {}
    for path, entry, machine in places.machines(inventory):
        if bool(machine.hosts) == bool(machine.name):
            has = "has both hosts and a name, and needs one of them" if machine.name else "has neither hosts nor a name"
            raise UsageError(
                f"{path}: {has}",
                where=entry.where,
                hint="hosts: box[1-4] where you know them; name: rack and nodes: 4 where a scheduler picks them",
            )
        for name in machine.hosts or (machine.name or "",):
            if name in seen:
                raise UsageError(
                    f"{path}: '{name}' is listed twice (before: {seen[name]})",
                    where=entry.where,
                    hint="list each machine once, with all its accelerators",
                )
            seen[name] = entry.where
        if machine.fabric:
            region, place = regions.setdefault(machine.fabric, (machine.region, entry.where))
            if region != machine.region:
                raise UsageError(
                    f"{path}.fabric: '{machine.fabric}' lies in {region} already ({place}), and here"
                    f" in {machine.region}",
                    where=places.of(f"{path}.fabric", entry.where),
                    hint="an interconnect joins machines of one region; give the other one another name",
                )


def _check_regions(inventory: Inventory, places: Places) -> None:
    """If `regions` is given, every region must be in it, so that a mistyped region is an error."""
    regions = inventory.regions
    if not regions:
        return
    listed = ", ".join(regions)
    named = [(f"{path}.region", hardware.region, entry.where) for path, entry, hardware in places.paths(inventory)]
    if inventory.store.region is not None:
        named.append(("store.region", inventory.store.region, places.tree.where))
    for key, region, where in named:
        if region not in regions:
            raise UsageError(
                f"{key}: '{region}' is not in regions ({listed}){suggestion(region, regions)}",
                where=places.of(key, where),
                hint=f"list it too: regions: {{{region}: {{}}}}",
            )
