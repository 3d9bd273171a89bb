"""kill -9 at random instants: python -m tests.studies.kills --kills 200 --role learner|syncer|all --seed 1

A toy run of four processes (three learners, a syncer) on file://. Again and again, at a random instant, one learner,
the syncer or all four are killed and started anew. After every kill: the log that anybody had seen before it is a
prefix of the log now, byte for byte; `verify` finds every digest in place and no offer applied twice. In most cases
the run must merge again before the next kill; the next one otherwise strikes while its victims are still starting. A
run that reaches its target is verified once more, and the next one begins.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Literal, get_args

from diloco_cli.config.settings import RetentionSettings
from diloco_cli.protocol.keys import FORMAT_KEY
from diloco_cli.protocol.records import Commit, RunFormat
from diloco_cli.protocol.wire import decode, encode
from diloco_cli.store.open import open_store
from tests.studies.toy_runs import LEARNERS, integer_run
from tests.studies.verifying import verified_integers

ROOT = Path(__file__).resolve().parents[2]
SYNCER = "syncer"
EVERYBODY = (*LEARNERS, SYNCER)
ROUNDS = 16
STEP_S = 0.04
RETENTIONS = (RetentionSettings(rounds=4, grace_s=2.0), RetentionSettings("all"))  # by turns
STRIKE_WITHIN_S = 1.0
WHILE_STARTING_S = 0.4
WHILE_STARTING_SHARE = 0.3
MERGE_WITHIN_S = 120.0

Role = Literal["learner", "syncer", "all"]


@dataclass
class Tally:
    """What a study has seen. `back_s`: from each kill to the next merge, where it was waited for."""

    kills: int = 0
    while_starting: int = 0
    runs: int = 0
    finished: int = 0
    commits: int = 0
    merges: int = 0
    applied: int = 0
    collected: int = 0
    back_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def text(self) -> str:
        spread = quantiles(self.back_s, n=20) if len(self.back_s) > 1 else [0.0] * 19
        back = f"{spread[9]:.2f} s median, {spread[18]:.2f} s p95, {max(self.back_s, default=0.0):.2f} s worst"
        return (
            f"{self.kills} kills ({self.while_starting} of processes that were starting) in {self.runs} runs"
            f" ({self.finished} to their end), {self.commits} commits, {self.merges} merges, {self.applied} offers"
            f" applied, {self.collected} runs with collected garbage; next merge after {back};"
            f" {len(self.violations)} violations"
        )


class ToyRun:
    """Four processes and a directory."""

    def __init__(self, directory: Path, run: RunFormat) -> None:
        self.run, self.directory, self.bucket = run, directory, directory / "bucket"
        self.url = self.bucket.as_uri()
        self.store = open_store(self.url, create=True)
        self.store.create(FORMAT_KEY, encode(run))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            words = [SYNCER, self.url] if name == SYNCER else ["learner", self.url, name]
            with (self.directory / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "tests.studies.toy_process", *words],
                    cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
                )  # fmt: skip

    def kill(self, *names: str) -> None:
        """SIGKILL to all of them, then wait for all of them."""
        for name in names:
            self.processes[name].kill()
        for name in names:
            self.processes[name].wait()

    def failed(self) -> list[str]:
        """Processes that ended by themselves, and not because the run is over."""
        ends = {name: process.poll() for name, process in self.processes.items()}
        return [f"{name} ended with status {end}" for name, end in sorted(ends.items()) if end not in (None, 0, -9)]

    def log(self) -> dict[str, bytes]:
        """The commits as they lie there."""
        folder = self.bucket / "commit"
        return {path.name: path.read_bytes() for path in sorted(folder.glob("*.json"))}

    def is_over(self) -> bool:
        return all(process.poll() == 0 for process in self.processes.values())


class Study:
    """One role's kills, by one seed."""

    def __init__(self, role: Role, seed: int, rounds: int = ROUNDS) -> None:
        self.role, self.rounds, self.random, self.tally = role, rounds, random.Random(f"{role} {seed}"), Tally()

    def kill(self, kills: int) -> Tally:
        while self.tally.kills < kills and not self.tally.violations:
            with toy_run(self._next_format()) as toy:
                self._one_run(toy, kills)
                self.tally.runs += 1
                if self.tally.violations:
                    toy.kill(*EVERYBODY)
                    kept = shutil.copytree(toy.directory, tempfile.mkdtemp(prefix="kills-"), dirs_exist_ok=True)
                    self.tally.violations.append(f"its bucket and logs: {kept}")
        return self.tally

    def _next_format(self) -> RunFormat:
        return integer_run(self.rounds, STEP_S, RETENTIONS[self.tally.runs % len(RETENTIONS)])

    def _one_run(self, toy: ToyRun, kills: int) -> None:
        toy.start(*EVERYBODY)
        starting = True
        while self.tally.kills < kills and not toy.is_over():
            time.sleep(self.random.uniform(0, WHILE_STARTING_S if starting else STRIKE_WITHIN_S))
            self.tally.while_starting += starting
            before = self._strike(toy)
            starting = self.random.random() < WHILE_STARTING_SHARE
            if not starting:
                self._expect_a_merge(toy, num_merges(before))
            if not self._is_sound(toy, before):
                return
            if self.tally.kills % 20 == 0:
                print(f"{self.role}: {self.tally.kills} kills", file=sys.stderr, flush=True)
        if toy.is_over():
            self.tally.finished += 1
        self._count(toy)

    def _strike(self, toy: ToyRun) -> dict[str, bytes]:
        """The log as it was seen before (or, where nobody lives on, as it was left) by the kill."""
        names = {"learner": (self.random.choice(LEARNERS),), "syncer": (SYNCER,), "all": EVERYBODY}[self.role]
        before = toy.log()
        toy.kill(*names)
        self.tally.kills += 1
        if self.role == "all":
            before |= {name: data for name, data in toy.log().items() if name not in before}
            self._is_sound(toy, before)
        toy.start(*names)
        return before

    def _expect_a_merge(self, toy: ToyRun, num_before: int) -> None:
        killed_s = time.monotonic()
        while num_merges(toy.log()) <= num_before and not toy.is_over():
            if time.monotonic() - killed_s > MERGE_WITHIN_S:
                self.tally.violations.append(f"no merge within {MERGE_WITHIN_S:.0f} s after kill {self.tally.kills}")
                return
            time.sleep(0.02)
        self.tally.back_s.append(time.monotonic() - killed_s)

    def _is_sound(self, toy: ToyRun, before: dict[str, bytes]) -> bool:
        now, found = toy.log(), verified_integers(toy.store, toy.run)
        wrong = [f"commit {name} changed or vanished" for name, data in before.items() if now.get(name) != data]
        wrong += [f"missing: {key}" for key in found.missing] + found.mismatches + toy.failed()
        wrong += [f"{found.duplicates} offers applied twice"] if found.duplicates else []
        self.tally.violations += [f"after kill {self.tally.kills}: {text}" for text in wrong]
        return not self.tally.violations

    def _count(self, toy: ToyRun) -> None:
        """What this run came to, once nobody writes any more."""
        toy.kill(*EVERYBODY)
        self._is_sound(toy, {})
        found = verified_integers(toy.store, toy.run)
        self.tally.commits += found.commits
        self.tally.merges += found.merges
        self.tally.applied += found.offers_applied
        self.tally.collected += found.floor > 0


def num_merges(log: dict[str, bytes]) -> int:
    return sum(decode(Commit, data, name).kind == "merge" for name, data in log.items())


@contextmanager
def toy_run(run: RunFormat) -> Iterator[ToyRun]:
    """Ends what it started, and leaves nothing behind."""
    directory = Path(tempfile.mkdtemp(prefix="toy-run-"))
    toy = ToyRun(directory, run)
    try:
        yield toy
    finally:
        toy.kill(*toy.processes)
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--role", choices=get_args(Role), default="learner", help="all: everybody at once")
    parser.add_argument("--seed", type=int, default=1, help="of victims and instants; what runs meanwhile is real")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of each run; from about 30 on, garbage is collected"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *about: sys.exit(143))  # so that nothing that was started stays behind
    began_s, study = time.monotonic(), Study(arguments.role, arguments.seed, arguments.rounds)
    try:
        study.kill(arguments.kills)
    finally:  # also of a study that was cut short
        print(f"{arguments.role}: {study.tally.text()}; {time.monotonic() - began_s:.0f} s", flush=True)
        for violation in study.tally.violations:
            print(violation)
    sys.exit(11 if study.tally.violations else 0)


if __name__ == "__main__":
    main()
