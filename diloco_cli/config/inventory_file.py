"""inventory.yaml -> Inventory, and back to text: islands and machines, their links to their buckets, their prices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from diloco_cli.config.codec import replace
from diloco_cli.config.fields import (
    Node,
    Origins,
    SettingsReader,
    read_yaml_file,
    refuse_newer,
    refuse_other_file,
    resolve_scalar,
)
from diloco_cli.config.hardware import (
    CPU,
    FABRIC_KINDS,
    SITE_KEYS,
    Accelerators,
    Device,
    Fabric,
    compress_hostlist,
    find_device,
    in_catalogue,
    resolve,
    with_catalogue_facts,
)
from diloco_cli.config.settings import RESERVED_NAMES, Inventory, IslandSettings, Link, MachineSettings
from diloco_cli.environment import ALLOW_HTTP_VARIABLE, set_environment_default
from diloco_cli.errors import UsageError, suggestion
from diloco_cli.quantities import parse_bandwidth, parse_duration

INVENTORY_VERSION = 1
COMMENTED_EXAMPLE = "an inventory.yaml that explains every key: diloco init DIR --for several"
RENTED = "or plan what to rent: diloco plan --add auto --deadline '3 d'"
MAX_ISLANDS = 10_000
MAX_MACHINES = 100_000
PEAKS = ("bf16_tflops", "fp16_tflops", "fp32_tflops")
PLAIN = re.compile(r"[A-Za-z0-9_][\w./:%@ -]*")
COMMENT_COLUMN = 48
BANDWIDTHS = ((1e9, "Gbps"), (1e6, "Mbps"), (1e3, "kbps"), (1.0, "bps"))
DURATIONS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
Entry = tuple[str, str]  # key and value as they are written

Hardware = IslandSettings | MachineSettings


def load_inventory(path: Path | str, needs_hardware: bool = True) -> Inventory:
    """The inventory, with every store as an absolute URL and every device by its own name."""
    try:
        return _load(Path(path), needs_hardware)
    except UsageError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint or COMMENTED_EXAMPLE) from None


def _load(path: Path, needs_hardware: bool) -> Inventory:
    tree = read_yaml_file(path)
    refuse_other_file(tree, "inventory", path)
    refuse_newer(tree, INVENTORY_VERSION)
    _read_host_as_hosts(tree)
    reader = SettingsReader(path.parent)
    inventory = reader.read(Inventory, tree)
    places = Places(tree, reader.origins)
    places.require_facts_of_own_devices(inventory)
    inventory = replace(inventory, devices=with_catalogue_facts(inventory.devices))
    inventory = with_whole_hosts(with_own_names(inventory, places), places)
    if needs_hardware and not inventory.islands and not inventory.machines:
        problem = "the file lists no hardware: give islands, machines or both"
        raise UsageError(problem, where=tree.where, hint=f"{COMMENTED_EXAMPLE}; {RENTED}")
    check_inventory(inventory, places)
    if inventory.store.allow_http is not None:  # for this process and the units that it starts
        set_environment_default(ALLOW_HTTP_VARIABLE, inventory.store.allow_http)
    return inventory


def _read_host_as_hosts(tree: Node) -> None:
    """A machine may write `host: box1` for `hosts: box1`."""
    machines = tree.value.get("machines") if isinstance(tree.value, dict) else None
    for entry in machines.value if machines is not None and isinstance(machines.value, list) else []:
        if isinstance(entry.value, dict) and "host" in entry.value and "hosts" not in entry.value:
            entry.value["hosts"] = entry.value.pop("host")


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
            try:
                known[written] = resolve(written, inventory.devices)
            except UsageError as error:
                place = places.of(f"{path}.accelerators", entry.where)
                raise UsageError(f"{path}.accelerators: {error.message}", where=place, hint=error.hint) from None
        found.append(replace(hardware, accelerators=known[written]))
    return _with_hardware(inventory, found)


def with_whole_hosts(inventory: Inventory, places: Places) -> Inventory:
    """Hosts without `nodes`: one node a host. With both, they must agree."""
    found: list[Hardware] = []
    for path, entry, hardware in places.paths(inventory):
        if hardware.hosts and f"{path}.nodes" in places.origins and hardware.nodes != len(hardware.hosts):
            raise UsageError(
                f"{path}.nodes: {hardware.nodes}, but hosts names {len(hardware.hosts)}",
                where=places.of(f"{path}.nodes", entry.where),
                hint="leave `nodes` out: every host is one node",
            )
        found.append(replace(hardware, nodes=len(hardware.hosts)) if hardware.hosts else hardware)
    return _with_hardware(inventory, found)


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
    _check_sites(inventory, places)
    if inventory.store.link.emulate:
        raise UsageError(
            "store.link is the syncer's own link, which is not emulated",
            where=places.of("store.link.emulate", places.tree.where),
            hint="leave `emulate` out of it; the link of an island can be emulated",
        )


def _check_sizes(inventory: Inventory, where: str) -> None:
    num_islands, num_machines = len(inventory.islands), sum(machine.nodes for machine in inventory.machines)
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
        if island.fabric is not None:
            _check_fabric(island, island.fabric, inventory, places.of(f"islands.{island.name}.fabric", entry.where))


def _check_fabric(island: IslandSettings, fabric: Fabric, inventory: Inventory, where: str) -> None:
    device = find_device(island.accelerators.name, inventory.devices)
    if fabric.rate_gbps(device) is None:
        known = [kind for kind in FABRIC_KINDS if Fabric(kind).rate_gbps(device)]
        raise UsageError(
            f"islands.{island.name}.fabric: the catalogue knows no {fabric.kind} of {device.name};"
            f" allowed: {', '.join(known)}, or its rate in Gbit/s such as {{gbps: 400}}",
            where=where,
            hint="leave `fabric` out, or give its rate",
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


def _check_sites(inventory: Inventory, places: Places) -> None:
    installs = dict[tuple[str | None, str, str], str]()
    for name, site in inventory.sites.items():
        where, at = places.of(f"sites.{name}.engine", places.tree.where), f"sites.{name}"
        used = SITE_KEYS[site.engine]
        for key in sorted(set[str]().union(*SITE_KEYS.values()) - used):
            if getattr(site, key):
                has = f"a site of {site.engine} has no {key}; it has: {', '.join(sorted(used))}"
                raise UsageError(f"{at}: {has}", where=places.of(f"{at}.{key}", where))
        if site.engine == "slurm" and site.via is not None and not (site.directory or "").startswith("/"):
            raise UsageError(
                f"{at}: where {site.via} is, a directory from / is needed, for its jobs and their logs", where=where
            )
        if site.install and site.via is None:
            raise UsageError(
                f"{at}.install: jobs of this machine's own Slurm run this machine's diloco",
                where=places.of(f"{at}.install", where),
                hint="leave it out; or, for a cluster behind a login node: via: ssh HOST",
            )
        if site.install:
            first = installs.setdefault((site.host, site.directory or ".", site.install), name)
            if (inventory.sites[first].setup or "") != (site.setup or ""):
                raise UsageError(
                    f"{at}: diloco is installed in one folder for {first} and {name}, and their setup differs",
                    where=places.of(f"{at}.setup", where),
                    hint="give both the same setup, or one of them another directory",
                )
        if site.engine == "ssh" and site.via is None:
            raise UsageError(f"{at}: which host?", where=where, hint="via: ssh HOST")
    for path, entry, hardware in places.paths(inventory):
        kind, _, name = hardware.infra.partition("/")
        if name in inventory.sites and kind != inventory.sites[name].engine:
            raise UsageError(
                f"{path}.infra: {name} is a site of {inventory.sites[name].engine}, not of {kind}",
                where=places.of(f"{path}.infra", entry.where),
            )


def inventory_to_text(inventory: Inventory, comments: Mapping[str, str], head: str = "") -> str:
    """`comments` by the path of a key: {"islands.iowa.tokens_per_s": "measured"}; `head`: the comment at the top."""
    lines = [f"# {line}" for line in head.splitlines()]
    store = _commented(f"store: {_flow(_given(inventory.store))}", comments.get("store"))
    lines += [f"version: {inventory.version}", store]
    if inventory.regions:
        lines.append("regions:")
        lines += [f"  {name}: {_flow(_given(region))}" for name, region in inventory.regions.items()]
    lists: dict[str, Sequence[IslandSettings | MachineSettings]] = {
        "islands": inventory.islands,
        "machines": inventory.machines,
    }
    for key, items in lists.items():
        if items:
            lines.append(f"{key}:")
        for index, item in enumerate(items):
            path = f"{key}.{item.name}" if item.name else f"{key}[{index}]"
            lines += _item(_hardware(item), path, comments)
    if inventory.devices:
        lines.append("devices:")
        for name, device in inventory.devices.items():
            lines.append(_commented(f"  {name}: {_flow(_device(device))}", comments.get(f"devices.{name}")))
    if inventory.sites:
        lines.append("sites:")
        lines += [f"  {name}: {_flow(_given(site))}" for name, site in inventory.sites.items()]
    if inventory.local:
        lines.append("local:")
        for entry, value in _given(inventory.local):
            lines.append(_commented(f"  {entry}: {value}", comments.get(f"local.{entry}")))
    return "\n".join(lines) + "\n"


def _item(entries: list[Entry], path: str, comments: Mapping[str, str]) -> Iterator[str]:
    for index, (key, value) in enumerate(entries):
        yield _commented(f"  {' ' if index else '-'} {key}: {value}", comments.get(f"{path}.{key}"))


def _commented(line: str, comment: str | None) -> str:
    return line if comment is None else f"{line:<{COMMENT_COLUMN}}  # {comment}"


def _hardware(item: IslandSettings | MachineSettings) -> list[Entry]:
    """The values that differ from the defaults, under the keys of the file."""
    entries = [entry for entry in _given(item) if not (entry[0] == "nodes" and item.hosts)]  # derived from the hosts
    return sorted(entries, key=lambda pair: FIRST.get(pair[0], len(FIRST)))


def _given(item: Any) -> list[Entry]:
    """The fields that are not at their defaults, as they are spelt."""
    entries = []
    for entry in structs.fields(item):
        value = getattr(item, entry.name)
        if value not in (entry.default, (), {}, Link()):
            key, write = SPELLING.get(entry.name, (entry.name, _scalar))
            entries.append((key, write(value)))
    return entries


def _device(device: Device) -> list[Entry]:
    """A device that is not in the catalogue needs its memory stated, also if that is the host's."""
    given = [entry for entry in _given(device) if entry[0] != "name"]
    said = device.memory_gb is not None or in_catalogue(device.name) is not None
    return given if said else [("memory_gb", "null"), *given]


