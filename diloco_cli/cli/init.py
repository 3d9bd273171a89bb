"""`diloco init`: a commented inventory.yaml and run.yaml, for this machine or to fill in for other hardware."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli.output import talk
from diloco_cli.config.devices import CPU
from diloco_cli.errors import UsageError
from diloco_cli.paths import templates_directory
from diloco_cli.units import format_count, format_duration

if TYPE_CHECKING:
    from diloco_cli.plan.plan import Plan

FILES = ("inventory.yaml", "run.yaml")
UNKNOWN_DEVICE_S = 1.0  # for the speed of a device that the catalogue does not know
HEAD = (
    "This machine, as `diloco init` found it; `diloco inventory probe -f run.yaml` measures how fast it trains.\n"
    "The bucket is a folder beside this file. For other hardware: diloco init DIR --for gcs"
)


class FirstPlace(StrEnum):
    """Where a run is to train."""

    HERE = "here"
    GCS = "gcs"
    S3 = "s3"
    HOME = "home"
    SEVERAL = "several"


TEMPLATES = {
    FirstPlace.GCS: ("start/gcs-inventory.yaml", "start/cloud.yaml"),
    FirstPlace.S3: ("start/s3-inventory.yaml", "start/cloud.yaml"),
    FirstPlace.HOME: ("start/home-inventory.yaml", "start/home.yaml"),
    FirstPlace.SEVERAL: ("inventory.yaml", "run.yaml"),
}


def init(
    directory: Path = typer.Argument(Path(), metavar="DIR", help="Where to write; the current folder by default."),
    place: FirstPlace = typer.Option(
        FirstPlace.HERE,
        "--for",
        help="here: trains on this machine at once. gcs, s3: two machines and a bucket. home: machines behind home"
        " links. several: a fleet, with every key explained.",
    ),
    yes: bool = typer.Option(False, "-y", "--yes", "--force", help="Replace files that are there."),
) -> None:
    """Write a commented inventory.yaml and run.yaml. Without options: for this machine, whose cores or accelerators it
    looks up; they train for minutes and need nothing else."""
    targets = [directory / name for name in FILES]
    there = [str(target) for target in targets if target.exists()]
    if there and not yes:
        raise UsageError(
            f"{' and '.join(there)} already there; nothing was written",
            hint=f"diloco init {shlex.quote(str(directory))} --force replaces them; or name another folder",
        )
    texts = _for_this_machine() if place is FirstPlace.HERE else _of_templates(place)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for target, text in zip(targets, texts, strict=True):
            target.write_text(text, encoding="utf-8")
            print(target)
    except OSError as error:
        raise UsageError(f"cannot write: {(error.strerror or '').lower()}", where=str(directory)) from None
    inventory, run = (shlex.quote(str(target)) for target in targets)
    if place is FirstPlace.HERE:
        talk(f"next: diloco launch {run}    (and in a second terminal: diloco status --watch)")
    else:
        talk(f"next: edit {inventory}: your bucket, your machines; then: diloco plan -f {run}")


def _of_templates(place: FirstPlace) -> list[str]:
    return [(templates_directory() / name).read_text(encoding="utf-8") for name in TEMPLATES[place]]


def _for_this_machine() -> list[str]:
    from diloco_cli.config.inventory_file import inventory_to_text
    from diloco_cli.probe.entry import first_inventory, first_run
    from diloco_cli.probe.measure import machine_facts, matrix_tflops, training_types

    machine = machine_facts()
    kinds = [] if machine.known else training_types(machine.torch_device)[:1]
    rates = {kind: matrix_tflops(kind, machine.torch_device, UNKNOWN_DEVICE_S) for kind in kinds}
    entry = first_inventory(machine, {kind: rate for kind, rate in rates.items() if rate})
    template = (templates_directory() / "start" / "here.yaml").read_text(encoding="utf-8")
    inventory = inventory_to_text(entry.inventory, entry.comments, HEAD)
    plan = _planned(inventory, first_run(template, machine))
    run = first_run(template, machine, plan.prediction.tokens_per_s)
    plan = _planned(inventory, run)
    accelerators = machine.accelerators
    found = f"{machine.cores} cores" if accelerators.name == CPU else f"{accelerators.count} x {accelerators.name}"
    learners = "one learner" if len(plan.islands) == 1 else f"{len(plan.islands)} learners"
    long = format_duration(plan.prediction.days_to_target * 86_400)
    talk(
        f"this machine has {found}: {learners} will train {plan.run.model.preset} on"
        f" {format_count(plan.run.train.tokens)} tokens, about {long} if nothing else runs here"
    )
    return [inventory, run]


def _planned(inventory: str, run: str) -> Plan:
    """As `launch` will plan these files."""
    from diloco_cli.launch.plan_files import read_plan

    with TemporaryDirectory() as name:
        for file, text in zip(FILES, (inventory, run), strict=True):
            (Path(name) / file).write_text(text, encoding="utf-8")
        return read_plan(Path(name) / FILES[1], [])
