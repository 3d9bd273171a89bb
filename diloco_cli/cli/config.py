"""`diloco config show`: every setting of a run as it will be used, and where it came from."""

from __future__ import annotations

from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Any

import typer

from diloco_cli.cli.output import print_json
from diloco_cli.config.codec import to_plain

KEYS = {"sync.skip_after_s": "sync.skip_after"}  # settings with another name in the file


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
    for field, value in _leaves(to_plain(run)):
        key = KEYS.get(field, field)
        source = f"  # {_origin(origins, key)}" if origin else ""
        print(f"{key} = {dumps(value)}{source}")


def _origin(origins: dict[str, str], key: str) -> str:
    """A place for the key itself, or for the mapping that it was given in."""
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins.get(key, "default")


def _leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        place = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from _leaves(value, place)
        else:
            yield place, value