def _flow(entries: list[Entry]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in entries) + "}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (int, float)):
        return _number(value)
    plain = PLAIN.fullmatch(value) and isinstance(resolve_scalar(value), str) and ": " not in value
    return value if plain and value == value.strip() and not value.endswith(":") else json.dumps(value)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _bandwidth(bps: float) -> str:
    return _quantity(bps, BANDWIDTHS, parse_bandwidth)


def _duration(seconds: float) -> str:
    return _quantity(seconds, DURATIONS, parse_duration)


def _fabric(fabric: Fabric | str) -> str:
    """Of an island what it is, of a machine its name."""
    if isinstance(fabric, str):
        return _scalar(fabric)
    return fabric.kind or f"{{gbps: {_number(fabric.gbps or 0.0)}}}"


def _quantity(value: float, units: tuple[tuple[float, str], ...], parse: Callable[[str], float]) -> str:
    """The value in the largest unit that gives a short text which reads back as exactly the same value."""
    for scale, unit in units:
        text = f"{value / scale:.6g} {unit}"
        if (value >= scale or scale < 1) and "e" not in text and parse(text) == value:
            return text
    scale, unit = next(pair for pair in units if pair[0] == 1.0)
    return f"{value!r} {unit}"


SPELLING: dict[str, tuple[str, Callable[[Any], str]]] = {
    "accelerators": ("accelerators", lambda each: f"{each.name}:{each.count}"),
    "fabric": ("fabric", _fabric),
    "hosts": ("hosts", lambda hosts: json.dumps(compress_hostlist(hosts))),
    "link": ("link", lambda link: _flow(_given(link))),
    "up_bps": ("up", _bandwidth),
    "down_bps": ("down", _bandwidth),
    "rtt_s": ("rtt", _duration),
    "mtbf_s": ("mtbf", _duration),
    "restart_s": ("restart", _duration),
    "price_per_h": ("price", lambda price: f"{_number(price)}/h"),
    "egress_per_gb": ("egress", lambda price: f"{_number(price)}/GB"),
    "options": ("options", json.dumps),
    "slowdown": ("emulate", lambda factor: f"{{slowdown: {_number(factor)}}}"),
}
FIRST_KEYS = ("name", "hosts", "region", "infra", "fabric", "accelerators", "nodes")
FIRST = {key: index for index, key in enumerate(FIRST_KEYS)}
