"""Start-up times beside `python -c "import typer"`, interleaved: python -m tests.benchmarks.startup

Goals: --help at most 2.5 times, plan and status (on file://) at most 3 times as long.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.benchmarks.measure import ROOT, machine, spread

ROUNDS = 15


def seconds(words: list[str], folder: Path) -> float:
    started = time.perf_counter()
    subprocess.run(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def finished_run(folder: Path) -> None:
    """A short finished run, for `status` to read."""
    shutil.copytree(ROOT / "examples" / "quickstart", folder / "q", ignore=shutil.ignore_patterns("bucket"))
    small = ["--set", "train.tokens=20000", "--set", "train.batch_tokens=256", "--set", "sync.every=16"]
    command = [sys.executable, "-m", "diloco_cli", "launch", "q/run.yaml", *small]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finished_run(folder)
        diloco = str(Path(sys.executable).with_name("diloco"))
        commands = {
            "import typer": [sys.executable, "-c", "import typer"],
            "--help": [diloco, "--help"],
            "plan": [diloco, "plan", "q/inventory.yaml", "-f", "q/run.yaml"],
            "status": [diloco, "status", "quickstart"],
        }
        times: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(ROUNDS):
            for label, words in commands.items():
                times[label].append(seconds(words, folder))
    print(machine())
    for label, values in times.items():
        ratios = [value / base for value, base in zip(values, times["import typer"], strict=True)]
        print(f"{label:<14} {spread(values)} s   ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
