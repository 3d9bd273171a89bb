"""`diloco export`: the outer parameters as safetensors, or the run as a tape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from diloco_cli.cli.output import print_json, progress
from diloco_cli.cli.run_argument import OpenRun, RunArgument, head_of, open_run
from diloco_cli.errors import DataCheckError, NoSpaceError, UsageError
from diloco_cli.runtime.files import NO_SPACE_ERRNOS

MODEL = Path("model.safetensors")


def export(
    run: str | None = RunArgument,
    output: Path = typer.Option(MODEL, "-o", "--output", help="File to write."),
    tape: Path | None = typer.Option(
        None,
        "--tape",
        metavar="FILE",
        help="Write the run as a tape instead (.gz: packed): `diloco replay FILE`.",
    ),
    yes: bool = typer.Option(False, "-y", "--yes", help="Overwrite an existing file."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Write the newest committed parameters as safetensors, or with --tape all that led to them."""
    if tape is not None and output != MODEL:
        raise UsageError("-o names the file of the parameters, --tape the tape's: one at a time")
    path = output if tape is None else tape
    refuse_place(path, hint="give another file, or -y to overwrite it", overwrite=yes)
    opened = open_run(run)
    if tape is None:
        _export_parameters(opened, path, as_json)
    else:
        _export_tape(opened, path, as_json)


def refuse_place(path: Path, hint: str, overwrite: bool = False) -> None:
    """Before the work begins: raises UsageError where a user's file could not be written at its end."""
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already", hint=hint)
    if not path.parent.is_dir():
        raise UsageError(f"no directory {path.parent}", hint=f"mkdir -p {path.parent}")


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """What goes wrong with a user's file is said as such."""
    try:
        yield
    except OSError as error:
        kind = NoSpaceError if error.errno in NO_SPACE_ERRNOS else UsageError
        raise kind(f"cannot write: {error.strerror}", where=str(path)) from error


def _export_parameters(opened: OpenRun, path: Path, as_json: bool) -> None:
    from diloco_cli.syncer import versions

    state, size_bytes = head_of(opened), None
    while size_bytes is None:
        try:
            with writing_to(path), progress(f"reading the parameters of commit {state.n}"):
                size_bytes = versions.export(opened.format, state, opened.store, path)
        except DataCheckError:
            before, state = state, head_of(opened, state)
            if state.gc_floor == before.gc_floor:  # else: collected while it was being read
                raise
    if as_json:
        print_json("export", {"run": opened.name, "file": str(path), "commit": state.n, "bytes": size_bytes})
    else:
        print(f"{path}: {opened.format.layout.num_parameters:,} parameters of run {opened.name}, commit {state.n}")


def _export_tape(opened: OpenRun, path: Path, as_json: bool) -> None:
    from diloco_cli.tapes.files import write_tape
    from diloco_cli.tapes.recorder import record

    with progress("reading the log and the offers"):
        tape = record(opened.store, opened.format)
    size_bytes = write_tape(tape, path)
    last, incarnations = tape.merges[-1], len(tape.tracks)
    if as_json:
        facts = {"merges": len(tape.merges), "incarnations": incarnations, "tokens": last.tokens}
        print_json("export", {"run": opened.name, "file": str(path), "commit": last.n, "bytes": size_bytes, **facts})
    else:
        what = f"{len(tape.merges):,} merges of {incarnations} incarnations"
        print(f"{path}: {what} of run {opened.name}, to commit {last.n}")
