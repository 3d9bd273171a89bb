"""kill -9 at random instants: python -m tests.studies.kills --kills 200 --role learner|syncer|all|supervisor --seed 1

A toy run of four processes (three learners, a syncer) on file://. Again and again, at a random instant, one learner,
the syncer or all four are killed and started anew. Or a run of `diloco launch`: only that process is killed, `diloco
resume` goes on, and the units must live through it, each once. After every kill: the log that anybody had seen before
it is a prefix of the log now, byte for byte; `verify` finds every digest in place and no offer applied twice. In most
cases the run must merge again before the next kill; the next one otherwise strikes while its victims are still
starting. A run that reaches its target is verified once more, a toy run also by the histories' own reader, and the next
one begins. With `--bad-reads .05` that share of what a toy's processes read is cut short, or has a flipped bit.

Ends with one row for the table in README.md, and with status 1 if anything was violated.
"""

from __future__ import annotations

import argparse
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
from diloco_cli.observe.replay import Replay
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import RunFormat, decode, encode
from diloco_cli.signing import OPERATOR
from diloco_cli.store.open import open_store
from tests.histories.replayer import Replayer, ViolationError
from tests.studies.launched import SUPERVISOR, LaunchedRun, run_file
from tests.studies.toy_process import BAD_READS, LEARNERS, integer_run, spawned
from tests.studies.verifying import problems_of, verified_integers

SYNCER = "syncer"
EVERYBODY = (*LEARNERS, SYNCER)
STRUCK = {"syncer": (SYNCER,), "all": EVERYBODY, "supervisor": (SUPERVISOR,)}
ROUNDS = 16
STEP_S = 0.04
RETENTIONS = (RetentionSettings(rounds=4, grace_s=2.0), RetentionSettings("all"))  # by turns
STRIKE_WITHIN_S = 1.0
WHILE_STARTING_S = 0.4
WHILE_STARTING_SHARE = 0.3
MERGE_WITHIN_S = 120.0

