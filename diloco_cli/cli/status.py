"""`diloco status`: the run at a glance, from the bucket alone."""

from __future__ import annotations

import sys
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from diloco_cli.cli.output import console, print_json, report_error, talk
from diloco_cli.cli.run_argument import LOOK_S, OpenRun, RunArgument, open_run
from diloco_cli.clock import sleep_s
from diloco_cli.config.codec import to_plain
from diloco_cli.errors import DegradedError, StoreError

if TYPE_CHECKING:
    from diloco_cli.observe.status import Status
    from diloco_cli.protocol.log.state import RunState
    from diloco_cli.store.deadline import Deadline

WATCH_EVERY_S = 1.0
SHORTEST_WATCH_S = 0.2
INTERRUPTED_STATUS = 130


class WatchCommand(TyperCommand):
    """Lets `--watch` stand without its number, which typer alone does not. The context has no type here, because
    typer's releases take its base class from different packages."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_interval(args))


def with_interval(words: list[str]) -> list[str]:
    """`-w` and `--watch` without a number behind them get the usual one."""
    found: list[str] = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        found.append(word)
        if word in ("-w", "--watch") and not _is_number(following):
            found.append(str(WATCH_EVERY_S))
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
) -> None:
    """Show the run at a glance, read from the bucket alone."""
    from diloco_cli.observe.verdict import TROUBLE
    from diloco_cli.store.deadline import Deadline

    box = Deadline(LOOK_S)
    opened = open_run(run, box)
    if watch is not None:
        try:
            _watch(Watcher(opened, box), max(SHORTEST_WATCH_S, watch), as_json)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED_STATUS) from None
        return
    current, _ = read_status(opened)
    error = None
    if exit_code and current.state in TROUBLE:
        error = DegradedError(f"run {current.run} is {current.state}: {current.reason}", hint=current.hint or None)
    if as_json:
        print_json("status", to_plain(current), warnings=warnings_of(current), error=error)
    else:
        _print(current)
        if error is not None:
            report_error(error)
    if error is not None:
        raise typer.Exit(error.exit_status)


def clock_warnings(current: Status) -> list[str]:
    if current.clock_skew_s is None:
        return []
    return [f"the store's clock is {current.clock_skew_s:.0f} s ahead of this machine's: ages follow the store's"]


def warnings_of(current: Status) -> list[str]:
    return [*clock_warnings(current), *([current.divergence] if current.divergence else [])]


def _print(current: Status) -> None:
    """Rich only where there are colours to show: it takes its time to load."""
    from diloco_cli.observe.render import status_text, status_view

    if sys.stdout.isatty():
        console().print(status_view(current))
    else:
        print(status_text(current))
    for warning in clock_warnings(current):
        talk(f"warning: {warning}")


def read_status(opened: OpenRun, known: RunState | None = None) -> tuple[Status, RunState]:
    """`known` is the state returned by the call before: then only what is new is read."""
    from diloco_cli.observe.status import status_of

    facts = opened.facts(known)
    return status_of(facts), facts.state


class Watcher:
    """One look after the other, each with a time limit of its own. If the store does not answer, the first look ends
    with an error; a later one shows the last status with a message on stderr, because the person who watches wants to
    see when the store answers again."""

    def __init__(self, opened: OpenRun, box: Deadline) -> None:
        self._opened, self._box = opened, box
        self.current, self._known = read_status(opened)

    def look(self) -> Status:
        from diloco_cli.store.retry import is_retryable

        self._box.restart(LOOK_S)
        try:
            self.current, self._known = read_status(self._opened, self._known)
        except StoreError as error:
            if not is_retryable(error):
                raise
            talk(f"status: {error}")
        return self.current


def _watch(watcher: Watcher, every_s: float, as_json: bool) -> None:
    from rich.live import Live

    from diloco_cli.observe.render import plain_line, status_view

    if as_json or not sys.stdout.isatty():
        current = watcher.current
        while True:
            print_json("status", to_plain(current)) if as_json else print(plain_line(current), flush=True)
            if current.state in ("FINISHED", "STOPPED"):
                return
            sleep_s(every_s)
            current = watcher.look()
    with Live(status_view(watcher.current), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            sleep_s(every_s)
            live.update(status_view(watcher.look()), refresh=True)
