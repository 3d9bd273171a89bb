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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from diloco_cli.clock import monotonic_s, sleep_s, wall_s
from diloco_cli.errors import RefusedError
from diloco_cli.faults import FAULTS, FaultKind
from diloco_cli.paths import read_json, write_json
from diloco_cli.randomness import nonce
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
    store_fault_path,
)
from diloco_cli.store.wrappers import StoreFault, noted_beside, read_store_fault

Condition = Literal["running", "paused", "dead", "unknown"]


@dataclass(frozen=True)
class Target:
    """`why`: why it does not count as alive. `untouchable`: why it may not be signalled in any case. `disturbed`:
    the fault of its calls to the store that is on."""

    url: str
    name: str
    kind: str
    identity: Identity | None
    condition: Condition
    held: bool = False
    why: str | None = None
    untouchable: str | None = None
    supervised: bool = True
    disturbed: str = ""

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
    of_unit = kind != SUPERVISOR and identity is not None
    noted = read_store_fault(store_fault_path(url, name)) if of_unit else None
    found = Target(
        url,
        name,
        kind,
        identity,
        "unknown",
        kind != SUPERVISOR and is_held(url, name),
        why,
        supervised=living_supervisor(url) is not None,
        disturbed=noted.kind if noted is not None else "",
    )
    if identity is None:
        return found
    facts = read_process(identity.pid)
    why = mismatch(identity, facts)
    found = replace(found, why=why, untouchable=refusal_to_signal(identity.pid, os.getpid(), ancestors(os.getpid())))
    if why is not None or facts is None:
        return replace(found, condition="dead")
    is_paused = any(one.state == STOPPED for one in (facts, *ranks_of(facts.pid)))
    return replace(found, condition="paused" if is_paused else "running")


def _no_record(url: str, name: str, entry: Ignored | None) -> str:
    if isinstance(entry, Ignored):
        return f"its record {entry.path} does not count: {entry.reason}"
    known = [record.name for record in list_units(url)] + [SUPERVISOR]
    return f"run {run_name(url)} has no unit {name} on this machine; units: {', '.join(known)}"


VERIFY_S = 2.0
CALLS_WITHIN_S = 6.0  # a unit: its heartbeats alone come every three seconds
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


@dataclass(frozen=True)
class Disturbance:
    """The unit's own process does it to its calls to the store, while a file says so and for no longer than `for_s`:
    it heals by itself."""

    target: Target
    kind: FaultKind
    for_s: float
    factor: float = 1.0
    share: float = 1.0
    id: str = field(default_factory=nonce)

    @property
    def _path(self) -> Path:
        return store_fault_path(self.target.url, self.target.name)

    def describe(self) -> str:
        name, pid = self.target.name, self.target.pid
        return f"{self.kind} {name} (process {pid}) for {self.for_s:g} s: {FAULTS[self.kind].doc}"

    def inject(self) -> None:
        identity = _identity(self.target)
        reason = mismatch(identity, read_process(identity.pid))
        if reason is not None:
            raise RefusedError(f"nothing was disturbed: {reason}", hint="list the units with `diloco chaos list`")
        write_json(self._path, asdict(StoreFault(self.id, self.kind, wall_s(), self.for_s, self.factor, self.share)))

    def verify(self) -> bool:
        noted = noted_beside(self._path)
        return _soon(lambda: (read_json(noted) or {}).get("id") == self.id, CALLS_WITHIN_S)

    def heal(self) -> bool:
        return end_disturbance(self.target.url, self.target.name)


def end_disturbance(url: str, unit: str) -> bool:
    """Whether there is none any more."""
    store_fault_path(url, unit).unlink(missing_ok=True)
    return True


Fault = Kill | PauseFault | Disturbance


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


def _soon(condition: Callable[[], bool], within_s: float = VERIFY_S) -> bool:
    deadline_s = monotonic_s() + within_s
    while not condition():
        if monotonic_s() > deadline_s:
            return False
        sleep_s(VERIFY_POLL_S)
    return True
