"""A standby syncer as a child of a learner's process, so that a run needs no separate machine for the syncer.

It is a separate process at low priority and with one core at most, so that it does not disturb the training. It ends
with the learner's process, however that ends, because that holds the other end of its stdin.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from diloco_cli.clock import monotonic_s
from diloco_cli.environment import DEVICE_VARIABLE, environment_with
from diloco_cli.runtime.units import diloco_command

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 60.0
SHORT_LIFE_S = 60.0
ONE_CORE_NO_DEVICE = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", DEVICE_VARIABLE: "cpu",
}  # fmt: skip
KILLED_AFTER_S = 1.0


def standby_command(url: str, name: str, dead_pid: int | None) -> list[str]:
    words = [*diloco_command("syncer", f"--run={url}", "--standby", f"--name={name}", "--hosted")]
    return words if dead_pid is None else [*words, f"--instead-of={dead_pid}"]


class HostedSyncer:
    """Keeps one standby alive as long as this process lives, or until the run is over. `say`: a line for the log."""

    def __init__(self, command: Callable[[int | None], list[str]], say: Callable[[str], None]) -> None:
        self._command, self._say = command, say
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="hosted-syncer", daemon=True)
        self._thread.start()

    def close(self, leave_s: float) -> None:
        """Wait `leave_s` for the child to leave (it reads in the log that the run is over), then end it."""
        self._thread.join(max(0.0, leave_s))
        with self._lock:
            self._closing.set()
            child = self._child
        if child is None or child.poll() is not None:
            return
        if child.stdin is not None:
            with suppress(OSError):
                child.stdin.close()
        try:
            child.wait(KILLED_AFTER_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def _keep(self) -> None:
        dead_pid, wait_s, pause_s = None, 0.0, FIRST_PAUSE_S
        while not self._closing.wait(wait_s):
            since_s = monotonic_s()
            try:
                child = self._start(dead_pid)
            except OSError as error:  # no memory, too many processes: this may be temporary
                problem = f"cannot be started: {error.strerror}"
            else:
                if child is None:
                    return
                status, dead_pid = child.wait(), child.pid
                if status == 0 or self._closing.is_set():
                    return
                problem = f"ended with status {status}"
            pause_s = FIRST_PAUSE_S if monotonic_s() - since_s >= SHORT_LIFE_S else min(2 * pause_s, MAX_PAUSE_S)
            wait_s = pause_s
            self._say(f"the hosted syncer {problem}; another one stands by in {wait_s:g} s")

    def _start(self, dead_pid: int | None) -> subprocess.Popen[bytes] | None:
        """The next child; None once this is closed. It has its own process group, so that Ctrl-C ends the learner
        alone: the child may still have to merge the learner's last offers."""
        with self._lock:
            if self._closing.is_set():
                return None
            self._child = subprocess.Popen(
                self._command(dead_pid),
                stdin=subprocess.PIPE,
                env=environment_with(**ONE_CORE_NO_DEVICE),
                process_group=0,
            )
            return self._child
