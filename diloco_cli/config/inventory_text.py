"""Inventory -> the text of an inventory.yaml that reads back as the same inventory, with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from diloco_cli.config.devices import in_catalogue
from diloco_cli.config.hostlist import compress_hostlist
from diloco_cli.config.settings import Device, Inventory, IslandSettings, Link, MachineSettings
from diloco_cli.config.yaml_tree import resolve_scalar
from diloco_cli.units import parse_bandwidth, parse_duration

PLAIN = re.compile(r"[A-Za-z0-9_][\w./:%@ -]*")
COMMENT_COLUMN = 48
BANDWIDTHS = ((1e9, "Gbps"), (1e6, "Mbps"), (1e3, "kbps"), (1.0, "bps"))
DURATIONS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
Entry = tuple[str, str]  # key and value as they are written


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
        if value not in (entry.default, (), Link()):
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


def _list(values: tuple[float, ...]) -> str:
    return "[" + ", ".join(_number(value) for value in values) + "]"


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
    "hosts": ("hosts", lambda hosts: json.dumps(compress_hostlist(hosts))),
    "crowding": ("crowding", _list),
    "link": ("link", lambda link: _flow(_given(link))),
    "up_bps": ("up", _bandwidth),
    "down_bps": ("down", _bandwidth),
    "rtt_s": ("rtt", _duration),
    "mtbf_s": ("mtbf", _duration),
    "restart_s": ("restart", _duration),
    "price_per_h": ("price", lambda price: f"{_number(price)}/h"),
    "egress_per_gb": ("egress", lambda price: f"{_number(price)}/GB"),
    "slowdown": ("emulate", lambda factor: f"{{slowdown: {_number(factor)}}}"),
}
FIRST_KEYS = ("name", "hosts", "region", "infra", "fabric", "accelerators", "nodes")
FIRST = {key: index for index, key in enumerate(FIRST_KEYS)}
