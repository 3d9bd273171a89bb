"""From SIGKILL to the first useful step, beside a cold start: python -m tests.benchmarks.recovery

Goal: at most 1.5 times the cold start plus one supervisor poll (0.2 s).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from tests.benchmarks.measure import machine, quickstart_alone, spread

KILLS = 6
SETTLE_S = 12
JOINED = re.compile(r"^\S+ alone: incarnation (\d+) of run ")
FIRST_STEP = re.compile(r"^(\S+) alone: made its first step$")


def first_steps(log: Path) -> dict[int, float]:
    """When each incarnation made its first step, by the learner's own log."""
    found: dict[int, float] = {}
    incarnation = 0
    for line in log.read_text().splitlines() if log.exists() else []:
        if joined := JOINED.match(line):
            incarnation = int(joined[1])
        elif stepped := FIRST_STEP.match(line):
            found[incarnation] = datetime.fromisoformat(stepped[1]).timestamp()
    return found


def wait_for(log: Path, incarnation: int) -> float:
    deadline = time.monotonic() + 60
    while incarnation not in first_steps(log):
        assert time.monotonic() < deadline, f"incarnation {incarnation} made no step"
        time.sleep(0.05)
    return first_steps(log)[incarnation]


def cold_start(url: str, log: Path, incarnation: int) -> float:
    """A learner's process alone, from its start to its first step; the run exists and its syncer serves."""
    started = time.time()
    with log.open("a") as out:
        words = [sys.executable, "-m", "diloco_cli", "learner", "--run", url, "--name", "alone"]
        learner = subprocess.Popen(
            words, stdout=out, env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        )
        took = wait_for(log, incarnation) - started
        time.sleep(1)
        learner.kill()
        learner.wait()
    return took


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        quickstart_alone(folder)
        words = [sys.executable, "-m", "diloco_cli", "launch", "run.yaml", "--detach", "--set", "train.tokens=1B"]
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
        home = folder / ".diloco" / "quickstart"
        log, recoveries = home / "logs" / "alone.log", []
        wait_for(log, 1)
        for kill in range(KILLS):
            time.sleep(SETTLE_S if kill == 0 else 6)
            pid = json.loads((home / "units" / "alone.json").read_text())["identity"]["pid"]
            killed = time.time()
            os.kill(pid, signal.SIGKILL)
            recoveries.append(wait_for(log, kill + 2) - killed)
        subprocess.run(
            [sys.executable, "-m", "diloco_cli", "stop", "quickstart"], cwd=folder, check=True, capture_output=True
        )
        time.sleep(3)
        url = f"file://{folder}/bucket/quickstart"
        syncer = subprocess.Popen(
            [sys.executable, "-m", "diloco_cli", "syncer", "--run", url], stdout=subprocess.DEVNULL
        )
        time.sleep(5)
        colds = [cold_start(url, folder / "cold.log", KILLS + 2 + i) for i in range(KILLS)]
        syncer.terminate()
        syncer.wait()
    print(machine())
    print(f"cold start {spread(colds)} s")
    print(f"recovery   {spread(recoveries)} s")


if __name__ == "__main__":
    main()
