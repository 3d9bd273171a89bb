"""`diloco init`: a commented inventory.yaml and run.yaml, for this machine or to fill in for other hardware;
`diloco inventory probe`: what this machine is, and how fast it trains."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import typer

from diloco_cli.cli.output import print_json, refuse_place, talk, writing_to
from diloco_cli.clock import utc_now_text
from diloco_cli.config.codec import to_plain
from diloco_cli.config.hardware import CPU
from diloco_cli.config.inventory_file import inventory_to_text, load_inventory
from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.errors import DilocoError, NotFoundError, UsageError, suggestion
from diloco_cli.paths import templates_directory
from diloco_cli.quantities import format_count, format_duration
from diloco_cli.store.url import normalise_store_url

if TYPE_CHECKING:
    from diloco_cli.plan.plan import Plan
    from diloco_cli.probe.clusters import Partition, Pool
    from diloco_cli.probe.entry import MachineEntry
    from diloco_cli.probe.measure import Measurements

FILES = ("inventory.yaml", "run.yaml")
TEMPLATE_NAME = "first-run"
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
    SLURM = "slurm"
    SEVERAL = "several"


TEMPLATES = {
    FirstPlace.GCS: ("start/gcs-inventory.yaml", "start/cloud.yaml"),
    FirstPlace.S3: ("start/s3-inventory.yaml", "start/cloud.yaml"),
    FirstPlace.HOME: ("start/home-inventory.yaml", "start/home.yaml"),
    FirstPlace.SLURM: ("start/slurm-inventory.yaml", "start/here.yaml"),
    FirstPlace.SEVERAL: ("inventory.yaml", "run.yaml"),
}


def init(
    directory: Path = typer.Argument(Path(), metavar="DIR", help="Where to write; the current folder by default."),
    place: FirstPlace = typer.Option(
        FirstPlace.HERE,
        "--for",
        help="here: trains on this machine at once. gcs, s3: two machines and a bucket. home: machines behind home"
        " links. slurm: two jobs. several: a fleet, with every key explained.",
    ),
    yes: bool = typer.Option(False, "-y", "--yes", "--force", help="Replace files that are there."),
) -> None:
    """Write a commented inventory.yaml and run.yaml. Without options: for this machine, whose cores or accelerators it
    looks up; they train for minutes and need nothing else."""
    targets = [directory / name for name in FILES]
    there = [str(target) for target in targets if os.path.exists(target)]  # False where it may not be looked
    if there and not yes:
        raise UsageError(
            f"{' and '.join(there)} already there; nothing was written",
            hint=f"diloco init {shlex.quote(str(directory))} --force replaces them; or name another folder",
        )
    texts = _for_this_machine() if place is FirstPlace.HERE else _of_templates(place)
    texts[1] = _named_after(directory, texts[1])
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for target, text in zip(targets, texts, strict=True):
            target.write_text(text, encoding="utf-8")
            print(target)
    except OSError as error:
        raise UsageError(f"cannot write: {(error.strerror or '').lower()}", where=str(directory)) from None
    inventory, run = (shlex.quote(str(target)) for target in targets)
    if place is FirstPlace.SLURM:
        talk(
            f"next: see that the partitions in {inventory} are yours, and all nodes see its folder: diloco launch {run}"
        )
    elif place is FirstPlace.HERE:
        talk(f"next: diloco launch {run}    (and in a second terminal: diloco status --watch)")
    else:
        talk(f"next: edit {inventory}: your bucket, your machines; then: diloco plan -f {run}")


def _named_after(directory: Path, run: str) -> str:
    """The run file with the folder's name: two folders' runs shall not be mistaken for one another."""
    from diloco_cli.probe.entry import island_name

    line = f"name: {island_name(directory.resolve().name)}"
    commented = rf"^name: {TEMPLATE_NAME} +(?=#)"
    run = re.sub(commented, lambda found: f"{line} ".ljust(len(found[0])), run, flags=re.M)
    return re.sub(rf"^name: {TEMPLATE_NAME}$", line, run, flags=re.M)


def _of_templates(place: FirstPlace) -> list[str]:
    inventory, run = [(templates_directory() / name).read_text(encoding="utf-8") for name in TEMPLATES[place]]
    if place is not FirstPlace.SLURM:
        return [inventory, run]
    return [_with_partitions(inventory), run.replace("tokens: 4M", "tokens: 1M")]  # on four cores: minutes


class _Choice(NamedTuple):
    """Of a partition: whether a job starts there now, the catalogue's device of its GPUs ("": none is known), whether
    it is the default one, and its nodes in words."""

    starts: bool
    device: str
    is_default: bool
    name: str
    told: str


def _choices(lines: Iterable[Partition]) -> list[_Choice]:
    """The best first: where a job starts now, then where GPUs are known, then the default one."""
    nodes: dict[str, list[Partition]] = {}
    for line in lines:
        nodes.setdefault(line.name, []).append(line)
    found = []
    for name, kinds in nodes.items():
        starts = any(line.starts for line in kinds)
        device = max(_device_of(line) for line in kinds if line.starts == starts)
        told = f"{name} ({', '.join(line.told for line in kinds)})"
        found.append(_Choice(starts, device, kinds[0].is_default, name, told))
    return sorted(found, key=lambda one: (one.starts, one.device != "", one.is_default), reverse=True)


def _device_of(line: Partition) -> str:
    """Of the catalogue, that Slurm calls so; else "", which is told."""
    from diloco_cli.probe.clusters import known_device

    device, why = known_device(line.gpus.name) if line.gpus.name else ("", "")
    if why:
        talk(f"{line.gres}: {why}: cores, until you name it")
    return device


def _with_partitions(inventory: str) -> str:
    """The template with the partitions of this cluster, if there is one, that are best for a first run."""
    from diloco_cli.probe.clusters import SINFO, ask, read_sinfo

    try:
        said = ask(SINFO)
    except DilocoError as error:
        talk(f"its partitions are not known: {error}")
        return inventory
    found = _choices(read_sinfo(said))
    chosen = [one for one in found if (one.starts, one.device == "") == (found[0].starts, found[0].device == "")][:2]
    why = "a job starts there now" if any(one.starts for one in chosen) else "no job starts anywhere now"
    others = ", ".join(one.told for one in found if one not in chosen)
    talk(f"partitions: {', '.join(one.told for one in chosen) or 'none'}: {why}{others and f'; not {others}'}")
    for place, one in zip(("first", "second"), [*chosen[:1], *chosen[-1:]], strict=False):
        cores = re.search(rf"slurm/{place}\n +(accelerators: cpu:2 *)", inventory)
        if cores is not None and one.device:
            own = f"accelerators: {one.device}:1".ljust(len(cores[1]))
            inventory = f"{inventory[: cores.start(1)]}{own}{inventory[cores.end(1) :]}"
        inventory = inventory.replace(f"slurm/{place}", f"slurm/{one.name}")
    return inventory


def _for_this_machine() -> list[str]:
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


MAX_S = 600.0

inventory = typer.Typer(help="The hardware there is.", no_args_is_help=True, rich_markup_mode=None)


@inventory.command("probe")
def probe(
    file: Path = typer.Option(None, "-f", "--file", help="Also train this run's model: its real steps."),
    output: Path = typer.Option(None, "-o", "--output", help="Write the inventory here too; the file must be new."),
    store: str = typer.Option(None, "--store", metavar="URL", help="Also measure this store: up, down, latency."),
    seconds: float = typer.Option(2.0, "--seconds", min=0.01, max=MAX_S, help="How long each measurement takes."),
    name: str = typer.Option(None, "--name", help="The island's name; without it, this machine's."),
    region: str = typer.Option("here", "--region", help="The island's region."),
    overrides: list[str] = typer.Option([], "--set", help="Change one value of the run file: key.key=value."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Measure this machine and print an inventory of it: accelerators, a matrix product, memory, training speed, a
    store's speed. With a run file that names an inventory: that inventory, its
    islands on this machine measured."""
    if output is not None:
        refuse_place(output, "choose another name with -o")
    run, inventory = _run_and_inventory(file, overrides)
    if file and name:
        talk("--name is for a machine without a run file: the islands keep the names of the run's inventory")
    from diloco_cli.probe.measure import Probe

    url = None if store is None else normalise_store_url(store, Path.cwd())
    found = Probe(seconds, talk, run, file.parent if file else Path(), inventory, url).measure()
    text = _text(_entry(found, inventory, name, region, url), found)
    if output is not None:
        _write(text, output)
    if json:
        print_json("inventory", _data(found, text))
    else:
        print(text, end="")


