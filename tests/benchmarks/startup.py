"""Start-up times beside `python -c "import typer"`, interleaved: python -m tests.benchmarks.startup

Processor seconds, because they hardly depend on what else the machine does. Goals: --help at most 2 times, plan --fast,
which simulates nothing, and status (on file://) at most 3 times as long. From typer 0.29 on, any command with a
parameter imports pydantic, which takes 1.5 times as long as typer itself.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.benchmarks.measure import ROOT, machine, spread

ROUNDS = 15


def seconds(words: list[str], folder: Path) -> float:
    """Of the processor, with compiled modules kept from run to run, as they are where diloco is installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def finished_run(folder: Path) -> None:
    """A short finished run, for `status` to read."""
    shutil.copytree(ROOT / "examples" / "quickstart", folder / "q", ignore=shutil.ignore_patterns("bucket"))
    small = ["--set", "train.tokens=20000", "--set", "train.batch_tokens=256", "--set", "sync.every=16"]
    command = [sys.executable, "-m", "diloco_cli", "launch", "q/run.yaml", *small]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["DILOCO_HOME"] = str(folder / "home")  # this machine may know another run of that name
        finished_run(folder)
        diloco = str(Path(sys.executable).with_name("diloco"))
        commands = {
            "import typer": [sys.executable, "-c", "import typer"],
            "--help": [diloco, "--help"],
            "plan --fast": [diloco, "plan", "q/inventory.yaml", "-f", "q/run.yaml", "--fast"],
            "status": [diloco, "status", "quickstart"],
        }
        times: dict[str, list[float]] = {label: [] for label in commands}
        for words in commands.values():
            seconds(words, folder)  # compiles
        for _ in range(ROUNDS):
            for label, words in commands.items():
                times[label].append(seconds(words, folder))
    print(machine())
    for label, values in times.items():
        ratios = [value / base for value, base in zip(values, times["import typer"], strict=True)]
        print(f"{label:<14} {spread(values)} s   ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
