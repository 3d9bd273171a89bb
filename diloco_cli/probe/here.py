"""The first run of a machine: an island for each of its accelerators, or two learners that share its cores; a model and
a length that take minutes. Pure: the machine's facts and a commented run file in, an inventory and a run file out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from diloco_cli.config.devices import CPU, MPS
from diloco_cli.config.settings import (
    Accelerators,
    Inventory,
    IslandSettings,
    LocalMachine,
    RegionSettings,
    StoreSettings,
)
from diloco_cli.plan.practical import rounded_down
from diloco_cli.probe.entry import MachineEntry, Measurements, new_inventory
from diloco_cli.probe.machine import MachineFacts
from diloco_cli.probe.spread import Spread

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
