"""Signals and stand-ins (findings: a closed laptop stopped all regions; a rollback left a run without a syncer)."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.security.attacks.stage import NAME, AttackedRun, AttackSeen, running

TWO_REGIONS = """version: 1
store: {url: bucket, region: here}
islands:
  - {name: l0, region: here, accelerators: "cpu:1"}
  - {name: l1, region: there, accelerators: "cpu:1"}
"""


def signalled_second_supervisor(directory: Path, number: signal.Signals = signal.SIGTERM) -> AttackSeen:
    """The supervisor of another machine, with one region's island, gets a signal."""
    stage = AttackedRun(directory, inventory=TWO_REGIONS)
    start = stage.process("launch", "run.yaml", "--region", "here")
    try:
        stage.until(lambda: stage.head >= 0)
        second = stage.process("launch", "run.yaml", "--region", "there", environment=stage.elsewhere("b"))
        assert stage.until(lambda: stage.merges_of("l1") > 1 and stage.merges_of("l0") > 1), stage.said_by(second)
        second.send_signal(number)
        left = stage.until(lambda: second.poll() is not None, 30.0)
        asked = list((stage.bucket / "request").rglob("*.json"))
        goes_on = "stop" not in stage.kinds() and stage.merges_on(4, name="l0") and start.poll() is None
        said = f"{number.name}: it left with {second.poll()}, {len(asked)} requests; the first machine "
        return AttackSeen(left and goes_on, said + ("goes on" if goes_on else "does not go on"))
    finally:
        stage.end()


def closed_terminal(directory: Path) -> AttackSeen:
    return signalled_second_supervisor(directory, signal.SIGHUP)


def stand_in_retires_a_paused_syncer(directory: Path) -> AttackSeen:
    """The syncer is frozen; a rollback does not wait for it and commits in its place; then it wakes up."""
    with running(AttackedRun(directory)) as stage:
        stage.signal("syncer", signal.SIGSTOP)
        try:
            done = stage.diloco("rollback", NAME, "--to", str(stage.head - 1), "--yes", "--timeout", "10")
        finally:
            stage.signal("syncer", signal.SIGCONT)
        started_s = time.monotonic()
        goes_on = stage.merges_on(4, within_s=90.0)
        took = f"merges again after {time.monotonic() - started_s:.0f} s" if goes_on else "never merges again"
        told = "" if done.returncode == 0 else f" ({done.stderr.strip()[-200:]})"
        return AttackSeen(
            done.returncode == 0 and goes_on, f"rollback ended with {done.returncode}{told}; the run {took}"
        )
