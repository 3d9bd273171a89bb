"""`diloco doctor URL`: proves that a store keeps the promises that a run rests on, before a run trusts it.

It writes, races, reads, lists and deletes below a fresh prefix, and cleans up; exit 6 unless all is well."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from types import FrameType
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli.arguments import JsonOption
from diloco_cli.cli.output import console, print_json, report_error, talk
from diloco_cli.errors import StoreError, TerminatedError, UsageError
from diloco_cli.store.url import parse_url

if TYPE_CHECKING:
    from diloco_cli.doctor.examine import Check, Examination

DEFAULT_TIMEOUT_S = 60.0
STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
NAME_WIDTH = 18
INDENT = " " * (6 + NAME_WIDTH)


def doctor(
    url: str = typer.Argument(metavar="URL", help="A bucket with a prefix (gs://, s3://, az://), or a directory."),
    quick: bool = typer.Option(False, "--quick", help="Fewer rounds, smaller objects."),
    timeout: float = typer.Option(DEFAULT_TIMEOUT_S, "--timeout", metavar="S", help="Seconds for everything."),
    file: Path | None = typer.Option(
        None, "-f", "--file", metavar="RUN|PLAN", help="Say what this run's traffic would cost in this bucket."
    ),
    as_json: bool = JsonOption,
) -> None:
    """Prove a store: exclusive creates under races, reads, listings, clock, speed."""
    from diloco_cli.doctor.examine import QUICK, Effort, examine

    if not timeout > 0:
        raise UsageError(f"--timeout {timeout:g} is not a number of seconds above 0")
    place = str(parse_url(url))
    growth = None
    if file is not None:
        from diloco_cli.launch.plan_files import read_plan

        growth = read_plan(file, []).money.storage_gb_per_day
    if not as_json:
        print(f"doctor: {place} (in a prefix of its own, removed afterwards)", flush=True)
    with _terminated():
        effort = QUICK if quick else Effort()
        found = examine(place, (lambda check: None) if as_json else _print, timeout, effort, growth)
    error = None if found.ok else _error(found)
    if as_json:
        print_json("doctor", asdict(found), warnings=_warnings(found), error=error)
    else:
        for warning in _warnings(found):
            talk(f"warning: {warning}")
        if error is None:
            print("ok: a run can trust this store")
        else:
            report_error(error)
    if error is not None:
        raise typer.Exit(error.exit_status)


def _print(check: Check) -> None:
    """`PASS  name  detail`, and the hint below. On a terminal coloured and wrapped; elsewhere neither."""
    texts = [check.detail, *([f"hint: {check.hint}"] if check.hint else [])]
    start = f"{check.level.upper():<4}  {check.name:<{NAME_WIDTH}}"
    if not sys.stdout.isatty():
        print("\n".join(first + text for first, text in zip((start, INDENT), texts, strict=False)), flush=True)
        return
    from rich.text import Text

    screen = console()
    width = max(20, screen.width - len(INDENT))
    lines = [line for text in texts for line in wrap(text, width, break_on_hyphens=False)]
    view = Text("\n".join([start + lines[0], *(INDENT + line for line in lines[1:])]))
    view.stylize(STYLES[check.level], 0, 4)
    screen.print(view)


def _warnings(found: Examination) -> list[str]:
    warnings = []
    if found.num_repeated:
        warnings.append(f"{found.num_repeated} calls failed and were repeated, the last: {found.last_trouble}")
    if found.left_behind:
        prefix = found.left_behind[0].partition("/")[0]
        warnings.append(f"{len(found.left_behind)} objects may be left behind: {found.url.rstrip('/')}/{prefix}/")
    return warnings


def _error(found: Examination) -> StoreError:
    return StoreError(
        f"this store failed {', '.join(found.failed)}",
        where=found.url,
        hint=next((check.hint for check in found.checks if not check.ok and check.hint), None),
    )


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the examination as Ctrl-C does: with a clean place."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TerminatedError("stopped by a signal")

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
