"""Real, cheap processes, ended by their own handles; a home directory for runs of a test's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco_cli.environment import environment_with
from diloco_cli.runtime.processes import TOKEN_VARIABLE, Identity, identify, is_alive
from diloco_cli.runtime.registry import UnitRecord, write_unit
from tests.waiting import wait_until

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
Child = subprocess.Popen[bytes]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What this machine keeps, for this test alone."""
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts sleeping processes with a token (or none) and ends them after the test."""
    children: list[Child] = []

    def begin(token: str | None = None, code: str = SLEEPER, *arguments: str) -> Child:
        environment = environment_with(**({TOKEN_VARIABLE: token} if token else {}))
        command = [sys.executable, "-S", "-c", code, *arguments]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait()


@pytest.fixture
def start_unit_of(home: Path, start: Callable[..., Child]) -> Callable[..., tuple[Child, Identity]]:
    """A unit as a supervisor would have started it: process, identity, and its record on disk."""

    def begin(run: str, name: str, token: str = "secret") -> tuple[Child, Identity]:
        child = start(token)
        identity = identify(child.pid, token)
        wait_until(lambda: is_alive(identity))  # its environment cannot be read while it is being started
        write_unit(run, UnitRecord(name, "learner", identity, 0.0))
        return child, identity

    return begin


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Waits until a condition holds; fails after a bound."""
    return wait_until
