"""`diloco simulate protocol`: seeded worst cases of the protocol's own code in virtual time."""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli.output import print_json, talk
from diloco_cli.errors import INTERRUPTED_STATUS

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco_cli.histories.campaign import Totals

COMMAND = "simulate protocol"
DEFAULT_HISTORIES, DEFAULT_SWEEPS = 100, 1
MAX_HISTORIES, MAX_JOBS = 10_000_000, 1024
LINE_EVERY_S = 60.0


def protocol(
    seed: int = typer.Option(0, "--seed", min=0, help="The first history's seed."),
    histories: int = typer.Option(
        None,
        "--histories",
        min=1,
        max=MAX_HISTORIES,
        help="So many seeds, one history each (with --sweep: one sweep).",
    ),
    jobs: int = typer.Option(1, "--jobs", min=1, max=MAX_JOBS, help="Processes that share the work."),
    sweep: bool = typer.Option(False, "--sweep", help="Crash every process at every operation, before and after it."),
    at: str = typer.Option(None, "--at", help="With --sweep: this crash alone, as in l0.1:3:after."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Histories of crashes, lost answers and zombies, each checked after every step. Exit 11 if an invariant breaks.

    A seed draws the fleet and its faults; the same seed gives the same history. A violation comes with the shortest
    story that was found and with the command that repeats it. Ctrl-C ends it with what was done by then, and says with
    which seed to go on.
    """
    from diloco_cli.clock import monotonic_s
    from diloco_cli.errors import DataCheckError, UsageError
    from diloco_cli.histories.campaign import campaign, point_at, work_of

    if at is not None and (not sweep or histories is not None):
        raise UsageError("--at is one crash of a sweep: it goes with --sweep, and without --histories")
    only = None if at is None else point_at(at)
    wanted = histories or (DEFAULT_SWEEPS if sweep else DEFAULT_HISTORIES)
    started_s = monotonic_s()
    progress = _Progress(seed, 0 if sweep else wanted, lambda: monotonic_s() - started_s)
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the results so far are printed
    totals = campaign(work_of(seed, wanted, sweep, _tell_at_once, only), jobs, progress.show)
    signal.signal(signal.SIGTERM, usual)
    progress.clear()
    data = _data(seed, totals, monotonic_s() - started_s)
    error = None
    if totals.violations:
        commands = [violation.command for violation in totals.violations]
        found = f"{_count(len(commands), 'violation')} in {_count(totals.histories, 'history')}"
        error = DataCheckError(found, hint=commands[0])
    if json:
        print_json(COMMAND, data, error=error)
    else:
        print(_text(data, seed + wanted))
    if error is not None:
        if json:
            raise typer.Exit(error.exit_status)
        raise error
    if totals.interrupted:
        raise typer.Exit(INTERRUPTED_STATUS)


def _tell_at_once(line: str) -> None:
    """From whichever process it is found in."""
    _clear_line(sys.stderr.isatty())
    talk(line)


def _clear_line(terminal: bool) -> None:
    if terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


class _Progress:
    """The progress: on a terminal one line that is overwritten, else a line at the first result and each minute.
    Violations are reported at once. `wanted`: the number of histories; 0 if not known."""

    def __init__(self, seed: int, wanted: int, spent_s: Callable[[], float]) -> None:
        self._seed, self._wanted, self._spent_s = seed, wanted, spent_s
        self._terminal = sys.stderr.isatty()
        self._next_s, self._found = 0.0, 0

    def show(self, totals: Totals) -> None:
        for violation in totals.violations[self._found :]:
            self.clear()
            talk(f"seed {violation.seed}: {violation.story[-1]}")
        self._found = len(totals.violations)
        spent_s = self._spent_s()
        if self._terminal:
            print(f"\r\033[K{self._line(totals, spent_s)}", end="", file=sys.stderr, flush=True)
        elif spent_s >= self._next_s:
            self._next_s = spent_s + LINE_EVERY_S
            talk(self._line(totals, spent_s))

    def _line(self, totals: Totals, spent_s: float) -> str:
        done, rate = totals.histories, totals.histories / max(spent_s, 1e-9)
        words = [
            f"{done:,} of {self._wanted:,} histories" if self._wanted else _count(done, "crash"),
            f"{rate:.1f}/s",
            f"{totals.commits:,} commits",
            _count(totals.crashes, "crash"),
            _count(len(totals.violations), "violation"),
        ]
        if self._wanted > done:
            words.append(f"{_time_text((self._wanted - done) / rate)} left")
        return ", ".join(words)

    def clear(self) -> None:
        _clear_line(self._terminal)


def _count(number: int, unit: str) -> str:
    plural = {"history": "histories", "crash": "crashes"}.get(unit, f"{unit}s")
    return f"{number:,} {unit if number == 1 else plural}"


def _time_text(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _data(seed: int, totals: Totals, wall_s: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "next_seed": max(seed, totals.next_seed),
        "interrupted": totals.interrupted,
        "histories": totals.histories,
        "commits": totals.commits,
        "commits_min": totals.shortest,
        "commits_median": totals.median,
        "crashes": totals.crashes,
        "store_operations": totals.store_operations,
        "violations": [asdict(violation) for violation in totals.violations],
        "wall_s": round(wall_s, 3),
        "histories_per_s": round(totals.histories / wall_s, 2) if wall_s > 0 else 0.0,
    }


def _text(data: dict[str, Any], end_seed: int) -> str:
    """Each violation's story, then the counts."""
    lines = []
    for violation in data["violations"]:
        lines += [*violation["story"], f"repeat it: {violation['command']}", ""]
    counts = [
        f"{_count(data['commits'], 'commit')} (median {data['commits_median']} a history, least {data['commits_min']})",
        _count(data["crashes"], "crash"),
        _count(data["store_operations"], "store operation"),
        _count(len(data["violations"]), "violation"),
    ]
    seeds = f"seeds {data['seed']} to {data['next_seed'] - 1}" if data["next_seed"] > data["seed"] else "no seed"
    lines += [
        f"{seeds} done, {_count(data['histories'], 'history')}: {', '.join(counts)}",
        f"{data['wall_s']:.1f} s, {data['histories_per_s']:.1f} histories/s",
    ]
    if data["next_seed"] < end_seed:
        lines.append(f"ended early; go on with --seed {data['next_seed']} --histories {end_seed - data['next_seed']}")
    return "\n".join(lines)
