"""A quickstart of one's own in a temporary directory, driven through the command line as a user would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forked import ForkedProcess, diloco, leading_diloco, run_diloco

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SETTINGS = (  # one evaluation, at the end: the first one loads torch once more
    "model.preset=gpt-pico", "train.batch_tokens=256", "sync.every=16", "train.inner.save_every=2",
    "evaluation.every=1000",
)  # fmt: skip
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]
SURVIVED_TOKENS = 180_000
SLOW = "accelerators: 'cpu:1', emulate: {slowdown: 4}"  # or training takes the cores from what is tested
ISLAND = "  - {{name: {}, region: here, {}}}\n"


class Playground:
    """Runs `diloco` in its own directory; ends whatever it started. `forking`: units that a command starts are forks of
    it, or each would take seconds to load torch."""

    forking = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        shutil.copytree(EXAMPLES / "quickstart", directory / "quickstart", ignore=shutil.ignore_patterns("bucket"))
        self.environment = {**os.environ, "DILOCO_HOME": str(directory / ".diloco"), "NO_COLOR": "1"}

    def start(self, *words: str) -> ForkedProcess:
        return ForkedProcess(leading_diloco, *words, folder=self.directory, **self.environment)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_diloco(*words, folder=self.directory, forking=self.forking, **self.environment)

    def json(self, *words: str) -> dict[str, Any]:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        data: dict[str, Any] = json.loads(done.stdout)["data"]
        return data

    def islands(self, *names: str, url: str = "bucket") -> None:
        """The run's islands: nothing else than these. Each is a process that loads torch."""
        text = f"version: 1\nstore: {{url: '{url}'}}\nislands:\n" + "".join(ISLAND.format(n, SLOW) for n in names)
        (self.directory / "quickstart" / "inventory.yaml").write_text(text)

    def launch(self, tokens: int, *more: str) -> None:
        words = ["--set", f"train.tokens={tokens}", *SMALL, *more]
        done = self.run("launch", "quickstart/run.yaml", "--detach", *words)
        assert done.returncode == 0, done.stderr

    def wait_for(self, reached: Callable[[dict[str, Any]], bool], timeout_s: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        answer: dict[str, Any] = {}
        while (left_s := deadline - time.monotonic()) > 0:
            with closing(self._watched(left_s)) as answers:
                for answer in answers:
                    if answer["ok"] and reached(answer["data"]):
                        data: dict[str, Any] = answer["data"]
                        return data
            time.sleep(0.3)
        raise AssertionError(f"not reached in {timeout_s} s: {answer}")

    def _watched(self, max_s: float) -> Generator[dict[str, Any], None, None]:
        """What one `status --watch` tells, which costs far less than asking anew each time. It ends with the run, and
        with status 6 where the store answers nobody, as tests arrange it."""
        words = ("status", "quickstart", "--watch", "0.3", "--json")
        watch = ForkedProcess(diloco, *words, folder=self.directory, **self.environment)
        ends_s, told, over = time.monotonic() + max_s, 0, False
        try:
            while not over and time.monotonic() < ends_s:
                over = watch.poll() is not None
                *lines, _ = watch.said()[0].split("\n")
                yield from map(json.loads, lines[told:])
                told = len(lines)
                time.sleep(0.05)
            assert watch.poll() in (None, 0, 6), watch.said()
        finally:
            watch.kill()
            watch.wait()

    @property
    def home(self) -> Path:
        """What this machine keeps of the run."""
        found = sorted(Path(self.environment["DILOCO_HOME"], "runs").glob("quickstart-*"))
        return found[0] if found else Path()

    def pids(self) -> dict[str, int]:
        home = self.home
        found = {p.stem: json.loads(p.read_text())["identity"]["pid"] for p in (home / "units").glob("[a-z]*.json")}
        supervisor = home / "supervisor.json"
        if supervisor.exists():
            found["supervisor"] = json.loads(supervisor.read_text())["identity"]["pid"]
        return found

    def log(self, unit: str) -> str:
        """What it has said on its standard output."""
        return (self.home / "logs" / f"{unit}.log").read_text()

    def kill(self, *units: str) -> None:
        """They are dead when this returns."""
        for unit in units:
            process = psutil.Process(self.pids()[unit])
            process.kill()
            with suppress(psutil.NoSuchProcess):
                while process.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.01)


@contextmanager
def playing(directory: Path) -> Iterator[Playground]:
    place = Playground(directory)
    yield place
    for unit in ("supervisor", *sorted(place.pids())):
        with suppress(KeyError, psutil.NoSuchProcess):
            place.kill(unit)


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    with playing(tmp_path) as place:
        yield place


@pytest.fixture(scope="session")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    """A run of two islands that is over. Its supervisor was killed on the way, a learner and the syncer before."""
    with playing(tmp_path_factory.mktemp("survived")) as place:
        place.islands("belgium", "iowa")
        place.launch(tokens=SURVIVED_TOKENS)
        place.wait_for(lambda s: s["commit"] >= 6)
        place.kill("iowa")
        place.wait_for(lambda s: next(item for item in s["learners"] if item["name"] == "iowa")["incarnation"] == 2)
        place.kill("syncer")
        place.wait_for(lambda s: s["syncer"]["epoch"] == 2)
        place.kill("supervisor")
        belgium = place.pids()["belgium"]
        resumed = place.run("resume", "quickstart", "--json")
        assert resumed.returncode == 0, resumed.stderr
        assert f"belgium: adopted: process {belgium}" in resumed.stderr
        place.wait_for(lambda s: s["state"] == "FINISHED")
        yield place
