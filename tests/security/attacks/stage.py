"""Where attacks take place: a run of real processes on file://, started by `diloco launch`, on machines that are
emulated by homes of their own. What an attacker does beside that is done to the bucket's files or by signals.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from diloco_cli.protocol.log.keys import join_key
from diloco_cli.protocol.log.records import Island, Join, encode
from diloco_cli.signing import KEY_FILE_VARIABLE, learner_signer
from tests.forked import run_diloco
from tests.studies.launched import NAME, LaunchedRun, inventory_of, run_file

LEARNERS = ("l0", "l1")
ROUNDS = 400  # far more than an attack takes
STARTED_WITHIN_S = 90.0


def settings(data: dict[str, Any] | None = None, **more: object) -> str:
    """The run file: one learner alone keeps the run going."""
    whole = yaml.safe_load(run_file(ROUNDS)) | more
    whole["sync"]["quorum"] = 1
    whole["data"] |= data or {}
    whole["model"] = {"entrypoint": "tests.security.attacks.tiny_text:drifting", "args": {"elements": 16}}
    text: str = yaml.safe_dump(whole, sort_keys=False)
    return text


@dataclass(frozen=True)
class AttackSeen:
    """`seen`: what happened, with figures. `holds`: whether the defence did what is promised."""

    holds: bool
    seen: str


class AttackedRun(LaunchedRun):
    """`signed`: the run's operator has a key, and its learners theirs. `more`: settings of the run file."""

    def __init__(
        self, directory: Path, signed: bool = False, inventory: str | None = None, text: str | None = None
    ) -> None:
        super().__init__(directory, text or settings(), inventory or inventory_of(LEARNERS))
        self.key = directory / "run.key" if signed else None
        if self.key is not None:
            self.diloco("key", "new", str(self.key), keyless=True)
        self.started: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        key = {} if self.key is None else {KEY_FILE_VARIABLE: str(self.key)}
        return {**super().environment, **key}

    @property
    def url(self) -> str:
        return self.bucket.as_uri()

    def elsewhere(self, machine: str, **more: str) -> dict[str, str]:
        """The environment of another machine: nothing of this one's home, and no key."""
        plain = {name: value for name, value in self.environment.items() if name != KEY_FILE_VARIABLE}
        return {**plain, "DILOCO_HOME": f"{self.home}-{machine}", **more}

    def diloco(self, *words: str, keyless: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**(LaunchedRun.environment.fget(self) if keyless else self.environment), **more}  # type: ignore[attr-defined]
        return run_diloco(*words, folder=self.directory, **environment)

    def process(self, *words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.directory / f"process-{len(self.started)}.log").open("ab") as out:
            command = [sys.executable, "-m", "diloco_cli", *words]
            child = subprocess.Popen(
                command, cwd=self.directory, env=environment or self.environment, stdout=out, stderr=out,
                stdin=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        self.started.append(child)
        return child

    def said_by(self, child: subprocess.Popen[bytes]) -> str:
        return (self.directory / f"process-{self.started.index(child)}.log").read_text()

    def end(self) -> None:
        for child in self.started:
            child.kill()
            child.wait()
        home = self.home
        for path in (home, *map(str, self.directory.glob("home-*"))):
            self.home = path
            super().end()
        self.home = home

    # -- the log ------------------------------------------------------------------------------------------------

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self.log().values()]

    def kinds(self) -> list[str]:
        return [record["kind"] for record in self.records()]

    @property
    def head(self) -> int:
        return len(list((self.bucket / "commit").glob("*.json"))) - 1

    def merges_of(self, name: str) -> int:
        return sum(item["learner"] == name for record in self.records() for item in record.get("inputs", ()))

    def merges(self) -> int:
        return self.kinds().count("merge")

    def until(self, holds: Callable[[], object], within_s: float = STARTED_WITHIN_S) -> bool:
        return until(holds, within_s)

    def merges_on(self, more: int = 4, within_s: float = 30.0, name: str | None = None) -> bool:
        """Whether so many merges come from now on (with this learner's deltas in them)."""
        count = self.merges if name is None else lambda: self.merges_of(name)
        before = count()
        return until(lambda: count() >= before + more, within_s)

    def pid(self, unit: str) -> int:
        return self.units()[unit].pid

    def signal(self, unit: str, number: signal.Signals) -> None:
        os.kill(self.pid(unit), number)


def ask_to_join(stage: AttackedRun, *names: str) -> None:
    """Islands that ask the syncer that serves now, or served last, and do not wait for the answer."""
    epoch, run = stage.records()[-1]["epoch"], stage.run
    for name in names:
        join = Join(Island(name, "here", 16, 8, 1.0, 1.0), epoch, 0, "nonce", "then")
        key = join_key(name, epoch, 0)
        stage.store.create(key, run.keyring.sign(learner_signer(name), key, encode(join)))


def until(holds: Callable[[], object], within_s: float) -> bool:
    ends_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def running(stage: AttackedRun) -> Iterator[AttackedRun]:
    """Launched, and merging with every learner's deltas."""
    try:
        stage.start()
        names = [path.name for path in (stage.bucket / "incarnation").glob("*")] or list(LEARNERS)
        assert stage.until(lambda: all(stage.merges_of(name) > 1 for name in names)), stage.said.read_text()[-3000:]
        yield stage
    finally:
        stage.end()
        shutil.rmtree(stage.directory, ignore_errors=True)


__all__ = ["NAME", "AttackSeen", "AttackedRun", "running", "until"]
