"""Who takes part in the merges of real runs: python -m tests.studies.attendance [--case NAME] [--runs 3]

`diloco launch` with three learners and a syncer. Steps that take their time leave the cores free; the quickstart is as
it is, and its learners share the cores.

    near         islands within 3 % of each other
    slow-4       one island takes six times as long for a step; four fragments
    slow-24      the same with 24, so that its steps last for six merges each
    quickstart   examples/quickstart

    participation   inputs / (merges x islands), from the first merge on
    slot            median time between two merges, over a slot's steps of the fastest island
    merged          of all that the slowest island trained, in the mean over the fragments; its last round is on its way
                    when a run ends

Ends with the table of README.md, and with status 1 where a median misses its bound.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat
from diloco_cli.protocol.log.keys import heartbeat_key
from diloco_cli.protocol.log.records import decode
from tests.studies.launched import BATCH_TOKENS, NAME, ROOT, LaunchedRun, inventory_of, lived, toy_file

ISLANDS = ("l0", "l1", "l2")
LIMIT_S = 900.0
HEADER = "| run | merges | participation | slot | merged of the slowest |\n" + "|---" * 5 + "|"


@dataclass(frozen=True)
class Case:
    """`factors`: how long each island's step takes, in those of the first. Bounds of the medians; None: not asked."""

    step_s: float
    factors: tuple[float, ...]
    every: int
    fragments: int
    merges: int
    least_participation: float | None
    least_merged: float | None

    def run_file(self) -> str:
        speed = sum(1 / factor for factor in self.factors)
        tokens = round(self.merges / self.fragments * self.every * BATCH_TOKENS * speed)
        model = ("model", {"elements": 16, "fragments": self.fragments})
        data = ("slow_data", {"step_s": self.step_s, "factors": self.factors})
        sync = {"every": self.every, "fragments": self.fragments, "mixing": "rebase"}
        return toy_file(model, data, tokens, sync, retention={"rounds": "all"})


CASES = {
    "near": Case(0.3, (1.0, 1.015, 1.03), 8, 4, 160, 0.97, None),
    "slow-4": Case(0.15, (1.0, 1.0, 6.0), 24, 4, 160, None, 0.9),
    "slow-24": Case(0.4, (1.0, 1.0, 6.0), 24, 24, 300, None, 0.9),
}
QUICKSTART = "quickstart"
QUICKSTART_LEAST = 0.93
INVENTORY = inventory_of(ISLANDS)


@dataclass(frozen=True)
class AttendanceRow:
    """Of one run."""

    merges: int
    participation: float
    slot: float
    merged: float


def judge(run: LaunchedRun) -> AttendanceRow:
    """What a run came to that is over."""
    merges = [commit for data in run.log().values() if (commit := decode(Commit, data, "log")).kind == "merge"]
    islands, fragments, every = run.run.islands, run.run.num_fragments, run.run.settings.sync.every
    batch_tokens = islands[0].batch_tokens
    merged = Counter[str]()
    for item in (item for commit in merges for item in commit.inputs):
        merged[item.learner] += item.tokens
    trained = {
        i.name: decode(LearnerHeartbeat, run.store.get(heartbeat_key(i.name)) or b"", "heartbeat").position
        for i in islands
    }
    fastest, slowest = max(trained, key=trained.__getitem__), min(trained, key=trained.__getitem__)
    step_s = _seconds(merges[0], merges[-1]) / (merged[fastest] / fragments / batch_tokens)
    return AttendanceRow(
        merges=len(merges),
        participation=sum(len(commit.inputs) for commit in merges) / (len(merges) * len(islands)),
        slot=median(gaps_s(merges)) / (step_s * every / fragments),
        merged=merged[slowest] / fragments / trained[slowest],
    )


def gaps_s(merges: Sequence[Commit]) -> list[float]:
    return [_seconds(earlier, later) for earlier, later in pairwise(merges)]


def _seconds(earlier: Commit, later: Commit) -> float:
    return (datetime.fromisoformat(later.time) - datetime.fromisoformat(earlier.time)).total_seconds()


def study(run_text: str, inventory: str) -> AttendanceRow:
    with lived(LaunchedRun(Path(tempfile.mkdtemp(prefix="attendance-")), run_text, inventory)) as run:
        run.wait(run.is_over, LIMIT_S)
        return judge(run)


def files_of(case: str) -> tuple[str, str]:
    """(run.yaml, inventory.yaml)"""
    if case != QUICKSTART:
        return CASES[case].run_file(), INVENTORY
    example = ROOT / "examples" / "quickstart"
    run_text = (example / "run.yaml").read_text()
    return run_text.replace("name: quickstart", f"name: {NAME}"), (example / "inventory.yaml").read_text()


def line(case: str, rows: Sequence[AttendanceRow]) -> str:
    """Medians; of the participation all."""
    each = ", ".join(f"{row.participation:.3f}" for row in rows)
    part, slot = median(row.participation for row in rows), median(row.slot for row in rows)
    merged, merges = median(row.merged for row in rows), [row.merges for row in rows]
    merges_text = f"{min(merges)} to {max(merges)}"
    return f"| {case} | {merges_text} | {part:.3f} ({each}) | {slot:.2f} | {100 * merged:.1f} % |"


def misses(case: str, rows: Sequence[AttendanceRow]) -> bool:
    least = QUICKSTART_LEAST if case == QUICKSTART else CASES[case].least_participation
    least_merged = None if case == QUICKSTART else CASES[case].least_merged
    part, merged = median(row.participation for row in rows), median(row.merged for row in rows)
    return (least is not None and part < least) or (least_merged is not None and merged < least_merged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = (*CASES, QUICKSTART)
    parser.add_argument("--case", choices=cases, action="append", help="default: all; may be given several times")
    parser.add_argument("--runs", type=int, default=3, help="of each case")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *about: sys.exit(143))  # so that nothing that was started stays behind
    missed = False
    print(HEADER, flush=True)
    for case in options.case or cases:
        rows = [study(*files_of(case)) for _ in range(options.runs)]
        print(line(case, rows), flush=True)
        missed |= misses(case, rows)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
