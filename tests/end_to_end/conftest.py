"""A quickstart of one's own in a temporary directory, driven through the command line as a user would."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SETTINGS = ("model.preset=gpt-pico", "train.batch_tokens=256", "sync.every=16", "train.inner.save_every=2")
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]


class Playground:
    """Runs `diloco` in its own directory; ends whatever it started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        shutil.copytree(EXAMPLES / "quickstart", directory / "quickstart", ignore=shutil.ignore_patterns("bucket"))
        self.environment = {**os.environ, "DILOCO_HOME": str(directory / ".diloco"), "NO_COLOR": "1"}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "diloco_cli", *words],
            cwd=self.directory, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "diloco_cli", *words],
            cwd=self.directory, env=self.environment, text=True, capture_output=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def json(self, *words: str) -> dict[str, Any]:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        data: dict[str, Any] = json.loads(done.stdout)["data"]
        return data

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
        watch = self.start("status", "quickstart", "--watch", "0.3", "--json")
        end = threading.Timer(max_s, watch.kill)
        try:
            end.start()
            for line in watch.stdout or ():
                yield json.loads(line)
            assert watch.wait() in (0, 6, -signal.SIGKILL), watch.communicate()
        finally:
            end.cancel()
            watch.kill()
            watch.communicate()

    def pids(self) -> dict[str, int]:
        home = Path(self.environment["DILOCO_HOME"]) / "quickstart"
        found = {p.stem: json.loads(p.read_text())["identity"]["pid"] for p in (home / "units").glob("[a-z]*.json")}
        supervisor = home / "supervisor.json"
        if supervisor.exists():
            found["supervisor"] = json.loads(supervisor.read_text())["identity"]["pid"]
        return found

    def kill(self, *units: str) -> None:
        for unit in units:
            os.kill(self.pids()[unit], signal.SIGKILL)


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    place = Playground(tmp_path)
    yield place
    for unit in ("supervisor", *sorted(place.pids())):
        try:
            os.kill(place.pids()[unit], signal.SIGKILL)
        except (KeyError, ProcessLookupError):
            continue