class NodeSource(StrEnum):
    """What knows its nodes."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    SSH = "ssh"


@inventory.command("from")
def from_cluster(
    source: NodeSource = typer.Argument(..., help="Whose nodes: by sinfo, by kubectl, or a host's own by ssh."),
    places: list[str] = typer.Argument(None, metavar="[PLACE]...", help="Partitions, contexts, or hosts; else all."),
    output: Path = typer.Option(None, "-o", "--output", help="Write the inventory here too; the file must be new."),
    region: str = typer.Option("here", "--region", help="Their region, where they do not say it."),
) -> None:
    """Print an inventory of a cluster's nodes, with the catalogue's speeds: machines, of which `plan` forms islands."""
    from diloco_cli.probe.clusters import entry_of
    from diloco_cli.probe.entry import island_name

    if output is not None:
        refuse_place(output, "choose another name with -o")
    pools, left = ASKED[source](places or [])
    if left:
        talk(f"left out: {'; '.join(left)}")
    if not pools:
        raise NotFoundError(f"{source} has no node that takes a job now", hint=HINTS[source])
    entry = entry_of(pools, island_name(region), "bucket", talk)
    head = f"As {source} said at {utc_now_text()[:16]}Z. For another bucket: store: {{url: gs://...}}"
    text = inventory_to_text(entry.inventory, entry.comments, head)
    if output is not None:
        _write(text, output)
    print(text, end="")


def _slurm(partitions: list[str]) -> tuple[list[Pool], list[str]]:
    from diloco_cli.probe.clusters import SINFO, ask, read_sinfo, slurm_pools

    lines = read_sinfo(ask(SINFO))
    known = {line.name for line in lines}
    _refuse_strange(partitions, known, "partition")
    return slurm_pools(line for line in lines if not partitions or line.name in partitions)


def _kubernetes(contexts: list[str]) -> tuple[list[Pool], list[str]]:
    from diloco_cli.probe.clusters import NODES, ask, kubernetes_pools

    if not contexts:
        contexts = [ask(("kubectl", "config", "current-context")).strip()]
    else:
        _refuse_strange(contexts, set(ask(("kubectl", "config", "get-contexts", "--output=name")).split()), "context")
    pools: list[Pool] = []
    left: list[str] = []
    for context in contexts:
        own, out = kubernetes_pools(ask(("kubectl", f"--context={context}", *NODES)), context)
        pools, left = pools + own, left + out
    return pools, left


def _ssh(hosts: list[str]) -> tuple[list[Pool], list[str]]:
    from diloco_cli.probe.clusters import SMI, ask, ssh_pool

    if not hosts:
        raise UsageError("which hosts?", hint="diloco inventory from ssh HOST, as in `ssh HOST`")
    return [ssh_pool(ask(SMI, via=host), host) for host in hosts], []


ASKED = {NodeSource.SLURM: _slurm, NodeSource.KUBERNETES: _kubernetes, NodeSource.SSH: _ssh}
HINTS = {NodeSource.SLURM: "sinfo", NodeSource.KUBERNETES: "kubectl get nodes", NodeSource.SSH: "ssh HOST nvidia-smi"}


def _refuse_strange(named: Iterable[str], known: set[str], what: str) -> None:
    for name in named:
        if name not in known:
            has = ", ".join(sorted(known)) or "none"
            raise UsageError(f"there is no {what} {name!a}{suggestion(name, known)}; there are: {has}")


def _run_and_inventory(file: Path | None, overrides: list[str]) -> tuple[RunSettings | None, Inventory | None]:
    from diloco_cli.config.run_file import inventory_path_of, load_run

    if file is None:
        if overrides:
            raise UsageError("--set needs a run file", hint="diloco inventory probe -f RUN --set ...")
        return None, None
    run = load_run(file, overrides)
    path = inventory_path_of(run, file)
    return run, load_inventory(path) if path else None


def _entry(
    found: Measurements, inventory: Inventory | None, name: str | None, region: str, url: str | None
) -> MachineEntry:
    from diloco_cli.probe.entry import island_name, measured, new_inventory

    if inventory is not None:
        return measured(found, inventory)
    return new_inventory(found, island_name(name or socket.gethostname()), island_name(region), url or "bucket")


def _text(entry: MachineEntry, found: Measurements) -> str:
    from diloco_cli.probe.entry import figures

    head = f"Measured by `diloco inventory probe` at {utc_now_text()[:16]}Z on {socket.gethostname()}:"
    return inventory_to_text(entry.inventory, entry.comments, "\n".join([head, *figures(found)]))


def _write(text: str, path: Path) -> None:
    with writing_to(path), path.open("x", encoding="utf-8") as stream:
        stream.write(text)
    talk(f"inventory written to {path}; plan with it: diloco plan {path} -f RUN")


def _data(found: Measurements, text: str) -> dict[str, object]:
    return {
        "machine": to_plain(found.machine),
        "matrix_tflops": to_plain(found.matrix),
        "tokens_per_s": to_plain(next(iter(found.speeds.values()), None)),
        "store": to_plain(found.store),
        "inventory": text,
    }
