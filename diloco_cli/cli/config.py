"""`diloco config show`: every setting of a run as it will be used, and where it came from."""

from __future__ import annotations

from json import dumps
from pathlib import Path

import typer

from diloco_cli.cli.output import print_json
from diloco_cli.config.codec import to_plain
from diloco_cli.config.origins import leaves, origin_of

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
    for key, value in leaves(to_plain(run)):
        source = f"  # {origin_of(origins, key)}" if origin else ""
        print(f"{key} = {dumps(value)}{source}")
