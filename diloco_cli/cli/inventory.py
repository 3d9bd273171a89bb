"""`diloco inventory probe`: measures this machine and writes what an inventory says of it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli.output import print_json, talk
from diloco_cli.clock import utc_now_text
from diloco_cli.config.codec import to_plain
from diloco_cli.errors import UsageError

if TYPE_CHECKING:
    from diloco_cli.config.settings import Inventory, RunSettings
    from diloco_cli.probe.entry import MachineEntry
    from diloco_cli.probe.measure import Measurements

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
    """Measure this machine and print an inventory of it: accelerators, a matrix product, memory, training speed alone
    and when its cores are crowded, a store's speed. With a run file that names an inventory: that inventory, its
    islands on this machine measured."""
    if output is not None and output.exists():
        raise UsageError("there is a file already", where=str(output), hint="choose another name with -o")
    run, inventory = _run_and_inventory(file, overrides)
    if file and name:
        talk("--name is for a machine without a run file: the islands keep the names of the run's inventory")
    from diloco_cli.probe.measure import Probe
    from diloco_cli.store.url import normalise_store_url

    url = None if store is None else normalise_store_url(store, Path.cwd())
    found = Probe(seconds, talk, run, file.parent if file else Path(), inventory, url).measure()
    text = _text(_entry(found, inventory, name, region, url), found)
    if output is not None:
        _write(text, output)
    if json:
        print_json("inventory", _data(found, text))
    else:
        print(text, end="")


def _run_and_inventory(file: Path | None, overrides: list[str]) -> tuple[RunSettings | None, Inventory | None]:
    from diloco_cli.config.inventory_file import load_inventory
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
    from diloco_cli.config.inventory_file import inventory_to_text
    from diloco_cli.probe.entry import figures

    head = f"Measured by `diloco inventory probe` at {utc_now_text()[:16]}Z on {socket.gethostname()}:"
    return inventory_to_text(entry.inventory, entry.comments, "\n".join([head, *figures(found)]))


def _write(text: str, path: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"cannot write the inventory: {(error.strerror or '').lower()}", where=str(path)) from None
    talk(f"inventory written to {path}; plan with it: diloco plan {path} -f RUN")


def _data(found: Measurements, text: str) -> dict[str, object]:
    crowding = found.crowding
    return {
        "machine": to_plain(found.machine),
        "matrix_tflops": to_plain(found.matrix),
        "tokens_per_s": to_plain(crowding.alone if crowding else found.alone),
        "crowding": to_plain(crowding.shares()) if crowding else None,
        "free_cores": crowding.free if crowding else None,
        "store": to_plain(found.store),
        "inventory": text,
    }
