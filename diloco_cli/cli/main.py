"""The `diloco` command: registers one file per command and is the one place where errors become text."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from contextlib import suppress
from itertools import dropwhile
from typing import NoReturn

import typer

from diloco_cli import __version__
from diloco_cli.cli.output import report_error, talk, wants_traceback
from diloco_cli.errors import DilocoError, NoSpaceError, UsageError

BUG_STATUS = 1
NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
COMMANDS = (
    "init", "plan", "simulate", "launch", "status", "chaos", "stop", "resume", "logs", "runs", "verify", "export",
    "rollback", "gc", "readmit", "replay", "key", "bucket-policy", "doctor", "config", "inventory", "learner", "syncer",
    "evaluator",
)  # fmt: skip

RENAMED = {  # names of earlier versions
    ("lift",): "diloco readmit",
    ("access",): "diloco bucket-policy",
    ("plan", "--against"): "diloco plan --diff",
    ("launch", "--replay"): "diloco replay TAPE",
}

app = typer.Typer(
    name="diloco",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    """Train one model on islands of accelerators that only share a bucket (Decoupled DiLoCo)."""


def register_commands(words: list[str]) -> None:
    """If the first word names a command, only its module is loaded, so that it starts fast."""
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        add_command(app, name)


def add_command(to: typer.Typer, name: str) -> None:
    """The module of this name in `cli/` holds the command, or the group of commands, under the same name; its docstring
    is its help, and REGISTRATION says what else typer has to know."""
    module = importlib.import_module(f"diloco_cli.cli.{name.replace('-', '_')}")
    command = getattr(module, name.replace("-", "_"))
    if isinstance(command, typer.Typer):
        to.add_typer(command, name=name)
    else:
        to.command(name, **getattr(module, "REGISTRATION", {}))(command)


def _refuse_old_names(words: list[str]) -> None:
    """Raises UsageError with the name that a command or an option has now."""
    words = list(dropwhile(lambda word: word.startswith("-"), words))
    for (command, *option), now in RENAMED.items():
        if words[:1] == [command] and all(any(w.partition("=")[0] == name for w in words[1:]) for name in option):
            raise UsageError(f"'{' '.join([command, *option])}' has another name now", hint=now)


def main() -> None:
    """Entry point: every declared error ends with its own exit status; tracebacks are shown with --debug only."""
    register_commands(sys.argv[1:])
    try:
        _refuse_old_names(sys.argv[1:])
        app(standalone_mode=True)
    except DilocoError as error:
        _end(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            _end(_full_disk(error))
        if wants_traceback():
            raise
        talk(f"error: a bug in diloco: {type(error).__name__}: {error}")
        talk("hint: run the same command with DILOCO_DEBUG=1 and report what it prints")
        sys.exit(BUG_STATUS)
    finally:
        _flush()


def _end(error: DilocoError) -> NoReturn:
    if wants_traceback():
        traceback.print_exc()
    with suppress(OSError):  # stderr is closed, or on a full disk
        report_error(error)
    sys.exit(error.exit_status)


def _full_disk(error: OSError) -> NoSpaceError:
    what = "the disk quota is used up" if error.errno == errno.EDQUOT else "no space left on the disk"
    return NoSpaceError(what, where=error.filename and str(error.filename), hint="free some space, then run it again")


def _flush() -> None:
    """If the reader has gone (`| head`, a closed terminal), buffered output must not cause an error at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
