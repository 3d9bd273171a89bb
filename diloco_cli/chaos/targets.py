"""The units of a run as targets: their identities and conditions, from this machine's registry."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from diloco_cli.runtime.identity import Identity, mismatch, refusal_to_signal
from diloco_cli.runtime.kernel import STOPPED, ancestors, ranks_of, read_process
from diloco_cli.runtime.registry import (
    SUPERVISOR,
    Ignored,
    UnitRecord,
    is_held,
    list_units,
    living_supervisor,
    read_supervisor,
    read_unit,
)

Condition = Literal["running", "paused", "dead", "unknown"]


@dataclass(frozen=True)
class Target:
    """`why`: why it does not count as alive. `untouchable`: why it may not be signalled in any case."""

    run: str
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


def find_target(run: str, name: str) -> Target:
    """The unit, or the supervisor, of that name; `unknown` if this machine has no record of it."""
    if name == SUPERVISOR:
        return _target(run, name, SUPERVISOR, read_supervisor(run), "no supervisor has been here")
    record = read_unit(run, name)
    if isinstance(record, UnitRecord):
        return _target(run, name, record.kind, record.identity, None)
    return _target(run, name, "unit", None, _no_record(run, name, record))


def list_targets(run: str) -> list[Target]:
    """Every unit this machine knows, by name, and the supervisor at the end."""
    return [find_target(run, name) for name in [*(record.name for record in list_units(run)), SUPERVISOR]]


def _target(run: str, name: str, kind: str, identity: Identity | None, why: str | None) -> Target:
    held = kind != SUPERVISOR and is_held(run, name)
    supervised = living_supervisor(run) is not None
    if identity is None:
        return Target(run, name, kind, None, "unknown", held, why, supervised=supervised)
    facts = read_process(identity.pid)
    why = mismatch(identity, facts)
    untouchable = refusal_to_signal(identity.pid, os.getpid(), ancestors(os.getpid()))
    if why is not None or facts is None:
        return Target(run, name, kind, identity, "dead", held, why, untouchable, supervised)
    is_paused = any(one.state == STOPPED for one in (facts, *ranks_of(facts.pid)))
    condition: Condition = "paused" if is_paused else "running"
    return Target(run, name, kind, identity, condition, held, None, untouchable, supervised)


def _no_record(run: str, name: str, entry: Ignored | None) -> str:
    if isinstance(entry, Ignored):
        return f"its record {entry.path} does not count: {entry.reason}"
    known = [record.name for record in list_units(run)] + [SUPERVISOR]
    return f"run {run} has no unit {name} on this machine; units: {', '.join(known)}"
