"""A learner keeps a standby beside it: restarted when it dies, gone when the learner is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from diloco_cli.learner import daemon as hosting
from diloco_cli.learner.daemon import HostedSyncer, standby_command

Eventually = Callable[[Callable[[], bool]], None]
# What a hosted syncer does: note that it began, and for whom; leave when its host closes stdin.
NOTE = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} {sys.argv[2]}\\n'); "
CHILD, STUBBORN, DONE = NOTE + "sys.stdin.read(); sys.exit(143)", NOTE + "time.sleep(60)", NOTE + "sys.exit(0)"
HOST = """
import sys, time
from diloco_cli.learner.daemon import HostedSyncer
child, noted = sys.argv[1:]
HostedSyncer(lambda dead_pid: [sys.executable, "-S", "-c", child, noted, str(dead_pid)], print)
time.sleep(60)
"""


class Notes:
    """What the children wrote: a line each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[tuple[int, str]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [(int(pid), dead) for pid, dead in (line.split() for line in lines)]


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Notes]:
    yield Notes(tmp_path / "notes")


def host(notes: Notes, code: str = CHILD) -> HostedSyncer:
    return HostedSyncer(lambda dead: [sys.executable, "-S", "-c", code, str(notes.path), str(dead)], lambda line: None)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_child_stands_by_under_the_learners_name_and_can_tell_who_it_replaces() -> None:
    first = standby_command("file:///b", "standby-iowa", None)
    assert first[first.index("syncer") :] == [
        "syncer",
        "--run=file:///b",
        "--standby",
        "--name=standby-iowa",
        "--hosted",
    ]
    assert standby_command("file:///b", "standby-iowa", 47) == [*first, "--instead-of=47"]


def test_a_child_that_dies_is_replaced_and_the_next_one_is_told(notes: Notes, eventually: Eventually) -> None:
    hosted = host(notes)
    eventually(lambda: len(notes.read()) == 1)
    first = notes.read()[0][0]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: len(notes.read()) == 2)
    second, dead = notes.read()[1]
    assert dead == str(first) and os.getpgid(second) == second, "Ctrl-C is for the learner alone"
    hosted.close(0.0)
    assert not alive(second)


def test_a_child_that_cannot_be_started_now_is_started_later(notes: Notes, eventually: Eventually) -> None:
    """No memory, too many processes: for a run that lives for weeks that passes."""
    said: list[str] = []
    commands = iter([["/nothing/here"], [sys.executable, "-S", "-c", CHILD, str(notes.path), "None"]])
    hosted = HostedSyncer(lambda dead: next(commands), said.append)
    eventually(lambda: len(notes.read()) == 1)
    assert "cannot be started: No such file" in said[0]
    hosted.close(0.0)


def test_a_child_whose_run_is_over_is_not_replaced(notes: Notes, eventually: Eventually) -> None:
    hosted = host(notes, DONE)
    hosted.close(10.0)
    assert len(notes.read()) == 1


def test_closing_ends_even_a_child_that_does_not_listen(
    notes: Notes, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "KILLED_AFTER_S", 0.1)
    hosted = host(notes, STUBBORN)
    eventually(lambda: len(notes.read()) == 1)
    hosted.close(0.0)
    assert not alive(notes.read()[0][0]) and len(notes.read()) == 1


def test_the_child_leaves_when_its_host_is_killed(notes: Notes, eventually: Eventually) -> None:
    learner = subprocess.Popen([sys.executable, "-c", HOST, CHILD, str(notes.path)])
    try:
        eventually(lambda: len(notes.read()) == 1)
    finally:
        learner.kill()
        learner.wait()
    eventually(lambda: not alive(notes.read()[0][0]))
