"""python -m tests.histories --seed 1 --histories 500 --jobs 2

Seeded worst cases of the protocol's own code in virtual time, each checked after every step. A violation comes with the
shortest story that was found and with the command that repeats it; the exit status is 11 then. Ctrl-C ends it with what
was done by then, and says with which seed to go on.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

from diloco_cli.errors import INTERRUPTED_STATUS, DataCheckError
from tests.histories.campaign import Totals, campaign, point_at, say, work_of

LINE_EVERY_S = 60.0


def main() -> int:
    arguments = _arguments()
    seed, sweep = arguments.seed, arguments.sweep or arguments.at is not None
    wanted = arguments.histories or (1 if sweep else 100)
    started_s = time.monotonic()
    progress = _Progress(wanted, started_s)
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the results so far are printed
    work = work_of(seed, wanted, sweep, say, None if arguments.at is None else point_at(arguments.at))
    totals = campaign(work, arguments.jobs, progress.show)
    signal.signal(signal.SIGTERM, usual)
    data = _data(seed, totals, time.monotonic() - started_s)
    if arguments.json:
        print(json.dumps(data))
    else:
        print(_text(data, seed + wanted))
    if totals.violations:
        return DataCheckError.exit_status
    return INTERRUPTED_STATUS if totals.interrupted else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.histories", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the first history's seed")
    parser.add_argument("--histories", type=int, help="so many seeds, one history each (with --sweep: one sweep)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument("--sweep", action="store_true", help="crash every process before and after each operation")
    parser.add_argument("--at", help="of a sweep this crash alone, as in l0.1:3:after")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args()


class _Progress:
    """A line at the first result and each minute, and one for each violation."""

    def __init__(self, wanted: int, started_s: float) -> None:
        self._wanted, self._started_s = wanted, started_s
        self._next_s, self._found = 0.0, 0

    def show(self, totals: Totals) -> None:
        for violation in totals.violations[self._found :]:
            say(f"seed {violation.seed}: {violation.story[-1]}")
        self._found = len(totals.violations)
        spent_s = time.monotonic() - self._started_s
        if spent_s >= self._next_s:
            self._next_s = spent_s + LINE_EVERY_S
            rate = totals.histories / max(spent_s, 1e-9)
            say(f"{totals.histories:,} histories (of {self._wanted:,} seeds), {rate:.1f}/s, {totals.commits:,} commits")


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
        "cpu_s": round(time.process_time(), 3),
    }


def _text(data: dict[str, Any], end_seed: int) -> str:
    """Each violation's story, then the counts."""
    lines = []
    for violation in data["violations"]:
        lines += [*violation["story"], f"repeat it: {violation['command']}", ""]
    lines += [
        f"seeds {data['seed']} to {data['next_seed'] - 1} done: {data['histories']:,} histories, "
        f"{data['commits']:,} commits (median {data['commits_median']} a history, least {data['commits_min']}), "
        f"{data['crashes']:,} crashes, {data['store_operations']:,} store operations, "
        f"{len(data['violations'])} violations",
        f"{data['wall_s']:.1f} s, {data['histories_per_s']:.1f} histories/s",
    ]
    if data["next_seed"] < end_seed:
        lines.append(f"ended early; go on with --seed {data['next_seed']} --histories {end_seed - data['next_seed']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
