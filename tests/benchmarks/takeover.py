"""From the end of the serving syncer to its standby's first merge: python -m tests.benchmarks.takeover

Every second time it is not killed but frozen, and woken after the takeover: then it has to exit as fenced (status 9).
Goal: nobody waits longer than the takeover time, half of it again (the jitter), one look, a syncer's start and a round.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import machine, quickstart_alone, spread

NAME = "quickstart"


class Run:
    """A run of one island with a syncer and a standby, in a folder of its own."""

    def __init__(self, folder: Path, takeover_s: float) -> None:
        self.folder, self.home = folder, folder / ".diloco" / NAME
        self.log = folder / "bucket" / NAME / "commit"
        quickstart_alone(folder)
        settings = [
            "train.tokens=1B",
            "syncer.standbys=1",
            f"syncer.takeover={takeover_s} s",
            "evaluation.every=100000",
        ]
        self.call("launch", "run.yaml", "--detach", *(word for item in settings for word in ("--set", item)))

    def call(self, *words: str) -> str:
        command = [sys.executable, "-m", "diloco_cli", *words]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def status(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.call("status", NAME, "--json"))["data"]
        return data

    def pid(self, unit: str) -> int:
        return int(json.loads((self.home / "units" / f"{unit}.json").read_text())["identity"]["pid"])

    def fenced(self, unit: str) -> int:
        """How often a process of this unit has exited with status 9."""
        return (self.home / "logs" / "supervisor.log").read_text().count(f"{unit}: fenced")

    def commits(self, after: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while (path := self.log / f"{after + len(found) + 1:012d}.json").exists():
            found.append(json.loads(path.read_text()))
        return found

    def settled(self) -> dict[str, Any]:
        """The status once one syncer serves, merges come, and the other one stands by."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            status = self.status()
            syncer, waiting = status["syncer"], [s for s in status["standbys"] if s["state"] == "STANDING_BY"]
            if (
                syncer
                and syncer["state"] in ("SERVING", "MERGING")
                and waiting
                and (status["last_merge"] or {}).get("age_s", 99) < 3
            ):
                return status
            time.sleep(0.5)
        raise AssertionError(f"no syncer and standby: {status}")


def seconds(commit: dict[str, Any]) -> float:
    return datetime.fromisoformat(commit["time"]).timestamp()


def one_takeover(run: Run, freeze: bool) -> tuple[float, float]:
    """Seconds from the signal to the next epoch, and to its first merge."""
    time.sleep(5)
    status = run.settled()
    unit, pid = status["syncer"]["unit"], run.pid(status["syncer"]["unit"])
    if freeze:
        os.kill(pid, signal.SIGSTOP)
    else:
        run.call("chaos", "kill", unit, "--hold")
    at, epoch = time.time(), status["syncer"]["epoch"]
    deadline = time.monotonic() + 300
    while True:
        fresh = [commit for commit in run.commits(status["commit"]) if commit["epoch"] > epoch]
        merges = [commit for commit in fresh if commit["kind"] == "merge"]
        if merges:
            break
        assert time.monotonic() < deadline, "nobody took over"
        time.sleep(0.2)
    if freeze:
        before = run.fenced(unit)
        os.kill(pid, signal.SIGCONT)
        while run.fenced(unit) == before:
            assert time.monotonic() < deadline, "the woken syncer does not leave"
            time.sleep(0.2)
    else:
        run.call("chaos", "revive", unit)
    return seconds(fresh[0]) - at, seconds(merges[0]) - at


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--takeovers", type=int, default=10)
    parser.add_argument("--takeover-s", type=float, default=15.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), options.takeover_s)
        taken = [one_takeover(run, freeze=number % 2 == 1) for number in range(options.takeovers)]
        run.call("stop", NAME)
        verified = json.loads(run.call("verify", NAME, "--json"))["data"]
        time.sleep(10)
    print(machine())
    print(f"takeover time {options.takeover_s:g} s; jitter up to {options.takeover_s / 2:g} s")
    print(f"next epoch  {spread([epoch for epoch, _ in taken])} s")
    print(f"first merge {spread([merge for _, merge in taken])} s; worst {max(merge for _, merge in taken):.1f} s")
    print(
        f"verify: {verified['commits']} commits, {len(verified['mismatches'])} mismatches, {verified['epochs']} epochs"
    )


if __name__ == "__main__":
    main()
