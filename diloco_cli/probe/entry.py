"""Measurements as an inventory: the run's own with measured values of its islands here, or one island: this machine.

Pure: measurements in, an inventory and the comments of its keys out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import CPU, MPS, Accelerators, Device, in_catalogue
from diloco_cli.config.settings import Inventory, IslandSettings, Link, LocalMachine, RegionSettings, StoreSettings
from diloco_cli.plan.remarks import rounded_down
from diloco_cli.probe.measure import MachineFacts, Measurements, Spread, StoreSpeed

DIGITS = 3
MAX_NAME = 63
NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
PEAKS = ("bf16", "fp32")  # the types that training uses, the faster one first


@dataclass(frozen=True)
class MachineEntry:
    """An inventory, and comments by the paths of its keys."""

    inventory: Inventory
    comments: dict[str, str]


def new_inventory(found: Measurements, name: str, region: str, store_url: str) -> MachineEntry:
    """One island: this machine's accelerators, or one of its cores."""
    machine = found.machine
    island = IslandSettings(name, region, machine.accelerators)
    inventory = Inventory(
        StoreSettings(store_url, region), (island,), regions={region: RegionSettings()}, devices=_devices(found)
    )
    entry = measured(found, inventory)
    what = "measured in a matrix product" if machine.known else "measured: what a matrix product reaches, not its peak"
    comments = entry.comments | {f"devices.{device}": what for device in inventory.devices}
    if machine.accelerators.name == CPU:
        comments[f"islands.{name}.accelerators"] = f"one of {machine.cores} cores: list one island a core"
    return MachineEntry(entry.inventory, comments)


def measured(found: Measurements, inventory: Inventory) -> MachineEntry:
    """The inventory with the measured values in the islands that start on this machine."""
    comments: dict[str, str] = {}
    islands = tuple(_island(found, island, comments) for island in inventory.islands)
    local = inventory.local
    if any(island.infra == "local" and island.accelerators.name == CPU for island in islands):
        local = LocalMachine(found.machine.cores)
    store = inventory.store
    if found.store is not None and any(island.infra == "local" for island in islands):  # launched here, with the syncer
        store = replace(store, link=_link(found.store))
        comments["store"] = "link: measured, one object after the other; the syncer's, if it runs here"
    return MachineEntry(replace(inventory, store=store, islands=islands, local=local), comments)


def figures(found: Measurements) -> list[str]:
    """Every measurement with its spread, a line each."""
    machine = found.machine
    each = "" if machine.memory_gb is None else f" of {machine.memory_gb:.0f} GB"
    accelerators = f"{machine.accelerators.name}:{machine.accelerators.count}{each}"
    lines = [f"machine: {accelerators}, {machine.cores} cores, {machine.host_memory_gb:.0f} GB of memory"]
    one = "one thread" if machine.torch_device == "cpu" else "one accelerator"
    lines += [f"matrix product, {kind}, {one}: {_said(rate)} TFLOP/s" for kind, rate in found.matrix.items()]
    lines += [f"{found.trained}, on {name}: {_said(speed)} tokens/s" for name, speed in found.speeds.items()]
    if found.store:
        ways = {"up": found.store.up_bps, "down": found.store.down_bps}
        lines += [f"store, {way}: {_said(rate.scaled(1e-6))} Mbps" for way, rate in ways.items()]
        lines.append(f"store, one small read: {_said(found.store.rtt_s.scaled(1e3))} ms")
    return lines


def _island(found: Measurements, island: IslandSettings, comments: dict[str, str]) -> IslandSettings:
    path = f"islands.{island.name}"
    speed = found.speeds.get(island.accelerators.name) if island.infra == "local" else None
    if speed is not None:
        count = island.accelerators.count * island.nodes
        each = f"{count} x " if count > 1 else ""
        comments[f"{path}.tokens_per_s"] = (
            f"measured: {each}{rounded(speed.median):.12g}, +- {50 * speed.relative:.0f} %"
        )
        island = replace(island, tokens_per_s=rounded(count * speed.median))
    if found.store is not None and island.infra == "local" and not island.link.emulate:
        comments[f"{path}.link"] = "measured, one object after the other"
        island = replace(island, link=_link(found.store))
    return island


def _link(found: StoreSpeed) -> Link:
    return Link(rounded(found.up_bps.median), rounded(found.down_bps.median), rounded(found.rtt_s.median))


