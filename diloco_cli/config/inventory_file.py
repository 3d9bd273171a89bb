"""inventory.yaml -> Inventory: which islands there are, what joins them to their buckets, what they cost."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path

from diloco_cli.config import readers
from diloco_cli.config.build import Builder, Rule, Rules
from diloco_cli.config.devices import find_device
from diloco_cli.config.hostlist import expand_hostlist
from diloco_cli.config.nearest import suggestion
from diloco_cli.config.readers import Reader, above, at_least, between, inside, integer, number, quantity
from diloco_cli.config.run_file import COUNT, refuse_newer
from diloco_cli.config.settings import (
    RESERVED_NAMES,
    Accelerators,
    Device,
    Inventory,
    IslandSettings,
    Link,
    RegionSettings,
    StoreSettings,
)
from diloco_cli.config.store_url import normalise_store_url
from diloco_cli.config.yaml_tree import Node, read_yaml_file
from diloco_cli.errors import UsageError
from diloco_cli.units import parse_bandwidth, parse_duration, parse_egress, parse_price

INVENTORY_VERSION = 1
MOST_ISLANDS = 10_000
MOST_NODES = 100_000
MOST_ACCELERATORS = 100_000
LOCAL_INFRA = ("local", "ssh")
NAMED_INFRA = {"slurm": "PARTITION", "kubernetes": "CONTEXT", "skypilot": "CLOUD"}
INFRA_FORMS = ", ".join([*LOCAL_INFRA, *(f"{kind}/{what}" for kind, what in NAMED_INFRA.items())])
ACCELERATORS = re.compile(r"([A-Za-z][\w.-]*)(?::([1-9]\d{0,5}))?")
DURATION = above(0, quantity(parse_duration))
BANDWIDTH = quantity(parse_bandwidth)
POSITIVE = above(0, number)


def load_inventory(path: Path | str) -> Inventory:
    """The inventory, with every store as an absolute URL."""
    path = Path(path)
    tree = read_yaml_file(path)
    refuse_newer(tree, INVENTORY_VERSION)
    inventory = Builder(_rules(path.parent)).build(Inventory, tree)
    entries = _island_entries(tree)
    _check_islands(inventory, [entry.where for entry in entries], tree.where)
    _check_regions(inventory, [entry.where for entry in entries], tree.where)
    islands = tuple(map(_with_nodes_of_hosts, inventory.islands, entries))
    return dataclasses.replace(inventory, islands=islands)


def _rules(folder: Path) -> Rules:
    store_url = partial(_store_url, folder=folder)
    return {
        StoreSettings: {"url": Rule(store_url), "region": Rule(readers.name)},
        RegionSettings: {"store": Rule(store_url)},
        IslandSettings: {
            "name": Rule(readers.name),
            "region": Rule(readers.name),
            "accelerators": Rule(_accelerators),
            "infra": Rule(_infra),
            "hosts": Rule(_hosts),
            "nodes": Rule(between(1, MOST_NODES, integer)),
            "mtbf_s": Rule(DURATION, key="mtbf"),
            "restart_s": Rule(DURATION, key="restart"),
            "price_per_h": Rule(quantity(parse_price), key="price"),
            "egress_per_gb": Rule(quantity(parse_egress), key="egress"),
            "slowdown": Rule(_slowdown, key="emulate"),
            "batch_tokens": Rule(COUNT),
            "mfu": Rule(inside(0, 1, number)),
            "tokens_per_s": Rule(POSITIVE),
        },
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


def _store_url(node: Node, folder: Path) -> str:
    try:
        return normalise_store_url(readers.text(node), folder)
    except UsageError as error:
        raise UsageError(error.message, where=node.where) from None


def _accelerators(node: Node) -> Accelerators:
    match = ACCELERATORS.fullmatch(node.text) if isinstance(node.value, str) else None
    if match is None or int(match[2] or 1) > MOST_ACCELERATORS:
        raise UsageError(f"must be NAME:COUNT such as H100-SXM:8 or cpu:1, not {readers.shown(node)}", where=node.where)
    return Accelerators(match[1], int(match[2] or 1))


def _infra(node: Node) -> str:
    kind, slash, target = readers.text(node).partition("/")
    if (kind in LOCAL_INFRA and not slash) or (kind in NAMED_INFRA and target):
        return node.text
    hint = suggestion(kind, [*LOCAL_INFRA, *NAMED_INFRA])
    raise UsageError(f"must be one of {INFRA_FORMS}, not '{node.text}'{hint}", where=node.where)


def _hosts(node: Node) -> tuple[str, ...]:
    """A hostlist, or a list of hostlists."""
    entries = node.value if isinstance(node.value, list) else [node]
    try:
        return expand_hostlist(",".join(readers.text(entry) for entry in entries))
    except UsageError as error:
        raise UsageError(error.message, where=node.where) from None


def _slowdown(node: Node) -> float:
    """`emulate: {slowdown: 2.0}`: this island takes twice as long for every step."""
    read: Reader = between(1, 1000, number)
    entries = node.value
    if not isinstance(entries, dict) or set(entries) != {"slowdown"}:
        raise UsageError(f"must be {{slowdown: NUMBER}}, not {readers.shown(node)}", where=node.where)
    return float(read(entries["slowdown"]))


def _island_entries(tree: Node) -> list[Node]:
    entries = tree.value["islands"].value if isinstance(tree.value, dict) else None
    return entries if isinstance(entries, list) else []


def _check_islands(inventory: Inventory, places: list[str], where: str) -> None:
    if not 1 <= len(inventory.islands) <= MOST_ISLANDS:
        count = len(inventory.islands)
        raise UsageError(f"islands: needs 1 to {MOST_ISLANDS} islands, not {count}", where=where, hint="diloco init")
    seen: dict[str, str] = {}
    for island, place in zip(inventory.islands, places, strict=True):
        if island.name in RESERVED_NAMES:
            raise UsageError(
                f"islands.{island.name}: no island can be called so; reserved are {' and '.join(RESERVED_NAMES)}",
                where=place,
                hint="give it another name, for example that of its place",
            )
        if island.name in seen:
            raise UsageError(f"two islands are called '{island.name}' (the other: {seen[island.name]})", where=place)
        seen[island.name] = place
        try:
            find_device(island.accelerators.name, inventory.devices)
        except UsageError as error:
            raise UsageError(
                f"islands.{island.name}.accelerators: {error.message}", where=place, hint=error.hint
            ) from None


def _check_regions(inventory: Inventory, places: list[str], where: str) -> None:
    """Once `regions` is given it is the list of them, so that a mistyped region is no new one."""
    regions = inventory.regions
    if not regions:
        return
    for island, place in zip(inventory.islands, places, strict=True):
        if island.region not in regions:
            listed = ", ".join(regions)
            hint = suggestion(island.region, regions)
            raise UsageError(
                f"islands.{island.name}.region: '{island.region}' is not in regions ({listed}){hint}",
                where=place,
            )
    home = inventory.store.region
    if home is not None and home not in regions:
        raise UsageError(f"store.region: '{home}' is not in regions ({', '.join(regions)})", where=where)


def _with_nodes_of_hosts(island: IslandSettings, entry: Node) -> IslandSettings:
    """Hosts without `nodes`: one node a host. With both, they must agree."""
    if not island.hosts:
        return island
    given = isinstance(entry.value, dict) and "nodes" in entry.value
    if given and island.nodes != len(island.hosts):
        raise UsageError(
            f"islands.{island.name}.nodes: {island.nodes}, but hosts names {len(island.hosts)}",
            where=entry.where,
        )
    return dataclasses.replace(island, nodes=len(island.hosts))
