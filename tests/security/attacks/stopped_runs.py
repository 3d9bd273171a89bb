"""What must not go on by itself, or act later: a stopped run, and a request that a stop left open."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.security.attacks.stage import NAME, AttackedRun, AttackSeen, ask_to_join, running, settings

STANDBY_WAITS_S = 40.0  # longer than any standby waits before it takes over


def standby_after_a_stop(directory: Path) -> AttackSeen:
    """The run is stopped; then a learner with a hosted standby comes up, as after a reboot of its machine."""
    with running(AttackedRun(directory, text=settings(syncer={"on_learners": True}))) as stage:
        stopped = stage.diloco("stop", NAME)
        stage.until(lambda: stage.kinds()[-1] == "stop", 30.0)
        head = stage.head
        child = stage.process("learner", "--run", stage.url, "--name", "l0")
        stage.until(lambda: stage.head > head, STANDBY_WAITS_S)
        kinds = stage.kinds()[head + 1 :]
        seen = (
            f"stop ended with {stopped.returncode}; {STANDBY_WAITS_S:.0f} s later the log has {kinds or 'nothing more'}"
        )
        return AttackSeen(
            not kinds, f"{seen}; the learner {'waits' if child.poll() is None else f'ended with {child.poll()}'}"
        )


def join_left_open_by_a_stop(directory: Path) -> AttackSeen:
    """No syncer lives; an island asks to join and leaves; the run is stopped, and resumed later."""
    with running(AttackedRun(directory, text=settings({"shards": 4}))) as stage:
        assert stage.supervisor is not None
        stage.kill()
        for unit in ("syncer", "l0", "l1"):
            stage.signal(unit, signal.SIGKILL)
        ask_to_join(stage, "x")
        stopped = stage.diloco("stop", NAME, "--timeout", "5")
        stage.start()
        began_s = time.monotonic()
        goes_on = stage.merges_on(4, within_s=90.0)
        stage.until(lambda: "membership" in stage.kinds(), 5.0)
        admitted = "membership" in stage.kinds()
        seen = f"stop ended with {stopped.returncode}; {time.monotonic() - began_s:.0f} s after the resume the island "
        return AttackSeen(goes_on and not admitted, seen + ("has a shard for ever" if admitted else "is no member"))
