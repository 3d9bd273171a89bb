"""inventory.yaml -> Inventory: islands and machines, their links to their buckets, their prices."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from diloco_cli.config import readers
from diloco_cli.config.build import Builder, Rule, Rules
from diloco_cli.config.codec import replace
from diloco_cli.config.devices import with_catalogue_facts
from diloco_cli.config.file_kinds import refuse_other_file
from diloco_cli.config.hostlist import expand_hostlist, read_hostfile
from diloco_cli.config.inventory_checks import Places, check_inventory, with_own_names, with_whole_hosts
from diloco_cli.config.own_loops import LOOP, data_class, infra_of
from diloco_cli.config.readers import Reader, above, at_least, between, inside, integer, number, quantity
from diloco_cli.config.run_file import COUNT, refuse_newer
from diloco_cli.config.settings import (
    Accelerators,
    Device,
    Inventory,
    IslandSettings,
    Link,
    LocalMachine,
    MachineSettings,
    RegionSettings,
    StoreSettings,
)
from diloco_cli.config.yaml_tree import Node, read_yaml_file
from diloco_cli.errors import UsageError, suggestion
from diloco_cli.store.port import MAX_CONNECTIONS
from diloco_cli.store.url import normalise_store_url
from diloco_cli.units import parse_bandwidth, parse_duration, parse_egress, parse_price

INVENTORY_VERSION = 1
MAX_NODES = 100_000
MAX_ACCELERATORS = 100_000
MAX_CORES = 4096
MAX_RANKS = 1024  # of one node
LOCAL_INFRA = ("local", "ssh")
NAMED_INFRA = {"slurm": "PARTITION", "kubernetes": "CONTEXT", "skypilot": "CLOUD", LOOP: "addressed"}
INFRA_FORMS = ", ".join([*LOCAL_INFRA, *(f"{kind}/{what}" for kind, what in NAMED_INFRA.items())])
ACCELERATORS = re.compile(r"([A-Za-z][\w.-]*)(?::([1-9]\d{0,5}))?")
FABRIC = re.compile(r"[\w.-]{1,63}")
DURATION = above(0, quantity(parse_duration))
BANDWIDTH = quantity(parse_bandwidth)
POSITIVE = above(0, number)
COMMENTED_EXAMPLE = "an inventory.yaml that explains every key: diloco init DIR --for several"


def load_inventory(path: Path | str) -> Inventory:
    """The inventory, with every store as an absolute URL and every device by its own name."""
    try:
        return _load(Path(path))
    except UsageError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint or COMMENTED_EXAMPLE) from None


def inventory_rules() -> Rules:
    """For a schema, which reads no paths."""
    return _rules(Path())


def _load(path: Path) -> Inventory:
    tree = read_yaml_file(path)
    refuse_other_file(tree, "inventory", path)
    refuse_newer(tree, INVENTORY_VERSION)
    _read_host_as_hosts(tree)
    builder = Builder(_rules(path.parent))
    inventory = builder.build(Inventory, tree)
    places = Places(tree, builder.origins)
    places.require_facts_of_own_devices(inventory)
    inventory = replace(inventory, devices=with_catalogue_facts(inventory.devices))
    inventory = with_whole_hosts(with_own_names(inventory, places), places)
    check_inventory(inventory, places)
    return inventory


def _read_host_as_hosts(tree: Node) -> None:
    """A machine may write `host: box1` for `hosts: box1`."""
    machines = tree.value.get("machines") if isinstance(tree.value, dict) else None
    for entry in machines.value if machines is not None and isinstance(machines.value, list) else []:
        if isinstance(entry.value, dict) and "host" in entry.value and "hosts" not in entry.value:
            entry.value["hosts"] = entry.value.pop("host")


def _rules(folder: Path) -> Rules:
    store_url = partial(_store_url, folder=folder)
    hosts = partial(_hosts, folder=folder)
    of_hardware = {
        "name": Rule(readers.name),
        "region": Rule(readers.name),
        "accelerators": Rule(_accelerators),
        "infra": Rule(_infra),
        "hosts": Rule(hosts),
        "nodes": Rule(between(1, MAX_NODES, integer)),
        "mtbf_s": Rule(DURATION, key="mtbf"),
        "restart_s": Rule(DURATION, key="restart"),
        "price_per_h": Rule(quantity(parse_price), key="price"),
        "egress_per_gb": Rule(quantity(parse_egress), key="egress"),
        "slowdown": Rule(_slowdown, key="emulate"),
        "batch_tokens": Rule(COUNT),
        "mfu": Rule(inside(0, 1, number)),
        "tokens_per_s": Rule(POSITIVE),
    }
    return {
        StoreSettings: {
            "url": Rule(store_url),
            "region": Rule(readers.name),
            "connections": Rule(between(1, MAX_CONNECTIONS, integer)),
        },
        RegionSettings: {
            "store": Rule(store_url),
            "egress_per_gb": Rule(quantity(parse_egress), key="egress"),
        },
        IslandSettings: of_hardware | {"ranks": Rule(between(1, MAX_RANKS, integer))},
        MachineSettings: of_hardware | {"fabric": Rule(_fabric)},
        LocalMachine: {"cores": Rule(between(1, MAX_CORES, integer)), "crowding": Rule(_crowding)},
        Link: {
            "up_bps": Rule(BANDWIDTH, key="up"),
            "down_bps": Rule(BANDWIDTH, key="down"),
            "rtt_s": Rule(at_least(0, quantity(parse_duration)), key="rtt"),
        },
        Device: {
            "memory_gb": Rule(POSITIVE),
            "bf16_tflops": Rule(POSITIVE),
            "fp16_tflops": Rule(POSITIVE),
            "fp32_tflops": Rule(POSITIVE),
            "gbps": Rule(POSITIVE),
            "achievable": Rule(between(0.01, 1, number)),
        },
    }


@readers.described(type="string")
def _store_url(node: Node, folder: Path) -> str:
    try:
        return normalise_store_url(readers.text(node), folder)
    except UsageError as error:
        raise UsageError(error.message, where=node.where, hint=error.hint) from None


@readers.described(type="string", pattern=f"^{ACCELERATORS.pattern}$")
def _accelerators(node: Node) -> Accelerators:
    match = ACCELERATORS.fullmatch(node.text) if isinstance(node.value, str) else None
    if match is None or int(match[2] or 1) > MAX_ACCELERATORS:
        raise UsageError(f"must be NAME:COUNT such as H100-SXM:8 or cpu:1, not {readers.shown(node)}", where=node.where)
    return Accelerators(match[1], int(match[2] or 1))


@readers.described(type="string")
def _infra(node: Node) -> str:
    kind, slash, target = readers.text(node).partition("/")
    if kind == LOOP and target:
        return infra_of(data_class(target, node.where))
    if (kind in LOCAL_INFRA and not slash) or (kind in NAMED_INFRA and target):
        return node.text
    likely = "" if kind in NAMED_INFRA else suggestion(kind, [*LOCAL_INFRA, *NAMED_INFRA])
    hint = f"say which: infra: {kind}/{NAMED_INFRA[kind]}" if kind in NAMED_INFRA else None
    raise UsageError(f"must be one of {INFRA_FORMS}, not '{node.text}'{likely}", where=node.where, hint=hint)


@readers.described(type=["string", "integer"])
def _fabric(node: Node) -> str:
    if FABRIC.fullmatch(readers.text(node)) is None:
        raise UsageError(f"must be one word for an interconnect, such as pod-a, not '{node.text}'", where=node.where)
    return node.text


@readers.described(anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}}])
def _hosts(node: Node, folder: Path) -> tuple[str, ...]:
    """A hostlist, `@FILE` (a hostfile beside the inventory), or a list of these."""
    entries = node.value if isinstance(node.value, list) else [node]
    found: list[str] = []
    for entry in entries:
        written = readers.text(entry)
        if written.startswith("@"):
            found += _of_hostfile(folder / written[1:], entry.where)
            continue
        try:
            found += expand_hostlist(written)
        except UsageError as error:
            raise UsageError(error.message, where=entry.where) from None
    twice = next((host for host in found if found.count(host) > 1), None) if len(set(found)) < len(found) else None
    if twice is not None:
        raise UsageError(f"the host '{twice}' is named twice", where=node.where)
    return tuple(found)


def _of_hostfile(path: Path, where: str) -> tuple[str, ...]:
    hint = "a hostfile has one host a line; its path is relative to the inventory's folder"
    try:
        return read_hostfile(path)
    except UsageError as error:
        raise UsageError(error.message, where=error.where or where, hint=hint) from None


@readers.described(type="object", properties={"slowdown": {"type": "number", "minimum": 1}}, required=["slowdown"])
def _slowdown(node: Node) -> float:
    """`emulate: {slowdown: 2.0}`: this island takes twice as long for every step."""
    read: Reader = between(1, 1000, number)
    entries = node.value
    if not isinstance(entries, dict) or set(entries) != {"slowdown"}:
        written = f"a mapping of {', '.join(entries)}" if isinstance(entries, dict) and entries else readers.shown(node)
        raise UsageError(f"must be {{slowdown: NUMBER}}, not {written}", where=node.where)
    return float(read(entries["slowdown"]))


@readers.described(type="array", items={"type": "number"})
def _crowding(node: Node) -> tuple[float, ...]:
    """Shares from 1 downwards: of one process, of each of two at once, and so on."""
    read: Reader = between(0.001, 1, number)
    entries: Any = node.value if isinstance(node.value, list) and len(node.value) <= MAX_CORES else []
    shares = tuple(float(read(entry)) for entry in entries)
    if not shares or shares[0] != 1.0 or list(shares) != sorted(shares, reverse=True):
        raise UsageError(
            "must be a list of shares that begins with 1 and never rises, such as [1, 0.97, 0.66]", where=node.where
        )
    return shares