Role = Literal["learner", "syncer", "all", "supervisor"]
KILLED: dict[Role, str] = {
    "learner": "one learner", "syncer": "the syncer", "all": "everybody at once", "supervisor": "`diloco launch`",
}  # fmt: skip
HEADER = (
    "| killed | kills | while starting | runs (to their end) | commits | merges | offers applied | next merge (median, "
    "p95, worst) | violations |\n|---|---|---|---|---|---|---|---|---|"
)


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

    def row(self, name: str) -> str:
        """Of the table in README.md."""
        spread = quantiles(self.back_s, n=20) if len(self.back_s) > 1 else self.back_s * 19 or [0.0] * 19
        cells = [
            name, str(self.kills), str(self.while_starting), f"{self.runs} ({self.finished})", f"{self.commits:,}",
            f"{self.merges:,}", f"{self.applied:,}",
            f"{spread[9]:.2f} s, {spread[18]:.2f} s, {max(self.back_s, default=0.0):.2f} s", str(len(self.violations)),
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"


class ToyRun:
    """Four processes and a directory. `bad_reads`: the share of what they read that is damaged."""

    def __init__(self, directory: Path, run: RunFormat, bad_reads: float = 0.0) -> None:
        self.bad_reads = bad_reads
        self.run, self.directory, self.bucket = run, directory, directory / "bucket"
        self.url = self.bucket.as_uri()
        self.store = open_store(self.url, create=True)
        self.store.create(FORMAT_KEY, run.keyring.sign(OPERATOR, FORMAT_KEY, encode(run)))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            words = [SYNCER, self.url] if name == SYNCER else ["learner", self.url, name]
            log, variables = self.directory / f"{name}.log", {BAD_READS: str(self.bad_reads)}
            self.processes[name] = spawned(log, "tests.studies.toy_process", *words, **variables)

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

    def is_up(self) -> bool:
        """Nobody need wait: the next merge tells."""
        return True

    def is_over(self) -> bool:
        return all(process.poll() == 0 for process in self.processes.values())

    def verified(self) -> Replay:
        return verified_integers(self.store, self.run)

    def end(self) -> None:
        self.kill(*self.processes)


class Study:
    """One role's kills, by one seed."""

    def __init__(self, role: Role, seed: int, rounds: int = ROUNDS, bad_reads: float = 0.0) -> None:
        self.role, self.rounds, self.bad_reads = role, rounds, bad_reads
        self.random, self.tally = random.Random(f"{role} {seed}"), Tally()

    def kill(self, kills: int) -> Tally:
        while self.tally.kills < kills and not self.tally.violations:
            with self._next_run() as toy:
                self._one_run(toy, kills)
                self.tally.runs += 1
                if self.tally.violations:
                    toy.end()
                    kept = shutil.copytree(toy.directory, tempfile.mkdtemp(prefix="kills-"), dirs_exist_ok=True)
                    self.tally.violations.append(f"its bucket and logs: {kept}")
        return self.tally

    @contextmanager
    def _next_run(self) -> Iterator[ToyRun | LaunchedRun]:
        """Ends what it started, and leaves nothing behind."""
        directory = Path(tempfile.mkdtemp(prefix="killed-run-"))
        toy = self._made(directory)
        try:
            yield toy
        finally:
            toy.end()
            shutil.rmtree(directory)

    def _made(self, directory: Path) -> ToyRun | LaunchedRun:
        if self.role == SUPERVISOR:
            return LaunchedRun(directory, run_file(self.rounds))
        run = integer_run(self.rounds, STEP_S, RETENTIONS[self.tally.runs % len(RETENTIONS)])
        return ToyRun(directory, run, self.bad_reads)

    def _one_run(self, toy: ToyRun | LaunchedRun, kills: int) -> None:
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

    def _strike(self, toy: ToyRun | LaunchedRun) -> dict[str, bytes]:
        """The log as it was seen before (or, where nobody lives on, as it was left) by the kill."""
        names = (self.random.choice(LEARNERS),) if self.role == "learner" else STRUCK[self.role]
        before = toy.log()
        toy.kill(*names)
        self.tally.kills += 1
        if self.role == "all":
            before |= {name: data for name, data in toy.log().items() if name not in before}
            self._is_sound(toy, before)
        toy.start(*names)
        return before

    def _expect_a_merge(self, toy: ToyRun | LaunchedRun, num_before: int) -> None:
        killed_s = time.monotonic()
        while not (toy.is_over() or (toy.is_up() and num_merges(toy.log()) > num_before)):
            if time.monotonic() - killed_s > MERGE_WITHIN_S:
                self.tally.violations.append(f"no merge within {MERGE_WITHIN_S:.0f} s after kill {self.tally.kills}")
                return
            time.sleep(0.02)
        self.tally.back_s.append(time.monotonic() - killed_s)

    def _is_sound(self, toy: ToyRun | LaunchedRun, before: dict[str, bytes], failed: list[str] | None = None) -> bool:
        now, found = toy.log(), toy.verified()
        wrong = [f"commit {name} changed or vanished" for name, data in before.items() if now.get(name) != data]
        wrong += problems_of(found) + (toy.failed() if failed is None else failed)
        self.tally.violations += [f"after kill {self.tally.kills}: {text}" for text in wrong]
        return not self.tally.violations

    def _count(self, toy: ToyRun | LaunchedRun) -> None:
        """What this run came to, once nobody writes any more."""
        failed = toy.failed()
        toy.end()
        self._is_sound(toy, {}, failed)
        if isinstance(toy, ToyRun):
            self._read_independently(toy)
        found = toy.verified()
        self.tally.commits += found.commits
        self.tally.merges += found.merges
        self.tally.applied += found.offers_applied
        self.tally.collected += found.floor > 0

    def _read_independently(self, toy: ToyRun) -> None:
        try:
            found = Replayer(toy.store, toy.run).read().n + 1
        except ViolationError as error:
            self.tally.violations.append(f"the independent reader: {error}")
        else:
            if found != len(toy.log()):
                self.tally.violations.append(f"the independent reader finds {found} of {len(toy.log())} commits")


def num_merges(log: dict[str, bytes]) -> int:
    return sum(decode(Commit, data, name).kind == "merge" for name, data in log.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--role", choices=get_args(Role), default="learner", help="all: everybody at once; supervisor: `diloco launch`"
    )
    parser.add_argument("--seed", type=int, default=1, help="of victims and instants; what runs meanwhile is real")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of each run; from about 30 on, garbage is collected"
    )
    parser.add_argument("--bad-reads", type=float, default=0.0, help="share of a toy's reads that is damaged")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *about: sys.exit(143))  # so that nothing that was started stays behind
    began_s, study = time.monotonic(), Study(arguments.role, arguments.seed, arguments.rounds, arguments.bad_reads)
    try:
        study.kill(arguments.kills)
    finally:  # also of a study that was cut short
        wall_s, collected = time.monotonic() - began_s, study.tally.collected
        print(f"{wall_s:.0f} s, {collected} runs with collected garbage", *study.tally.violations, sep="\n")
        print(HEADER, study.tally.row(f"{KILLED[arguments.role]}, seed {arguments.seed}"), sep="\n", flush=True)
    sys.exit(1 if study.tally.violations else 0)


if __name__ == "__main__":
    main()
