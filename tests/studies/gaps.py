"""What a fault costs the others: python -m tests.studies.gaps [--mixing rebase]

Three real learners, a syncer and their supervisor (`diloco launch`), on a model of a few numbers whose steps take their
time. One run without a fault, then one for each: a learner is killed, a learner's steps take ten times as long from
there on, the syncer is killed, the syncer stays dead for 20 s. A run goes on until its tokens are merged.

    gap   the longest time between two merges that one of the others takes part in (of the syncer's faults: anybody)

Ends with the table of README.md, and with status 1 if `verify` finds anything.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.records import Mixing, decode
from tests.studies.attendance import gaps_s
from tests.studies.launched import BATCH_TOKENS, NAME, LaunchedRun, inventory_of, lived, toy_file
from tests.studies.toy_process import FRAGMENTS, LEARNERS
from tests.studies.verifying import problems_of

LOCAL_STEPS, STEP_S = 20, 0.1
ROUNDS = 24
STRUCK_AFTER_ROUNDS = 8
DEAD_S = 20.0
VICTIM, SYNCER = LEARNERS[-1], "syncer"
LIMIT_S = 600.0
FAULTS = ("none", "a learner killed", "a learner 10x slower", "the syncer killed", f"the syncer dead for {DEAD_S:g} s")
HEADER = "| mixing | fault | merges | others' longest gap | / healthy | violations |\n" + "|---" * 6 + "|"


def run_file(directory: Path, rounds: int, mixing: Mixing) -> str:
    tokens = len(LEARNERS) * rounds * LOCAL_STEPS * BATCH_TOKENS
    data = ("steered_data", {"step_s": STEP_S, "orders": str(directory / "orders")})
    sync = {"every": LOCAL_STEPS, "fragments": FRAGMENTS, "mixing": mixing}
    return toy_file(("model", {"elements": 16}), data, tokens, sync, retention={"rounds": "all"})


class StruckRun(LaunchedRun):
    def __init__(self, directory: Path, rounds: int, mixing: Mixing) -> None:
        self.orders = directory / "orders"
        self.orders.mkdir()
        super().__init__(directory, run_file(directory, rounds, mixing), inventory_of(LEARNERS))

    def merges(self) -> list[Commit]:
        commits = [decode(Commit, data, name) for name, data in self.log().items()]
        return [commit for commit in commits if commit.kind == "merge"]

    def strike(self, fault: str) -> None:
        match FAULTS.index(fault):
            case 1:
                self._chaos("kill", VICTIM)
            case 2:
                (self.orders / VICTIM).write_text("slow")
            case 3:
                self._chaos("kill", SYNCER)
            case 4:
                self._chaos("kill", SYNCER, "--hold")
                time.sleep(DEAD_S)
                self._chaos("revive", SYNCER)

    def _chaos(self, *words: str) -> None:
        """`diloco chaos`, as a user would."""
        command = [sys.executable, "-m", "diloco_cli", "chaos", *words, "--run", NAME]
        subprocess.run(command, cwd=self.directory, env=self.environment, check=True, capture_output=True)


def max_gap_s(merges: Sequence[Commit], learners: Iterable[str]) -> float:
    """Between two merges that the same learner takes part in, of these learners, once all have taken part together."""
    together = next((i for i, commit in enumerate(merges) if len(commit.inputs) == len(LEARNERS)), len(merges))
    gaps = (gaps_s([commit for commit in merges[together:] if takes_part(name, commit)]) for name in learners)
    return max(chain.from_iterable(gaps), default=0.0)


def takes_part(name: str, commit: Commit) -> bool:
    return any(item.learner == name for item in commit.inputs)


@dataclass(frozen=True)
class GapRow:
    """Of one run."""

    mixing: Mixing
    fault: str
    merges: int
    gap_s: float
    violations: list[str]

    def text(self, healthy_s: float) -> str:
        wrong = "; ".join(self.violations) or "0"
        cells = [
            self.mixing,
            self.fault,
            str(self.merges),
            f"{self.gap_s:.2f} s",
            f"{self.gap_s / healthy_s:.2f}",
            wrong,
        ]
        return f"| {' | '.join(cells)} |"


def study(mixing: Mixing, fault: str, rounds: int = ROUNDS) -> GapRow:
    with lived(StruckRun(Path(tempfile.mkdtemp(prefix="gaps-")), rounds, mixing)) as run:
        run.wait(lambda: len(run.merges()) >= min(STRUCK_AFTER_ROUNDS, rounds // 2) * FRAGMENTS, LIMIT_S)
        run.strike(fault)
        run.wait(run.is_over, LIMIT_S)
        others = [name for name in LEARNERS if "learner" not in fault or name != VICTIM]
        merges = run.merges()
        return GapRow(mixing, fault, len(merges), max_gap_s(merges, others), problems_of(run.verified()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixing", choices=("replace", "rebase"), help="default: both, one after the other")
    parser.add_argument("--fault", choices=FAULTS[1:], action="append", help="default: all; may be given several times")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *about: sys.exit(143))  # so that nothing that was started stays behind
    mixings: tuple[Mixing, ...] = (options.mixing,) if options.mixing else ("replace", "rebase")
    violated = False
    print(HEADER, flush=True)
    for mixing in mixings:
        healthy_s = 0.0
        for fault in (FAULTS[0], *(options.fault or FAULTS[1:])):
            row = study(mixing, fault, options.rounds)
            healthy_s = healthy_s or row.gap_s
            print(row.text(healthy_s), flush=True)
            violated |= bool(row.violations)
    sys.exit(1 if violated else 0)


if __name__ == "__main__":
    main()
