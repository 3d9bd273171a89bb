"""`diloco export`: the outer parameters as safetensors or as a folder for transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypeVar

import typer

from diloco_cli.cli.consent import AllowCode, named_here
from diloco_cli.cli.output import print_json, progress, talk
from diloco_cli.cli.run_argument import OpenRun, RunArgument, head_of, open_run
from diloco_cli.errors import DataCheckError, NoSpaceError, UsageError
from diloco_cli.runtime.files import NO_SPACE_ERRNOS
from diloco_cli.units import format_size, parse_size

if TYPE_CHECKING:
    from diloco_cli.protocol.log.state import RunState

MODEL = Path("model.safetensors")
MAX_SHARD_SIZE = "5GB"
Result = TypeVar("Result")


class Kind(StrEnum):
    safetensors = "safetensors"
    torch = "torch"
    hf = "hf"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def export(
    run: str | None = RunArgument,
    output: Path | None = typer.Option(
        None, "-o", "--output", help=f"File to write, with --to hf a folder. Default: {MODEL}, or RUN-hf."
    ),
    to: Kind = typer.Option(
        Kind.safetensors,
        "--to",
        help="safetensors: what the run trains; torch: all that load_state_dict of the model demands; hf: a folder "
        "for from_pretrained.",
    ),
    dtype: Dtype = typer.Option(Dtype.float32, "--dtype", help="Type of the numbers."),
    max_shard_size: str | None = typer.Option(
        None, "--max-shard-size", metavar="SIZE", help=f"With --to hf: of one file. Default: {MAX_SHARD_SIZE}."
    ),
    tokenizer: str | None = typer.Option(
        None, "--tokenizer", metavar="FOLDER|NAME", help="With --to hf: the tokenizer to put into the folder."
    ),
    yes: bool = typer.Option(False, "-y", "--yes", help="Overwrite an existing file, or an earlier export's folder."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
    allow_code: list[str] = AllowCode,
) -> None:
    """Write the newest committed parameters as safetensors."""
    if to is not Kind.hf and (max_shard_size is not None or tokenizer is not None):
        raise UsageError("--max-shard-size and --tokenizer belong to a folder for transformers", hint="add --to hf")
    if to is Kind.hf:
        max_shard_bytes = parse_size(max_shard_size or MAX_SHARD_SIZE)
        _export_folder(run, output, dtype, max_shard_bytes, tokenizer, yes, as_json)
        return
    path = output or MODEL
    refuse_place(path, hint="give another file, or -y to overwrite it", overwrite=yes)
    _export_file(open_run(run), path, to, dtype, as_json, allow_code)


def refuse_place(path: Path, hint: str, overwrite: bool = False) -> None:
    """Before the work begins: raises UsageError where a user's file could not be written at its end."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="give a file: -o FILE")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already", hint=hint)
    if not path.parent.is_dir():
        raise UsageError(f"no directory {path.parent}", hint=f"mkdir -p {quote(str(path.parent))}")


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """What goes wrong with a user's file is said as such."""
    try:
        yield
    except OSError as error:
        kind = NoSpaceError if error.errno in NO_SPACE_ERRNOS else UsageError
        raise kind(f"cannot write: {error.strerror}", where=str(path)) from error


def at_head(opened: OpenRun, read: Callable[[RunState], Result]) -> tuple[RunState, Result]:
    """What `read` makes of the newest commit's versions; once more of a newer commit where they were collected while
    they were being read."""
    state = head_of(opened)
    while True:
        try:
            return state, read(state)
        except DataCheckError:
            before, state = state, head_of(opened, state)
            if state.gc_floor == before.gc_floor:
                raise


def _export_file(
    opened: OpenRun, path: Path, kind: Kind, dtype: Dtype, as_json: bool, allow_code: list[str]
) -> None:  # fmt: skip
    from diloco_cli.export import files, naming
    from diloco_cli.runtime.consent import consented

    layout = opened.format.layout
    if kind is Kind.torch:
        settings = consented(opened.format, opened.url, named_here(allow_code), data=False).settings
        names = naming.whole_state(settings, layout, tied=True)
    else:
        names = naming.own_names(layout)
    with writing_to(path), progress(f"reading the parameters of {opened.name}"):
        state, size_bytes = at_head(
            opened,
            lambda state: files.export_file(opened.format, state, opened.store, path, names, files.DTYPES[dtype]),
        )
    if as_json:
        print_json("export", {"run": opened.name, "file": str(path), "commit": state.n, "bytes": size_bytes})
    else:
        print(f"{path}: {layout.num_parameters:,} parameters of run {opened.name}, commit {state.n}")


def _export_folder(
    run: str | None, output: Path | None, dtype: Dtype, max_shard_bytes: int, tokenizer: str | None, yes: bool,
    as_json: bool,
) -> None:  # fmt: skip
    from diloco_cli.corpus.encoders import tokenizer_folder
    from diloco_cli.export import files, naming
    from diloco_cli.export.files import refuse_folder

    if output is not None:
        refuse_folder(output, yes)
    opened = open_run(run)
    folder = output or Path(f"{opened.name}-hf")
    refuse_folder(folder, yes)
    settings, layout = opened.format.settings, opened.format.layout
    described = naming.describe(settings, layout, files.DTYPES[dtype])
    words = naming.tokenizer_of(settings, None if tokenizer is None else tokenizer_folder(tokenizer, talk))
    if words is not None:
        talk(f"with the tokenizer of {words}")
    with writing_to(folder), progress(f"reading the parameters of {opened.name}"):
        state, (size_bytes, names) = at_head(
            opened,
            lambda state: files.export_folder(
                opened.format, state, opened.store, folder, described, files.DTYPES[dtype], max_shard_bytes, words
            ),
        )
    if as_json:
        facts = {"run": opened.name, "file": str(folder), "commit": state.n, "bytes": size_bytes, "files": names}
        print_json("export", facts)
    else:
        what = f"{layout.num_parameters:,} parameters of run {opened.name}, commit {state.n}"
        print(f"{folder}: {what}, {dtype}, {len(names)} files, {format_size(size_bytes)}")