def _devices(found: Measurements) -> dict[str, Device]:
    """For a device of the catalogue, the share of its peak that was reached; for another, the measured values."""
    machine = found.machine
    name, known = machine.accelerators.name, in_catalogue(machine.accelerators.name)
    if machine.memory_gb is None:
        return {}
    peaks = {kind: getattr(known, f"{kind}_tflops") if known else math.inf for kind in PEAKS}
    best = next((kind for kind in PEAKS if peaks[kind] and kind in found.matrix), None)
    if best is None:
        return {}
    reached = found.matrix[best].median
    if known:
        return {name: Device(name, achievable=min(1.0, rounded(reached / peaks[best])))}
    strange = Device(name, rounded(machine.memory_gb))
    peak: dict[str, Any] = {f"{best}_tflops": rounded(reached)}
    return {name: replace(strange, **peak)}


def _said(spread: Spread) -> str:
    """`23000 (21300 to 23300, n = 3)`: median and range, three digits each."""
    middle, low, high = (f"{rounded(value):.12g}" for value in (spread.median, spread.low, spread.high))
    return f"{middle} ({low} to {high}, n = {spread.num})"


def rounded(value: float) -> float:
    """Three significant digits: more would be noise."""
    if value == 0:
        return 0.0
    return round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))


def island_name(text: str) -> str:
    """`Box_1.lan` -> box-1-lan: a valid name of an island or a region."""
    return NOT_IN_NAMES.sub("-", text.lower()).strip("-")[:MAX_NAME] or "island"


REGION = "here"
BUCKET = "bucket"
FEWEST_ROUNDS = 10
LONGEST = "1B"
LEARNERS = ("cpu-0", "cpu-1")
MAX_CORES = 4  # of a learner: so small a model gains nothing from more


@dataclass(frozen=True)
class FirstModel:
    """What a kind of accelerator trains in `long_s` as planned; tokens of one of its steps, steps of a round for each
    accelerator, and at least."""

    preset: str
    batch_tokens: int
    every: int
    long_s: float
    least_every: int = 1


MODELS = {CPU: FirstModel("gpt-nano", 1024, 40, 60.0), MPS: FirstModel("gpt-micro", 4096, 40, 60.0)}
ON_CUDA = FirstModel("gpt-small", 16_384, 50, 180.0, 100)  # a syncer needs longer slots than half as many steps give


def first_inventory(machine: MachineFacts, matrix: dict[str, Spread]) -> MachineEntry:
    """The bucket is a folder beside the file. `matrix`: TFLOP/s of a matrix product, for a device that is not known."""
    name = machine.accelerators.name
    if name == CPU:
        cores = max(1, min(MAX_CORES, machine.cores // len(LEARNERS)))
        islands = tuple(IslandSettings(learner, REGION, Accelerators(CPU, cores)) for learner in LEARNERS)
        local = LocalMachine(machine.cores)
        comments = {f"islands.{LEARNERS[0]}.accelerators": f"cores of this learner, of {machine.cores} that are here"}
    else:
        count = machine.accelerators.count
        names = [f"gpu-{number}" for number in range(count)] if count > 1 else ["gpu"]
        islands = tuple(IslandSettings(each, REGION, Accelerators(name, 1)) for each in names)
        local, comments = None, {f"islands.{names[0]}.accelerators": "one accelerator = one island = one learner"}
    devices = new_inventory(Measurements(machine, matrix), islands[0].name, REGION, BUCKET).inventory.devices
    store = StoreSettings(BUCKET, REGION)
    return MachineEntry(
        Inventory(store, islands, regions={REGION: RegionSettings()}, devices=devices, local=local), comments
    )


def first_run(template: str, machine: MachineFacts, tokens_per_s: float | None = None) -> str:
    """The template's text with a model that fits, and with a length of minutes once the speed is planned. (A machine
    that does other things too takes longer.)"""
    model = MODELS.get(machine.accelerators.name, ON_CUDA)
    every = max(model.least_every, model.every * machine.accelerators.count)  # learners on one machine load its disk
    text = _with(template, "model: {preset", model.preset)
    text = _with(text, "  batch_tokens", str(model.batch_tokens))
    text = _with(text, "  every", str(every))
    if tokens_per_s is None:
        return _with(text, "  tokens", LONGEST)
    least = FEWEST_ROUNDS * every * model.batch_tokens * machine.accelerators.count
    return _with(text, "  tokens", f"{rounded_down(max(1e6, least, tokens_per_s * model.long_s) / 1e6)}M")


def _with(text: str, key: str, value: str) -> str:
    """The same line, its comment in the same column where there is room."""

    def line(found: re.Match[str]) -> str:
        head = f"{key}: {value}{found[2]}"
        return f"{head.ljust(len(found[1]) + len(found[3]))}{found[4]}" if found[4] else head

    changed, count = re.subn(
        rf"^({re.escape(key)}: [^\s,}}#]+([}}]?))( *)(#.*)?$", line, text, count=1, flags=re.MULTILINE
    )
    if count != 1:
        raise ValueError(f"the template has no line {key!r}")
    return changed
