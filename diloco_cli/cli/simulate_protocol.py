"""`diloco simulate protocol`: seeded worst cases of the protocol's own code in virtual time."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli.output import print_json, talk

if TYPE_CHECKING:
    from diloco_cli.simulate.histories.campaign import Totals

COMMAND = "simulate protocol"
DEFAULT_HISTORIES, DEFAULT_SWEEPS = 100, 1
MOST_HISTORIES, MOST_JOBS = 10_000_000, 1024


def protocol(
    seed: int = typer.Option(0, "--seed", min=0, help="The first history's seed."),
    histories: int = typer.Option(
        None,
        "--histories",
        min=1,
        max=MOST_HISTORIES,
        help="So many seeds, one history each (with --sweep: one sweep).",
    ),
    jobs: int = typer.Option(1, "--jobs", min=1, max=MOST_JOBS, help="Processes that share the work."),
    sweep: bool = typer.Option(False, "--sweep", help="Crash everybody at every operation, before and after it."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Histories of crashes, lost answers and zombies, each checked after every step. Exit 11 if an invariant breaks.

    A seed draws the fleet and its faults; the same seed gives the same history. A violation comes with the shortest
    story that was found and with the command that repeats it.
    """
    from diloco_cli.clock import monotonic_s
    from diloco_cli.errors import DataCheckError
    from diloco_cli.simulate.histories.campaign import campaign, work_of

    wanted = histories or (DEFAULT_SWEEPS if sweep else DEFAULT_HISTORIES)
    started_s = monotonic_s()
    progress = _Progress("crash points" if sweep else f"of {wanted:,} histories")
    totals = campaign(work_of(seed, wanted, sweep), jobs, progress.show)
    progress.clear()
    wall_s = monotonic_s() - started_s
    data = _data(seed, totals, wall_s)
    error = None
    if totals.violations:
        commands = [violation.command for violation in totals.violations]
        error = DataCheckError(f"{len(commands)} violations in {totals.histories:,} histories", hint=commands[0])
    if json:
        print_json(COMMAND, data, error=error)
    else:
        print(_text(data))
    if error is not None:
        if json:
            raise typer.Exit(error.exit_status)
        raise error


class _Progress:
    """How far it is: on a terminal one line that is overwritten, else a line now and then."""

    def __init__(self, unit: str) -> None:
        self._unit, self._terminal = unit, sys.stderr.isatty()
        self._said = 0

    def show(self, totals: Totals) -> None:
        text = f"{totals.histories:,} {self._unit}, {len(totals.violations)} violations"
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif totals.histories >= 2 * self._said and totals.histories >= 1000:
            self._said = totals.histories
            talk(text)

    def clear(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _data(seed: int, totals: Totals, wall_s: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "histories": totals.histories,
        "commits": totals.commits,
        "crashes": totals.crashes,
        "store_operations": totals.store_operations,
        "violations": [asdict(violation) for violation in totals.violations],
        "wall_s": round(wall_s, 3),
        "histories_per_s": round(totals.histories / wall_s, 2) if wall_s > 0 else 0.0,
    }


def _text(data: dict[str, Any]) -> str:
    """Each violation's story, then the counts."""
    lines = []
    for violation in data["violations"]:
        lines += [*violation["story"], f"repeat it: {violation['command']}", ""]
    lines.append(
        f"{data['histories']:,} histories from seed {data['seed']}: {data['commits']:,} commits, {data['crashes']:,} "
        f"crashes, {data['store_operations']:,} store operations, {len(data['violations'])} violations"
    )
    lines.append(f"{data['wall_s']:.1f} s, {data['histories_per_s']:.1f} histories/s")
    return "\n".join(lines)
