"""`diloco events`: what happened in a run, by its processes and by its log; `diloco logs`: what its units
printed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO

import typer

from diloco_cli.cli.arguments import (
    LOOK_S,
    RunArgument,
    RunOption,
    complete_units,
    find_run,
    open_known_run,
    open_run,
)
from diloco_cli.cli.output import talk
from diloco_cli.cli.status import riding_out
from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.config.codec import to_plain
from diloco_cli.engines.port import LogCommands
from diloco_cli.engines.tool import SSH_FAILED, start_tool
from diloco_cli.errors import INTERRUPTED_STATUS, DilocoError, NotFoundError, escaped, suggestion
from diloco_cli.events.bucket import EVALUATOR
from diloco_cli.events.event import Event
from diloco_cli.protocol.log.keys import SYNCER
from diloco_cli.quantities import parse_duration, time_text
from diloco_cli.runtime.registry import KnownRun, Line, by_time, log_files, noted_at, tail
from diloco_cli.runtime.registry import follow as follow_logs
from diloco_cli.store.wrappers import Deadline

FOLLOW_EVERY_S = 2.0
ANSWERS_WITHIN_S, LOOKS_EVERY_S = 15.0, 0.05
ATTEMPTS, ENDS_WITHIN_S = 5, 2.0  # to reach a host; to read what it has said
Units = tuple[str, ...]
Seen = set[tuple[str, str, str, str]]


def events(
    run: str | None = RunArgument,
    follow: bool = typer.Option(False, "-f", "--follow", help="Go on with what happens, until Ctrl-C."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a line."),
    since: str | None = typer.Option(None, "--since", metavar="DURATION", help="Only the last 10min, 2h, ..."),
    unit: str | None = typer.Option(None, "--unit", help="Only this unit.", autocompletion=complete_units),
) -> None:
    """Print what happened: starts, ends and their causes, faults on purpose, refusals, takeovers, joins, merges."""
    within_s = None if since is None else parse_duration(since)
    box = Deadline(LOOK_S)
    opened = open_run(run, box)
    first, known = "", None
    seen: Seen = set()
    try:
        while True:
            box.restart(LOOK_S)
            with riding_out("events") if follow else nullcontext():
                facts = opened.facts(known)
                if known is None and within_s is not None:
                    first = time_text(facts.now_s - within_s)
                if known is None and unit is not None:
                    islands = facts.state.with_members(opened.format).all_islands
                    _refuse_unknown(unit, {island.name for island in islands}, facts.events)
                known = facts.state
                _print([e for e in facts.events if e.time >= first and unit in (None, e.unit)], seen, as_json)
            if not follow or (known is not None and known.phase == "FINISHED"):
                return
            sleep_s(FOLLOW_EVERY_S)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_STATUS) from None


def _refuse_unknown(unit: str, islands: set[str], found: list[Event]) -> None:
    """Raises NotFoundError for a name that no island has, and nobody who has told anything: else there is only silence
    to see of a name that was mistyped."""
    known = sorted({*islands, SYNCER, EVALUATOR, *(event.unit for event in found)})
    if unit not in known:
        raise NotFoundError(f"no unit {unit!r} is known in this run{suggestion(unit, known)}", hint="diloco events")


def _print(found: list[Event], seen: Seen, as_json: bool) -> None:
    """What was not printed before. (A summed-up event is printed again when it has grown.)"""
    from diloco_cli.observe.screen import date_and_clock

    for event in found:
        key = (event.time, event.kind, event.unit, event.text)
        if key in seen:
            continue
        seen.add(key)
        line = f"{date_and_clock(event.time)}  {event.unit:<10} {event.kind:<11} {escaped(event.text)}"
        print(json.dumps(to_plain(event)) if as_json else line, flush=True)


def logs(
    unit: str | None = typer.Argument(
        None, help="A learner's name, syncer or supervisor; all if none is given.", autocompletion=complete_units
    ),
    run: str | None = RunOption,
    lines: int = typer.Option(20, "--lines", min=0, help="How many last lines of each log."),
    follow: bool = typer.Option(False, "-f", "--follow", help="Go on with what is added, until Ctrl-C."),
) -> None:
    """Print the logs that a run's units and their supervisor wrote on this machine, and those of its jobs elsewhere, in
    the order of time."""
    known = find_run(run)
    with _logs_elsewhere(known, unit, lines, follow) as (there, look):
        files = there or log_files(noted_at(known.url), unit)
        if there:
            with suppress(NotFoundError):
                files = {**log_files(noted_at(known.url), unit), **there}
        width = max(map(len, files)) if len(files) > 1 else 0

        def show(line: Line) -> None:
            print(f"{line.unit:<{width}} | {line.text}" if width else line.text, flush=True)

        added = follow_logs(files, look) if follow else iter(())
        for line in by_time((Line(name, text) for name, path in files.items() for text in tail(path, lines)), {}):
            show(line)
        try:
            for line in added:
                show(line)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED_STATUS) from None


@contextmanager
def _logs_elsewhere(
    known: KnownRun, unit: str | None, lines: int, follow: bool
) -> Iterator[tuple[dict[str, Path], Callable[[], bool]]]:
    """Files into which the engines' own commands print the logs of jobs that are not on this machine; and what is to be
    called now and then: it tells of those that have ended, and says that this is no reason to stop."""
    from diloco_cli.cli.jobs import log_commands

    with TemporaryDirectory(prefix="diloco-logs-") as folder, ExitStack() as ends:
        commands, started = LogCommands(), dict[Units, tuple[subprocess.Popen[bytes], Thread]]()
        try:
            commands = log_commands(open_known_run(known), unit, lines, follow)
        except DilocoError as error:
            talk(f"only logs of this machine: {error}")
        paths = {name: Path(folder, f"{name}.log") for names in commands for name in names}
        for path in paths.values():
            path.touch()
        tries = dict.fromkeys(commands, ATTEMPTS)

        def errors_of(names: Units) -> Path:
            return paths[names[0]].with_suffix(".err")

        def start(names: Units) -> None:
            tries[names] -= 1
            process = ends.enter_context(start_tool(commands[names], errors_of(names)))
            sorter = Thread(target=_sort, args=(process.stdout, [paths[name] for name in names]), daemon=True)
            sorter.start()
            started[names] = process, sorter
            ends.callback(sorter.join, ENDS_WITHIN_S)
            ends.callback(process.terminate)

        for names in commands:
            start(names)

        def look() -> bool:
            for names in [names for names, (process, _) in started.items() if process.poll() is not None]:
                process, sorter = started.pop(names)
                sorter.join(ENDS_WITHIN_S)
                said, status = errors_of(names).read_text(errors="replace").split("\n"), process.returncode
                if status == SSH_FAILED and tries[names] and not any(paths[name].stat().st_size for name in names):
                    start(names)  # a host takes about ten connections at a time, and refuses the others
                elif status != 0 or follow:
                    told = escaped("; ".join(filter(None, said[-3:]))) or status
                    talk(f"{', '.join(names)}: {'their logs end' if len(names) > 1 else 'its log ends'} here: {told}")
            return False

        until_s = monotonic_s() + ANSWERS_WITHIN_S
        while started and not follow and monotonic_s() < until_s:
            look()
            sleep_s(LOOKS_EVERY_S)
        yield paths, look


def _sort(printed: IO[bytes], logs: list[Path]) -> None:
    """Each line into the log of the unit that it names, as `Engine.log_words` says."""
    with ExitStack() as files:
        opened = {log.stem.encode(): files.enter_context(log.open("ab", buffering=0)) for log in logs}
        for line in printed:
            name, _, text = line.partition(b"|") if len(logs) > 1 else (logs[0].stem.encode(), b"", line)
            if name in opened:
                opened[name].write(text)
