"""Does a plan come true? python -m tests.studies.paced [--shape NAME ...] [--runs 3]

`diloco launch` of islands whose steps take their time by the clock, on emulated links, planned from the very speeds
and links; then what `diloco plan --calibrate` says of the run: merged tokens/s from the first merge on, over the
plan's. Steps leave the cores free, so that one machine holds several islands.


Ends with the table of README.md, and with status 1 if a median is more than 5 % away from 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from tests.studies.launched import BATCH_TOKENS, NAME, LaunchedRun, lived, toy_file

STEP_S, LOCAL_STEPS, ROUNDS = 0.2, 16, 16
LIMIT_S = 600.0
BEARABLE = 0.05
FAST, SLOW = {}, {"up": "8 Mbps", "down": "20 Mbps", "rtt": "30 ms", "emulate": True}
FAR = {"up": "50 Mbps", "down": "50 Mbps", "rtt": "150 ms", "emulate": True}
HEADER = "| shape | islands | plan, tokens/s | real / plan | of its runs |\n" + "|---" * 5 + "|"


@dataclass(frozen=True)
class Shape:
    """`factors`: by how much longer each island's steps take; `links`: one for each. A model of four fragments of so
    many `elements`."""

    factors: tuple[float, ...]
    links: tuple[dict[str, Any], ...]
    elements: int = 20_000
    sync: dict[str, Any] = field(default_factory=dict)

    def inventory(self) -> str:
        islands = [
            {
                "name": f"l{number}",
                "region": "here",
                "accelerators": "cpu:1",
                "tokens_per_s": BATCH_TOKENS / (STEP_S * factor),
                **({"link": dict(link)} if link else {}),  # a copy each, or YAML makes aliases
            }
            for number, (factor, link) in enumerate(zip(self.factors, self.links, strict=True))
        ]
        cores = {"cores": 4 * len(islands)}  # steps take none, so islands that share some do not slow each other down
        whole = {"version": 1, "store": {"url": "bucket", "region": "here"}, "islands": islands, "local": cores}
        return str(yaml.safe_dump(whole, sort_keys=False))

    def run_file(self) -> str:
        tokens = round(sum(ROUNDS * LOCAL_STEPS * BATCH_TOKENS / factor for factor in self.factors))
        data = ("paced_data", {"step_s": STEP_S, "factors": list(self.factors)})
        sync = {"every": LOCAL_STEPS, "fragments": 4, "quorum": 1, **self.sync}
        return toy_file(("model", {"elements": self.elements}), data, tokens, sync)


SHAPES = {
    "three alike": Shape((1.0, 1.0, 1.0), (FAST, FAST, FAST)),
    "one behind a slow link": Shape((1.0, 1.0, 1.0), (FAST, FAST, SLOW), elements=100_000),
    "one three times slower": Shape((1.0, 1.0, 3.0), (FAST, FAST, FAST), sync={"mixing": "rebase"}),
    "all far away": Shape((1.0, 1.0, 1.0), (FAR, FAR, FAR), elements=50_000),
    "four speeds, two links": Shape((1.0, 1.3, 1.7, 2.4), (FAST, SLOW, FAR, FAST), 50_000, {"mixing": "rebase"}),
}


def study(shape: Shape) -> tuple[float, float]:
    """(planned tokens/s, measured / planned) of one run."""
    with lived(LaunchedRun(Path(tempfile.mkdtemp(prefix="paced-")), shape.run_file(), shape.inventory())) as run:
        run.wait(run.is_over, LIMIT_S)
        words = [sys.executable, "-m", "diloco_cli", "plan", "-f", "run.yaml", "--calibrate", NAME, "--json"]
        done = subprocess.run(words, cwd=run.directory, env=run.environment, capture_output=True, check=True)
        rows = json.loads(done.stdout)["data"]["calibration"]
        found = next(row for row in rows if row["what"] == "merged tokens/s, steady")
        return found["predicted"], found["ratio"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--runs", type=int, default=3, help="of each")
    options = parser.parse_args()
    print(HEADER, flush=True)
    wrong = False
    for name in options.shape:
        found = [study(SHAPES[name]) for _ in range(options.runs)]
        ratios = [ratio for _, ratio in found]
        cells = (name, len(SHAPES[name].factors), f"{found[0][0]:.0f}", f"{median(ratios):.3f}")
        print(f"| {' | '.join(map(str, cells))} | {', '.join(f'{ratio:.3f}' for ratio in ratios)} |", flush=True)
        wrong |= abs(median(ratios) - 1) > BEARABLE
    sys.exit(wrong)


if __name__ == "__main__":
    main()
