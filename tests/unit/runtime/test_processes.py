"""Identities of processes, and signals to them alone."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from diloco_cli.errors import RefusedError
from diloco_cli.runtime.processes import (
    Identity,
    ProcessFacts,
    ancestors,
    identify,
    is_alive,
    is_paused,
    mismatch,
    read_process,
    refusal_to_signal,
    signal_family,
    signal_process,
    signal_unit,
)

FACTS = ProcessFacts(pid=500, parent=1, group=500, session=500, state="S", start_time="boot:7", token="secret")
IDENTITY = Identity(500, "boot:7", "secret")


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        (None, "no process has pid 500"),
        (replace(FACTS, start_time="boot:8"), "another process"),
        (replace(FACTS, start_time="other-boot:7"), "another process"),
        (replace(FACTS, token=None), "secret token"),
        (replace(FACTS, token="other"), "secret token"),
        (replace(FACTS, state="Z"), "dead"),
        (replace(FACTS, state="X"), "dead"),
    ],
)
def test_anything_but_the_identified_process_is_a_mismatch(facts, part):
    assert part in mismatch(IDENTITY, facts)


@pytest.mark.parametrize("state", ["R", "S", "D", "T"])
def test_a_running_sleeping_or_paused_process_is_alive(state):
    assert mismatch(IDENTITY, replace(FACTS, state=state)) is None


def test_signals_reach_the_process_and_its_death_is_seen(start, eventually):
    child = start("secret")
    identity = identify(child.pid, "secret")
    eventually(lambda: is_alive(identity))  # its environment cannot be read while it is being started
    signal_process(identity, signal.SIGSTOP)
    eventually(lambda: is_paused(identity))
    assert is_alive(identity)
    signal_process(identity, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not is_alive(identity)


def test_a_zombie_is_dead_and_refused(start, eventually):
    child = start("secret", "pass")
    identity = identify(child.pid, "secret")
    eventually(lambda: read_process(child.pid).state == "Z")
    assert not is_alive(identity)
    with pytest.raises(RefusedError, match="dead"):
        signal_process(identity, signal.SIGKILL)


@pytest.mark.parametrize("change", [{"token": "other"}, {"start_time": "boot:0"}])
def test_a_stranger_with_the_same_pid_is_never_touched(start, change):
    child = start("secret")
    wrong = replace(identify(child.pid, "secret"), **change)
    with pytest.raises(RefusedError):
        signal_process(wrong, signal.SIGKILL)
    assert child.poll() is None


def test_children_that_outlive_their_unit_are_found_by_its_secret(start, tmp_path, eventually):
    note = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "open(sys.argv[1] + '.tmp', 'w').write(str(child.pid))\n"
        "import os; os.rename(sys.argv[1] + '.tmp', sys.argv[1]); time.sleep(60)"
    )
    unit = start("secret", code, str(note))
    eventually(note.exists)
    orphan = identify(int(note.read_text()), "secret")
    identity = identify(unit.pid, "secret")
    signal_process(identity, signal.SIGKILL)
    unit.wait()
    assert is_alive(orphan)
    assert signal_family(identity, signal.SIGKILL) == 1
    eventually(lambda: not is_alive(orphan))


def test_a_signal_to_a_unit_reaches_its_ranks_and_no_hosted_syncer(start, tmp_path, eventually):
    source = (
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(60)']\n"
        "rank, hosted = subprocess.Popen(sleep), subprocess.Popen(sleep, process_group=0)\n"
        "open(sys.argv[1] + '.tmp', 'w').write(f'{rank.pid} {hosted.pid}')\n"
        "import os; os.rename(sys.argv[1] + '.tmp', sys.argv[1]); time.sleep(60)"
    )
    unit = start("secret", source, str(tmp_path / "pids"))
    eventually((tmp_path / "pids").exists)
    rank, hosted = map(int, (tmp_path / "pids").read_text().split())
    identity = identify(unit.pid, "secret")
    signal_unit(identity, signal.SIGSTOP)
    eventually(lambda: [read_process(pid).state for pid in (unit.pid, rank)] == ["T", "T"])
    assert read_process(hosted).state != "T"
    signal_unit(identity, signal.SIGCONT)
    eventually(lambda: "T" not in [read_process(pid).state for pid in (unit.pid, rank)])
    signal_family(identity, signal.SIGKILL)


@pytest.mark.parametrize("pid", [-7, 0, 1, os.getpid(), os.getppid()], ids=["-7", "0", "1", "self", "parent"])
def test_the_system_oneself_and_ancestors_are_refused(pid):
    with pytest.raises(RefusedError, match="refused to signal"):
        signal_process(Identity(pid, "boot:1"), signal.SIGCONT)


def test_every_ancestor_is_known():
    line = ancestors(os.getpid())
    assert line[0] == os.getppid()
    assert refusal_to_signal(line[-1], os.getpid(), line) is not None


def test_the_secret_is_kept_out_of_messages():
    assert "secret" not in f"{IDENTITY} {IDENTITY!r} {[IDENTITY]}"
