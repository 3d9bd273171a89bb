"""`diloco init`: a commented inventory.yaml and run.yaml to start from."""

from __future__ import annotations

import shutil
from pathlib import Path

import typer

from diloco_cli.cli.output import talk
from diloco_cli.errors import UsageError
from diloco_cli.paths import templates_directory

FILES = ("inventory.yaml", "run.yaml")


def init(
    directory: Path = typer.Argument(Path(), metavar="DIR", help="Where to write; the current folder by default."),
    yes: bool = typer.Option(False, "-y", "--yes", help="Replace files that are there."),
) -> None:
    """Write commented inventory.yaml and run.yaml files."""
    targets = [directory / name for name in FILES]
    there = [str(target) for target in targets if target.exists()]
    if there and not yes:
        raise UsageError(
            f"{' and '.join(there)} already there; nothing was written", hint="diloco init -y replaces them"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for target in targets:
            shutil.copyfile(templates_directory() / target.name, target)
            print(target)
    except OSError as error:
        raise UsageError(f"cannot write: {(error.strerror or '').lower()}", where=str(directory)) from None
    talk(f"next: edit them, then diloco plan {targets[0]} -f {targets[1]}")
