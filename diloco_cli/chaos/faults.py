"""One fault is one small object.

describe   what `inject` will do, for people
inject     raises RefusedError, with nothing changed, if the target is no longer the same process
verify     whether the fault has happened; waits a moment for it
heal       undoes the fault as far as possible; whether it is gone; may be called again
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from diloco_cli.chaos.targets import Target
from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.errors import RefusedError
from diloco_cli.runtime.identity import Identity, is_alive, is_paused, signal_family, signal_process, signal_unit
from diloco_cli.runtime.registry import SUPERVISOR, hold, release

VERIFY_S = 2.0
VERIFY_POLL_S = 0.01


@dataclass(frozen=True)
class Kill:
    """SIGKILL. With `held`, the supervisor leaves the unit down until it is revived."""

    target: Target
    held: bool = False
    kind: str = "kill"

    def describe(self) -> str:
        return f"kill {self.target.name} (process {self.target.pid}) with SIGKILL; {self._after()}"

    def _after(self) -> str:
        if self.target.kind == SUPERVISOR:
            return "its units go on without it"
        if self.held:
            return "it is held down until it is revived"
        if self.target.supervised:
            return "its supervisor will restart it"
        return "no supervisor lives that could restart it"

    def inject(self) -> None:
        identity = _identity(self.target)
        if self.held:
            hold(self.target.run, self.target.name)
        try:
            signal_process(identity, signal.SIGKILL)
        except RefusedError:
            self.heal()
            raise
        signal_family(identity, signal.SIGKILL)

    def verify(self) -> bool:
        identity = _identity(self.target)
        return _soon(lambda: not is_alive(identity))

    def heal(self) -> bool:
        """Let the supervisor start the unit again; the dead process itself cannot be healed."""
        if self.held:
            release(self.target.run, self.target.name)
        return True


@dataclass(frozen=True)
class PauseFault:
    """SIGSTOP, healed by SIGCONT: a straggler, or a zombie that wakes up after another process took its place."""

    target: Target
    for_s: float | None = None
    kind: str = "pause"

    def describe(self) -> str:
        how_long = "until it is revived" if self.for_s is None else f"for {self.for_s:g} s"
        return f"pause {self.target.name} (process {self.target.pid}) with SIGSTOP {how_long}"

    def inject(self) -> None:
        signal_unit(_identity(self.target), signal.SIGSTOP)

    def verify(self) -> bool:
        identity = _identity(self.target)
        return _soon(lambda: is_paused(identity))

    def heal(self) -> bool:
        return resume_process(_identity(self.target))


Fault = Kill | PauseFault


def resume_process(identity: Identity) -> bool:
    """SIGCONT; whether the process is paused no longer (a dead one is not)."""
    try:
        signal_unit(identity, signal.SIGCONT)
    except RefusedError:
        return not is_alive(identity)
    return _soon(lambda: not is_paused(identity))


def _identity(target: Target) -> Identity:
    if target.identity is None:
        raise RefusedError(f"{target.name} has no process on this machine: {target.why}")
    return target.identity


def _soon(condition: Callable[[], bool]) -> bool:
    deadline_s = monotonic_s() + VERIFY_S
    while not condition():
        if monotonic_s() > deadline_s:
            return False
        sleep_s(VERIFY_POLL_S)
    return True
