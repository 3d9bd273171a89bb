"""A run as people start it: `diloco launch`, and after each death of that process `diloco resume`.

Real learners and a real syncer on a model of a few numbers, whose data takes its time. The process that is killed is
the supervisor; the units are none of its business any more, and the next one finds them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import yaml

from diloco_cli.config.codec import from_plain
from diloco_cli.observe.replay import Replay, verified
from diloco_cli.protocol.log.commit_log import read_format
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.runtime.processes import Identity, is_alive
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from tests.forked import ForkedProcess, forking_diloco

ROOT = Path(__file__).resolve().parents[2]
SUPERVISOR = "supervisor"
NAME = "supervised"
UNITS = ("l0", "l1", "syncer")
LOCAL_STEPS, BATCH_TOKENS, STEP_S = 8, 16, 0.1
Task = tuple[str, Mapping[str, object]]
LAUNCHED_WITHIN_S = 120.0
CLOCK = SystemClock(time.monotonic, time.sleep, lambda: None)


def inventory_of(names: Iterable[str]) -> str:
    islands = [f'  - {{name: {name}, region: here, accelerators: "cpu:1"}}\n' for name in names]
    return "version: 1\nstore: {url: bucket, region: here}\nislands:\n" + "".join(islands)


def toy_file(model: Task, data: Task, tokens: int, sync: Mapping[str, object], **more: object) -> str:
    """A run file with a model and data of toy_task."""
    whole = {
        "version": 1,
        "name": NAME,
        "inventory": "inventory.yaml",
        "model": {"entrypoint": f"tests.studies.toy_task:{model[0]}", "args": model[1]},
        "data": {"entrypoint": f"tests.studies.toy_task:{data[0]}", "args": data[1]},
        "train": {"tokens": tokens, "batch_tokens": BATCH_TOKENS, "inner": {"lr": 0.001}},
        "sync": {**sync, "codec": "fp32", "weights_codec": "fp32"},
        "evaluation": {"every": 1_000_000},
        **more,
    }
    text: str = yaml.safe_dump(whole, sort_keys=False)
    return text


def run_file(rounds: int) -> str:
    model, data = ("model", {"elements": 16}), ("slow_data", {"step_s": STEP_S})
    tokens = 2 * rounds * LOCAL_STEPS * BATCH_TOKENS
    return toy_file(model, data, tokens, {"every": LOCAL_STEPS, "fragments": 4, "quorum": 2})


INVENTORY = inventory_of(UNITS[:2])


class LaunchedRun:
    """One supervisor at a time, and what it started. The same to a study as a run of toy processes. `forking`: its
    processes are forks of one that has loaded torch, so that nothing is learned of the time that this takes."""

    forking = False

    def __init__(self, directory: Path, run_text: str, inventory: str = INVENTORY) -> None:
        self.directory, self.bucket, self.home = directory, directory / "bucket" / NAME, str(directory / "home")
        (directory / "run.yaml").write_text(run_text)
        (directory / "inventory.yaml").write_text(inventory)
        self.said, self.said_before = directory / f"{SUPERVISOR}.log", 0
        self.supervisor: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.orphans: dict[str, Identity] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of this run."""
        return {**os.environ, "DILOCO_HOME": self.home, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    @property
    def store(self) -> Store:
        return open_store(self.bucket.as_uri())

    @property
    def run(self) -> RunFormat:
        return perform(read_format(self.bucket.as_uri()), self.store, CLOCK)

    def start(self, *names: str) -> None:
        """The first supervisor launches the run; its successors go on with it."""
        words = ["resume", NAME] if (self.bucket / FORMAT_KEY).exists() else ["launch", "run.yaml"]
        self.said_before = self.said.stat().st_size if self.said.exists() else 0
        self.supervisor = self._started(words)
        self._wait_for_it()

    def _started(self, words: list[str]) -> subprocess.Popen[bytes] | ForkedProcess:
        if self.forking:
            return ForkedProcess(forking_diloco, *words, folder=self.directory, log=self.said, **self.environment)
        with self.said.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "diloco_cli", *words],
                cwd=self.directory, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def _wait_for_it(self) -> None:
        """Until the run is there to be killed. (A launch that dies before is launched again: that is no resume.)"""
        ends_s = time.monotonic() + LAUNCHED_WITHIN_S
        while not (self.bucket / FORMAT_KEY).exists() and time.monotonic() < ends_s:
            time.sleep(0.02)

    def kill(self, *names: str) -> None:
        """SIGKILL to the supervisor alone; each unit that lives now must outlive it, and be nobody's double."""
        assert self.supervisor is not None
        self.orphans = {name: identity for name, identity in self.units().items() if is_alive(identity)}
        self.supervisor.kill()
        self.supervisor.wait()

    def units(self) -> dict[str, Identity]:
        """By this machine's own files: the last process of each."""
        files = sorted((self.directory / "home" / "runs").glob(f"{NAME}-*/units/[a-z]*.json"))
        return {path.stem: from_plain(Identity, json.loads(path.read_text())["identity"]) for path in files}

    def failed(self) -> list[str]:
        """A supervisor that ended by itself, and not because the run is over; units that did not live through one's
        death, or were started a second time because of it."""
        end = None if self.supervisor is None else self.supervisor.poll()
        wrong = [f"{SUPERVISOR} ended with status {end}"] if end not in (None, 0, -9) else []
        now = self.units()
        wrong += [f"{name} was started twice" for name, identity in self.orphans.items() if now[name] != identity]
        dead = [name for name, identity in self.orphans.items() if not is_alive(identity)]
        return wrong + ([] if self.is_finished() else [f"{name} did not outlive its supervisor" for name in dead])

    def log(self) -> dict[str, bytes]:
        """The commits as they lie there."""
        return {path.name: path.read_bytes() for path in sorted((self.bucket / "commit").glob("*.json"))}

    def is_finished(self) -> bool:
        log = self.log()
        return bool(log) and json.loads(log[max(log)])["kind"] == "finish"

    def is_up(self) -> bool:
        """Whether the supervisor has every unit: found alive, or started."""
        said = self.said.read_bytes()[self.said_before :].decode()
        return all(f"{unit}: adopted" in said or f"{unit}: started" in said for unit in UNITS)

    def is_over(self) -> bool:
        return self.supervisor is not None and self.supervisor.poll() == 0

    def wait(self, reached: Callable[[], bool], within_s: float) -> None:
        ends_s = time.monotonic() + within_s
        while not reached():
            if self.failed() or time.monotonic() > ends_s:
                raise RuntimeError(f"{self.failed() or 'not over in time'}: {self.said.read_text()[-2000:]}")
            time.sleep(0.1)

    def verified(self) -> Replay:
        return verified(self.store, self.run)

    def damage_deltas(self, which: slice) -> None:
        """Zeros in the place of some of the deltas that the bucket holds, the oldest first."""
        written = [path for path in (self.bucket / "delta").rglob("*") if not path.name.startswith(".")]  # whole ones
        deltas = [path for path in written if path.is_file()]
        for path in sorted(deltas, key=lambda path: path.stat().st_mtime)[which]:
            path.write_bytes(bytes(path.stat().st_size))

    def end(self) -> None:
        """Whoever is left, also those that a supervisor had no time to write down: all know this run's own home."""
        if self.supervisor is not None:
            self.supervisor.kill()
            self.supervisor.wait()
        while left := [process for process in psutil.process_iter() if _home_of(process) == self.home]:
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=10.0)


Launched = TypeVar("Launched", bound=LaunchedRun)


@contextmanager
def lived(run: Launched) -> Iterator[Launched]:
    """It is started; afterwards nobody is left of it, and nothing of its directory."""
    try:
        run.start()
        yield run
    finally:
        run.end()
        shutil.rmtree(run.directory)


def _home_of(process: psutil.Process) -> str | None:
    try:
        return None if process.pid == os.getpid() else process.environ().get("DILOCO_HOME")
    except psutil.Error:
        return None
