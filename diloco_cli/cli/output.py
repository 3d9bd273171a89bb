"""The output of every command: data on stdout, messages on stderr, one JSON envelope, no traceback unless asked."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.environment import environment_flag, environment_value
from diloco_cli.errors import DilocoError, NoSpaceError, UsageError, escaped

if TYPE_CHECKING:
    from rich.console import Console

FORMAT_VERSION = "1.0"
WIDE = 240  # columns when the output is no terminal: Rich would cut tables at 80
QUIET = frozenset({"-q", "--quiet"})  # of `diloco` itself: no progress
SPINNER, BAR = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", 24


def talk(text: str) -> None:
    """A line for people, on stderr. It may hold text from the bucket, which must not control a terminal."""
    print(escaped(text, keep="\n\t"), file=sys.stderr, flush=True)


def console() -> Console:
    """A Rich console on stdout that never cuts or colours what is piped."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    colour = terminal and not environment_value("NO_COLOR")
    return Console(
        width=None if terminal else WIDE,
        no_color=not colour,
        color_system="auto" if colour else None,
        force_terminal=None if terminal else False,
        highlight=False,
        soft_wrap=not terminal,
    )


def screen_width() -> int | None:
    """Of the terminal that stdout is; None for a pipe, into which nothing is shortened or wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@dataclass
class ProgressLine:
    """What a command that takes its time is at. `share`: how much of it is done, from 0 to 1; None: not known."""

    text: str
    share: Callable[[], float | None] = lambda: None


@contextmanager
def progress(text: str) -> Iterator[ProgressLine]:
    """A moving line on stderr while the block works; nothing where that is no terminal, or with -q."""
    shown = ProgressLine(text)
    if not sys.stderr.isatty() or QUIET.intersection(sys.argv[1:]):
        yield shown
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    began_s, screen = monotonic_s(), Console(stderr=True, highlight=False)

    def line() -> Text:
        return Text(_progress_line(shown, monotonic_s() - began_s, screen.width), no_wrap=True)

    with Live(get_renderable=line, console=screen, refresh_per_second=8, transient=True, redirect_stdout=False):
        yield shown


def _progress_line(shown: ProgressLine, spent_s: float, width: int) -> str:
    share, spinner = shown.share(), SPINNER[int(8 * spent_s) % len(SPINNER)]
    done = "" if share is None else f"  {'━' * round(BAR * share):<{BAR}} {100 * share:3.0f}%"
    return f"{spinner} {shown.text}{done}  {spent_s:.0f} s"[:width]


def table(rows: Sequence[Sequence[str]], gap: str = "  ", left: Container[int] = (0,)) -> list[str]:
    """Aligned columns; those in `left` stand left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def print_json(
    command: str, data: dict[str, Any], *, warnings: list[str] | None = None, error: DilocoError | None = None
) -> None:
    """The one JSON object of `--json`; see README, "For scripts"."""
    body = {
        "format_version": FORMAT_VERSION,
        "command": command,
        "ok": error is None,
        "generated_at": utc_now_text(),
        "data": data,
        "warnings": warnings or [],
        "error": None if error is None else {"code": error.code, "message": str(error), "hint": error.hint},
    }
    print(json.dumps(body, allow_nan=False), flush=True)


def report_error(error: DilocoError) -> None:
    """`error: ...`, then `hint: ...`; with --json the envelope on stdout instead."""
    if "--json" in sys.argv:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "diloco")
        print_json(command, {}, error=error)
        return
    talk(f"error: {error}")
    if error.hint:
        talk(f"hint: {error.hint}")


def wants_traceback() -> bool:
    return "--debug" in sys.argv or environment_flag("DILOCO_DEBUG")


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
        from diloco_cli.paths import NO_SPACE_ERRNOS

        kind = NoSpaceError if error.errno in NO_SPACE_ERRNOS else UsageError
        raise kind(f"cannot write: {error.strerror}", where=str(path)) from error
