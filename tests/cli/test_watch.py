"""`diloco status --watch`: before a run exists, on a terminal, and when the run ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_cli.cli import status as command
from diloco_cli.cli import status as watching
from diloco_cli.cli.arguments import OpenRun, open_run
from diloco_cli.observe.status import Status
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.wrappers import Deadline
from tests.cli.bucket import make_bucket

WATCH = [sys.executable, "-m", "diloco_cli", "status", "--watch", "0.2"]


def test_watching_a_run_before_its_launch_says_so_and_waits(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/nano"
    child = subprocess.Popen([*WATCH, url, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    assert "waiting for it (Ctrl-C ends)" in child.stderr.readline()
    make_bucket(tmp_path / "nano")
    assert json.loads(child.stdout.readline())["data"]["state"] == "STARTING"
    child.send_signal(signal.SIGINT)
    _, talk = child.communicate(timeout=30)
    assert (child.returncode, talk) == (130, ""), "it says so once"


def test_waiting_for_a_run_by_its_name_ends_with_ctrl_c(tmp_path: Path) -> None:
    environment = os.environ | {"DILOCO_HOME": str(tmp_path)}
    child = subprocess.Popen([*WATCH, "tomorrow"], stderr=subprocess.PIPE, text=True, env=environment)
    assert child.stderr is not None and "'tomorrow' is not known" in child.stderr.readline()
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130


def read_until(terminal: int, words: str) -> str:
    seen = ""
    while words not in seen:
        seen += os.read(terminal, 65_536).decode(errors="replace")
    return seen


def test_ctrl_c_leaves_the_live_screen_as_it_was_found(tmp_path: Path) -> None:
    url, (ours, theirs) = make_bucket(tmp_path / "nano"), pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    child = subprocess.Popen(
        [*WATCH, url], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    begun = read_until(ours, "STARTING")
    assert "\x1b[?1049h" in begun, "on the alternate screen"
    child.send_signal(signal.SIGINT)
    ended = read_until(ours, "\x1b[?1049l")
    assert child.wait(30) == 130 and "Traceback" not in ended


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The states of the next looks; then the run stays as it is."""
    states = ["MERGING", "FINISHED"]
    read = watching.read_status

    def read_next(opened: OpenRun, known: RunState | None = None) -> tuple[Status, RunState]:
        current, state = read(opened, known)
        return replace(current, state=states.pop(0)), state

    monkeypatch.setattr(watching, "read_status", read_next)
    yield states
    assert not states


@pytest.mark.parametrize("as_json", [True, False])
def test_watching_ends_with_the_run(
    ends: list[str], as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bucket(tmp_path / "nano")
    command.status(f"{tmp_path}/nano", watch=0.0, as_json=as_json, exit_code=False, serve=None, textfile=None)
    lines = capsys.readouterr().out.splitlines()
    if as_json:
        assert [json.loads(line)["data"]["state"] for line in lines] == ["MERGING", "FINISHED"]
    else:
        assert lines[0].startswith("nano MERGING") and lines[1].startswith("nano FINISHED")
        assert lines[2].startswith("run nano "), "the summary"


def test_a_live_screen_ends_with_the_run(ends: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    opened = open_run(make_bucket(tmp_path / "nano"))
    assert watching.watch(opened, Deadline(20), 0.0, False).state == "FINISHED"
