"""Two machines, which are two homes here, share one bucket: one of them leaves, and the run goes on on the other."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
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
        stopped = playground.run("stop", "quickstart")
        assert stopped.returncode == 0 and "STOPPED" in stopped.stdout, stopped.stderr
        another_machine_has_all_of_it(second)


def another_machine_has_all_of_it(second: Playground) -> None:
    """It has the bucket and nothing else. Ctrl-C ends what runs there, and the run waits; `stop` needs no syncer."""
    at = second.json("status", URL)["commit"]
    supervisor = second.start("resume", URL, "--region", "all")
    wait_until(lambda: supervisor.poll() is not None or second.json("status", URL)["commit"] >= at + 6, 90)
    assert supervisor.poll() is None
    os.kill(supervisor.pid, signal.SIGINT)
    out, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 130 and "Traceback" not in err + out, err
    assert "Ctrl-C stops a run only in the `launch` that has all of it" in err
    assert "no syncer is left here" in err
    assert second.json("status", URL)["state"] != "STOPPED"
    assert second.run("stop", URL, "--timeout", "1").returncode == 0
    assert second.json("status", URL)["state"] == "STOPPED"
    assert second.json("verify", URL)["ok"]
