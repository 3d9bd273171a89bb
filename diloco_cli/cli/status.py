"""`diloco status`: the run at a glance, from the bucket alone."""

from __future__ import annotations

import re
import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from diloco_cli.cli.output import console, print_json, report_error, screen_width, talk
from diloco_cli.cli.run_argument import LOOK_S, RunArgument, open_run
from diloco_cli.cli.watch import read_status
from diloco_cli.config.codec import to_plain
from diloco_cli.errors import INTERRUPTED_STATUS, DegradedError, UsageError

if TYPE_CHECKING:
    from diloco_cli.observe.status import Status
    from diloco_cli.store.wrappers import Deadline

WATCH_EVERY_S = 1.0
SHORTEST_WATCH_S = 0.2
SERVES_AT, ADDRESS = "127.0.0.1:9464", re.compile(r"([^/:]+:|\[[0-9a-fA-F:]+\]:)?\d+")


class WatchCommand(TyperCommand):
    """Lets `--watch` stand without its number, which typer alone does not. The context has no type here, because
    typer's releases take its base class from different packages."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_interval(args))


def with_interval(words: list[str]) -> list[str]:
    """`-w` and `--watch` without a number behind them, and `--serve` without an address, get the usual one."""
    found: list[str] = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        found.append(word)
        if word in ("-w", "--watch") and not _is_number(following):
            found.append(str(WATCH_EVERY_S))
        if word == "--serve" and not ADDRESS.fullmatch(following):
            found.append(SERVES_AT)
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


REGISTRATION = {"cls": WatchCommand}


def status(
    run: str | None = RunArgument,
    watch: float | None = typer.Option(None, "-w", "--watch", metavar="[S]", help="Refresh every S seconds (1)."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object (with --watch: one a line)."),
    exit_code: bool = typer.Option(False, "--exit-code", help="Exit 5 if it is DEGRADED, STALLED, SILENT or FAILED."),
    serve: str | None = typer.Option(
        None, "--serve", metavar="[HOST:PORT]", help=f"Serve metrics to Prometheus, with a token ({SERVES_AT})."
    ),
    textfile: Path | None = typer.Option(
        None, "--textfile", metavar="FILE", help="Write metrics for node_exporter (with --watch: every S seconds)."
    ),
) -> None:
    """Show the run at a glance, read from the bucket alone."""
    from diloco_cli.observe.situation import TROUBLE
    from diloco_cli.store.wrappers import Deadline

    box = Deadline(LOOK_S)
    every_s = None if watch is None else max(SHORTEST_WATCH_S, watch)
    try:
        if serve is not None or textfile is not None:
            _metrics(run, box, serve, textfile, every_s)
            return
        current = None if every_s is None else _watched(run, box, every_s, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_STATUS) from None
    if current is None:
        current, _ = read_status(open_run(run, box))
    error = None
    if exit_code and current.state in TROUBLE:
        error = DegradedError(f"run {current.run} is {current.state}: {current.reason}", hint=current.hint or None)
    if watch is None and as_json:
        print_json("status", to_plain(current), warnings=warnings_of(current), error=error)
    elif watch is None:
        _print(current)
    if error is not None:
        if not as_json:
            report_error(error)
        raise typer.Exit(error.exit_status)


def _watched(run: str | None, box: Deadline, every_s: float, as_json: bool) -> Status:
    """The run's last status; its summary is printed where the screen was."""
    from diloco_cli.cli.watch import awaited_run, watch

    opened = awaited_run(run, box, every_s)
    current = watch(opened, box, every_s, as_json)
    if not as_json:
        from diloco_cli.observe.summary import summary_of, summary_text

        box.restart(LOOK_S)
        print(summary_text(summary_of(opened.facts(), opened.local()), screen_width()))
    return current


def _metrics(run: str | None, box: Deadline, serve: str | None, textfile: Path | None, every_s: float | None) -> None:
    from diloco_cli.cli.metrics_out import serve_metrics, write_metrics
    from diloco_cli.cli.watch import awaited_run

    if serve is not None and textfile is not None:
        raise UsageError("--serve and --textfile are two ways", hint="run one command for each")
    waits = serve is not None or every_s is not None
    opened = awaited_run(run, box, WATCH_EVERY_S) if waits else open_run(run, box)
    if serve is not None:
        serve_metrics(opened, box, serve)
    elif textfile is not None:
        write_metrics(opened, box, textfile, every_s)


def clock_warnings(current: Status) -> list[str]:
    if current.clock_skew_s is None:
        return []
    return [f"the store's clock is {current.clock_skew_s:.0f} s ahead of this machine's: ages follow the store's"]


def warnings_of(current: Status) -> list[str]:
    return [
        *clock_warnings(current),
        *([current.divergence] if current.divergence else []),
        *([f"garbage: {current.garbage.note}"] if current.garbage and current.garbage.note else []),
    ]


def _print(current: Status) -> None:
    from diloco_cli.observe.screen import status_lines, status_text, styled

    if sys.stdout.isatty():
        screen = console()
        screen.print(styled(status_lines(current, screen.width)), crop=False, overflow="ignore")
    else:
        print(status_text(current))
    for warning in clock_warnings(current):
        talk(f"warning: {warning}")
