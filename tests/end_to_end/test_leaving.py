"""Two machines, which are two homes here, share one bucket: one of them leaves, and the run goes on on the other."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.end_to_end.conftest import Playground
from tests.end_to_end.test_survival import learner
from tests.waiting import wait_until

URL = "quickstart/bucket/quickstart"
TAKES_TERMINAL = """
import fcntl, runpy, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("diloco_cli", run_name="__main__")
"""
SLOW = "{{name: {0}, region: {1}, accelerators: 'cpu:1', emulate: {{slowdown: 4}}}}"


@contextmanager
def two_machines(place: Playground) -> Iterator[Playground]:
    """The first has island ann and the syncer; yields the second, which may start island bob of the same run."""
    islands = "".join(f"  - {SLOW.format(name, region)}\n" for name, region in (("ann", "east"), ("bob", "west")))
    inventory = place.directory / "quickstart" / "inventory.yaml"
    inventory.write_text(f"version: 1\nstore: {{url: bucket}}\nislands:\n{islands}")
    place.launch(100_000_000, "--region", "east")
    place.wait_for(lambda s: s["commit"] >= 2)
    second = Playground.__new__(Playground)
    second.directory = place.directory
    second.environment = {**place.environment, "DILOCO_HOME": str(place.directory / ".second")}
    yield second
    for pid in second.pids().values():
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def goes_on(place: Playground) -> None:
    """The run merges what the first machine's island offers, and nobody has stopped it."""
    at = place.json("status", "quickstart")["commit"]
    status = place.wait_for(lambda s: s["commit"] >= at + 4)
    assert status["state"] != "STOPPED" and learner(status, "ann")["incarnation"] == 1
    assert "supervisor" in place.pids() and psutil.pid_exists(place.pids()["supervisor"])


def bob_trains(place: Playground, incarnation: int) -> None:
    def trains(status: dict[str, object]) -> bool:
        bob = learner(status, "bob")
        return bob["incarnation"] == incarnation and bob["state"] == "TRAINING" and bob["behind"] == 0

    place.wait_for(trains)


def on_a_terminal(second: Playground, *words: str) -> tuple[subprocess.Popen[bytes], Callable[[], None]]:
    """`diloco` with a terminal of its own, and what closes that."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", TAKES_TERMINAL, *words], cwd=second.directory, env=second.environment,
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    return child, lambda: os.close(master)


def test_a_machine_that_gets_a_signal_or_loses_its_terminal_ends_its_own_units_and_the_run_goes_on(
    playground: Playground,
) -> None:
    with two_machines(playground) as second:
        supervisor = second.start("resume", URL, "--region", "west")
        bob_trains(playground, 1)
        bob = second.pids()["bob"]
        os.kill(supervisor.pid, signal.SIGTERM)
        out, err = supervisor.communicate(timeout=15)
        assert supervisor.returncode == 128 + signal.SIGTERM, err
        assert "bob offers its last deltas" in err and "killed" not in err
        assert "left the run without stopping it; ended here: bob. Come back: diloco resume file://" in err
        assert "--region west" in err and "no syncer is left" not in err
        assert "Traceback" not in err + out and not psutil.pid_exists(bob)
        goes_on(playground)
        child, close = on_a_terminal(second, "resume", URL, "--region", "west")
        bob_trains(playground, 2)
        bob = second.pids()["bob"]
        close()
        assert child.wait(15) == 128 + signal.SIGHUP
        wait_until(lambda: not psutil.pid_exists(bob))
        goes_on(playground)
        assert playground.run("stop", "quickstart").returncode == 0
        assert playground.json("verify", "quickstart")["ok"]


def test_a_syncer_that_a_command_took_for_dead_serves_again_when_it_wakes(playground: Playground) -> None:
    """A rollback by the command itself, while the syncer is paused: before, the run had no syncer for good."""
    playground.islands("ann")
    playground.launch(100_000_000)
    playground.wait_for(lambda s: s["commit"] >= 6)
    paused = playground.pids()["syncer"]
    os.kill(paused, signal.SIGSTOP)
    rolled = playground.run("rollback", "quickstart", "--to", "2", "--yes", "--timeout", "1")
    assert rolled.returncode == 0 and "no syncer answers: doing it from here" in rolled.stderr, rolled.stderr
    at = playground.json("status", "quickstart")["commit"]
    os.kill(paused, signal.SIGCONT)
    status = playground.wait_for(lambda s: s["commit"] >= at + 4)
    assert status["syncer"]["epoch"] == 3 and playground.pids()["syncer"] == paused
    assert "a command claimed epoch 2 while this syncer was silent" in playground.log("syncer")
    assert playground.run("stop", "quickstart").returncode == 0
    assert playground.json("verify", "quickstart")["ok"]


def test_stop_ends_what_runs_here_at_once_where_the_bucket_is_gone(playground: Playground) -> None:
    playground.islands("ann")
    playground.launch(100_000_000)
    playground.wait_for(lambda s: s["commit"] >= 3)
    bucket = playground.directory / "quickstart" / "bucket" / "quickstart"
    bucket.rename(bucket.with_name("away"))
    began_s = time.monotonic()
    stopped = playground.run("stop", "quickstart")
    assert time.monotonic() - began_s < 15
    assert stopped.returncode == 0 and "the bucket of run quickstart is gone" in stopped.stderr
    assert "ended here: supervisor, ann, syncer" in stopped.stdout
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in playground.pids().values()))
    assert playground.run("stop", "quickstart").returncode == 6, "nothing is left here to end"
    bucket.with_name("away").rename(bucket)
    assert playground.json("status", "quickstart")["state"] != "STOPPED"
