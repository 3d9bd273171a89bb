"""Storms by `diloco chaos run`, each on a run of its own: python -m tests.studies.storms --storms 10 --minutes 10

Three real learners, a syncer and their supervisor (`diloco launch`), on a model of a few numbers whose steps take their
time, and 50 foreign processes that are called like units. Learners are killed, paused, cut off from their store
or without room in it, the syncer is killed or has a failing store, by a fresh seed for each storm; half way the
supervisor, and later everything at once. Storms with a fault that the product is not
to survive (`--planted damage`: merged deltas are zeroed; `hang`: a learner's step never ends, nor does its successor's)
must FAIL, the others must PASS.

Ends with the table of README.md, and with status 1 if a verdict was wrong, something was not healed, or a foreign
process was touched.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tests.studies.gaps import LOCAL_STEPS, STEP_S, VICTIM, StruckRun
from tests.studies.launched import NAME, lived

Planted = Literal["nothing", "damage", "hang"]
DECOYS = 50
STORM = """\
version: 1
name: study
duration: {seconds:g} s
warm_up: {warm_up:g} s
faults:
  - {{kind: kill, target: learners, poisson: 40 s, revive_after: 3 s}}
  - {{kind: kill, target: syncer, poisson: 2 min, revive_after: 3 s}}
  - {{kind: pause, target: learners, poisson: 90 s, for: 8 s}}
  - {{kind: partition, target: learners, poisson: 2 min, for: 8 s}}
  - {{kind: errors, target: syncer, poisson: 3 min, for: 10 s, share: 0.3}}
  - {{kind: full, target: learners, poisson: 3 min, for: 8 s}}
  - {{kind: kill, target: supervisor, at: {half:g} s, revive_after: 2 s}}
  - {{kind: kill, target: all, at: {late:g} s, revive_after: 3 s}}
constraints: {{cooldown: 1 s}}
hypotheses: [verify, "goodput >= 0.5", "recovery_p95 <= 1 min"]
"""
HEADER = (
    "| seed | planted | verdict | planned | injected | verified | healed | merged again (median, p95) | goodput "
    "| predicted | foreign processes alive | failed |\n" + "|---" * 12 + "|"
)


@dataclass(frozen=True)
class StormRow:
    """Of one storm. `report`: what the command printed."""

    seed: int
    planted: Planted
    report: dict[str, Any]
    alive: int

    @property
    def wrong(self) -> list[str]:
        expected = "PASS" if self.planted == "nothing" else "FAIL"
        wrong = [] if self.report["verdict"] == expected else [f"{self.report['verdict']}, not {expected}"]
        wrong += [f"{DECOYS - self.alive} foreign processes are gone"] if self.alive < DECOYS else []
        return wrong + ["not healed"] * (self.healed < self.count("injected"))

    @property
    def healed(self) -> int:
        return self.count("healed")

    def count(self, key: str) -> int:
        return sum(bool(fault[key]) for fault in self.report["faults"])

    def text(self) -> str:
        found, again = self.report, self.report["recovery"]["merged_again_s"]
        failed = "; ".join(f"{it['text']}: {it['value'][:60]}" for it in found["hypotheses"] if not it["ok"])
        cells = [
            self.seed, self.planted, found["verdict"], len(found["faults"]), self.count("injected"),
            self.count("verified"), self.healed, f"{again['median']:.1f} s, {again['p95']:.1f} s",
            *("-" if found[key] is None else f"{found[key]:.3f}" for key in ("goodput", "predicted_goodput")),
            f"{self.alive} of {DECOYS}", failed or "-",
        ]  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


@contextmanager
def foreign() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are called like units, and are none."""
    names = ("diloco learner --name=l0", "diloco syncer", "diloco resume", "l2", "supervisor")
    found = [subprocess.Popen([names[n % len(names)], "86400"], executable="/bin/sleep") for n in range(DECOYS)]
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


def study(seed: int, seconds: float, planted: Planted = "nothing") -> StormRow:
    rounds = round(2 * (seconds + 240) / (LOCAL_STEPS * STEP_S))
    directory = Path(tempfile.mkdtemp(prefix="storms-"))
    text = STORM.format(seconds=seconds, warm_up=seconds / 10, half=seconds / 2, late=0.75 * seconds)
    with foreign() as others, lived(StruckRun(directory, rounds, "rebase")) as run:
        (directory / "storm.yaml").write_text(text)
        run.wait(lambda: len(run.merges()) >= 60, 300.0)
        words = ["chaos", "run", "storm.yaml", NAME, f"--seed={seed}", "--json"]
        command = [sys.executable, "-m", "diloco_cli", *words]
        storm = subprocess.Popen(command, cwd=directory, env=run.environment, stdout=subprocess.PIPE)
        time.sleep(0.6 * seconds)
        if planted == "hang":
            (run.orders / VICTIM).write_text("hang")
        elif planted == "damage":
            run.damage_deltas(slice(-40, -20))
        out, _ = storm.communicate()
        return StormRow(seed, planted, json.loads(out)["data"], sum(other.poll() is None for other in others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storms", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each")
    parser.add_argument("--seed", type=int, default=1, help="of the first; the next ones count on")
    parser.add_argument("--planted", choices=get_args(Planted), default="nothing", help="in each of them")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *about: sys.exit(143))  # so that nothing that was started stays behind
    wrong = False
    print(HEADER, flush=True)
    for seed in range(options.seed, options.seed + options.storms):
        row = study(seed, 60 * options.minutes, options.planted)
        print(row.text(), *row.wrong, sep="\n", flush=True)
        wrong |= bool(row.wrong)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
