"""One unit under supervision: its process, its exits, its state."""

from __future__ import annotations

import signal
import subprocess
from collections import deque
from contextlib import suppress

from diloco_cli.clock import monotonic_s, wall_s
from diloco_cli.errors import RefusedError
from diloco_cli.runtime.causes import read_cause
from diloco_cli.runtime.identity import is_alive, signal_family, signal_process
from diloco_cli.runtime.registry import Supervised, UnitRecord, is_held, read_unit
from diloco_cli.runtime.restart import Exit, describe_exit
from diloco_cli.runtime.units import LAST_STATES, UnitEvent, UnitSpec, UnitState, next_state, restarted, start_unit

MAX_EXITS_KEPT = 200


class SupervisedUnit:
    """Mechanism only: the supervisor and the restart policy decide what to do, and when."""

    def __init__(self, run: str, spec: UnitSpec) -> None:
        self.run = run
        self.spec = spec
        self.state = UnitState.STARTING
        self.exits: deque[Exit] = deque(maxlen=MAX_EXITS_KEPT)
        self.starts = 0
        self.restart_at_s = 0.0
        self.reason = ""
        self._told: set[int] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._record: UnitRecord | None = None
        self.dead_pid: int | None = None
        self._alive_since_s = 0.0

    @property
    def ended(self) -> bool:
        return self.state in LAST_STATES

    @property
    def held(self) -> bool:
        return is_held(self.run, self.spec.name)

    @property
    def pid(self) -> int | None:
        return self._record.identity.pid if self._record else None

    @property
    def account(self) -> Supervised:
        """For other commands on this machine."""
        last_end = describe_exit(self.exits[-1]) if self.exits else ""
        return Supervised(self.state, self.starts, self.reason, last_end)

    def go(self, event: UnitEvent, reason: str) -> None:
        self.state = next_state(self.state, event)
        self.reason = reason

    def adopt(self) -> bool:
        """Takes over the process of an earlier supervisor, if it still lives."""
        record = read_unit(self.run, self.spec.name)
        if not isinstance(record, UnitRecord) or not is_alive(record.identity):
            return False
        self._child, self._record = None, record
        self._alive_since_s = monotonic_s() - max(0.0, wall_s() - record.started_s)
        self.starts += 1
        return True

    def start(self) -> None:
        self._child, self._record = start_unit(self.run, restarted(self.spec, self.dead_pid))
        self._alive_since_s = monotonic_s()
        self.starts += 1

    def poll(self) -> Exit | None:
        """The exit, if its process has ended since the last call. Processes that it left behind are ended too."""
        if self._record is None:
            return None
        status = self._child.poll() if self._child else None
        if status is None and (self._child or is_alive(self._record.identity)):
            return None
        signal_family(self._record.identity, signal.SIGKILL)
        self.dead_pid = pid = self._record.identity.pid
        self._child, self._record = None, None
        now_s = monotonic_s()
        return self.note(
            Exit(now_s, status, max(0.0, now_s - self._alive_since_s), read_cause(self.run, self.spec.name, pid))
        )

    def note(self, life: Exit) -> Exit:
        self.exits.append(life)
        return life

    def terminate(self) -> bool:
        """Send SIGTERM, and SIGCONT, so that a paused process gets it. Only once: False after that."""
        return self._signal_once(signal.SIGTERM, signal.SIGCONT)

    def kill(self) -> bool:
        return self._signal_once(signal.SIGKILL)

    def _signal_once(self, *signums: int) -> bool:
        if self._record is None or self._told.issuperset(signums):
            return False
        self._told.update(signums)
        reached = False
        with suppress(RefusedError):  # it ended just now, perhaps by the first of these signals: the next poll sees it
            for signum in signums:
                signal_process(self._record.identity, signum)
                reached = True
        return reached
