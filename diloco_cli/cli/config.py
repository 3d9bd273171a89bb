"""`diloco config show`: every setting of a run as it will be used, and where it came from."""

from __future__ import annotations

from json import dumps
from pathlib import Path

import typer

from diloco_cli.cli.output import print_json
from diloco_cli.config.codec import to_plain
from diloco_cli.config.fields import origin_of, values_of
from diloco_cli.errors import UsageError, suggestion

config = typer.Typer(help="Settings of a run.", no_args_is_help=True, rich_markup_mode=None)


@config.command("show")
def show(
    file: Path = typer.Option(Path("run.yaml"), "-f", "--file", help="The run file."),
    overrides: list[str] = typer.Option([], "--set", help="Change one value: key.key=value."),
    origin: bool = typer.Option(False, "--origin", help="Say where each value comes from."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Print the settings of a run file, defaults included."""
    from diloco_cli.config.run_file import load_run_with_origins

    run, origins = load_run_with_origins(file, overrides)
    if json:
        print_json("config", {"settings": to_plain(run), "origins": origins})
        return
    for key, value in values_of(run):
        source = f"  # {origin_of(origins, key)}" if origin else ""
        print(f"{key} = {dumps(value)}{source}")


@config.command("schema")
def schema(
    name: str = typer.Argument(..., metavar="NAME", help="run, inventory, or a command with --json, such as status."),
) -> None:
    """Print the JSON Schema of run.yaml, of inventory.yaml, or of what a command's --json prints."""
    from diloco_cli.cli import schemas

    if name not in schemas.NAMES:
        names = ", ".join(schemas.NAMES)
        raise UsageError(f"no schema '{name}'{suggestion(name, schemas.NAMES)}; allowed: {names}")
    print(dumps(schemas.schema(name), indent=1))
