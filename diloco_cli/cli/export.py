"""`diloco export`: the outer parameters as safetensors."""

from __future__ import annotations

from pathlib import Path

import typer

from diloco_cli.cli.output import print_json
from diloco_cli.cli.run_argument import RunArgument, head_of, open_run
from diloco_cli.errors import NoSpaceError, UsageError
from diloco_cli.processes.files import NO_SPACE_ERRNOS


def register(app: typer.Typer) -> None:
    app.command("export", help="Write the newest committed parameters as safetensors.")(export)


def export(
    run: str | None = RunArgument,
    output: Path = typer.Option(Path("model.safetensors"), "-o", "--output", help="File to write."),
    yes: bool = typer.Option(False, "-y", "--yes", help="Overwrite an existing file."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Write the newest committed parameters as safetensors."""
    from diloco_cli.syncer import export as exporting

    if output.exists() and not yes:
        raise UsageError(f"{output} exists already", hint="give another -o FILE, or -y to overwrite it")
    if not output.parent.is_dir():
        raise UsageError(f"no directory {output.parent}", hint=f"mkdir -p {output.parent}")
    opened = open_run(run)
    state = head_of(opened)
    try:
        size_bytes = exporting.export(opened.format, state, opened.store, output)
    except OSError as error:
        kind = NoSpaceError if error.errno in NO_SPACE_ERRNOS else UsageError
        raise kind(f"cannot write: {error.strerror}", where=str(output)) from error
    if as_json:
        print_json("export", {"run": opened.name, "file": str(output), "commit": state.n, "bytes": size_bytes})
    else:
        print(f"{output}: {opened.format.layout.num_parameters:,} parameters of run {opened.name}, commit {state.n}")
