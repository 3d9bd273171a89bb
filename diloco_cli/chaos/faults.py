"""One fault is one small object; its targets are units of the run, identified in this machine's registry.

describe   what `inject` will do, for people
inject     raises RefusedError, with nothing changed, if the target is no longer the same process
verify     whether the fault has happened; waits a moment for it
heal       undoes the fault as far as possible; whether it is gone; may be called again
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.errors import RefusedError
from diloco_cli.faults import FaultKind
from diloco_cli.runtime.processes import (
    STOPPED,
    Identity,
    ancestors,
    is_alive,
    is_paused,
    mismatch,
    ranks_of,
    read_process,
    refusal_to_signal,
    signal_family,
    signal_process,
    signal_unit,
)
from diloco_cli.runtime.registry import (
    SUPERVISOR,
    Ignored,
    UnitRecord,
    hold,
    is_held,
    list_units,
    living_supervisor,
    read_supervisor,
    read_unit,
    release,
    run_name,
)

Condition = Literal["running", "paused", "dead", "unknown"]


@dataclass(frozen=True)
class Target:
    """`why`: why it does not count as alive. `untouchable`: why it may not be signalled in any case."""

    url: str
    name: str
    kind: str
    identity: Identity | None
    condition: Condition
    held: bool = False
    why: str | None = None
    untouchable: str | None = None
    supervised: bool = True

    @property
    def pid(self) -> int | None:
        return self.identity.pid if self.identity else None


def find_target(url: str, name: str) -> Target:
    """The unit, or the supervisor, of that name; `unknown` if this machine has no record of it."""
    if name == SUPERVISOR:
        return _target(url, name, SUPERVISOR, read_supervisor(url), "no supervisor has been here")
    record = read_unit(url, name)
    if isinstance(record, UnitRecord):
        return _target(url, name, record.kind, record.identity, None)
    return _target(url, name, "unit", None, _no_record(url, name, record))


def list_targets(url: str) -> list[Target]:
    """Every unit this machine knows, by name, and the supervisor at the end."""
    return [find_target(url, name) for name in [*(record.name for record in list_units(url)), SUPERVISOR]]


def _target(url: str, name: str, kind: str, identity: Identity | None, why: str | None) -> Target:
    held = kind != SUPERVISOR and is_held(url, name)
    supervised = living_supervisor(url) is not None
    if identity is None:
        return Target(url, name, kind, None, "unknown", held, why, supervised=supervised)
    facts = read_process(identity.pid)
    why = mismatch(identity, facts)
    untouchable = refusal_to_signal(identity.pid, os.getpid(), ancestors(os.getpid()))
    if why is not None or facts is None:
        return Target(url, name, kind, identity, "dead", held, why, untouchable, supervised)
    is_paused = any(one.state == STOPPED for one in (facts, *ranks_of(facts.pid)))
    condition: Condition = "paused" if is_paused else "running"
    return Target(url, name, kind, identity, condition, held, None, untouchable, supervised)


def _no_record(url: str, name: str, entry: Ignored | None) -> str:
    if isinstance(entry, Ignored):
        return f"its record {entry.path} does not count: {entry.reason}"
    known = [record.name for record in list_units(url)] + [SUPERVISOR]
    return f"run {run_name(url)} has no unit {name} on this machine; units: {', '.join(known)}"


VERIFY_S = 2.0
VERIFY_POLL_S = 0.01


@dataclass(frozen=True)
class Kill:
    """SIGKILL. With `held`, the supervisor leaves the unit down until it is revived."""

    target: Target
    held: bool = False
    kind: FaultKind = "kill"

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
            hold(self.target.url, self.target.name)
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
            release(self.target.url, self.target.name)
        return True


@dataclass(frozen=True)
class PauseFault:
    """SIGSTOP, healed by SIGCONT: a straggler, or a zombie that wakes up after another process took its place."""

    target: Target
    for_s: float | None = None
    kind: FaultKind = "pause"

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
