"""Actions: safety rails first, then the record, the fault, and the check that it happened; and healing.

`refusal`: why an action is not allowed; a pure function of the target's facts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from subprocess import TimeoutExpired
from typing import Literal

from diloco_cli.chaos.faults import Fault, Kill, PauseFault
from diloco_cli.chaos.healer import healer
from diloco_cli.chaos.journal import JournalEntry, read_entries, record, record_plan
from diloco_cli.chaos.targets import Target, find_target, list_targets
from diloco_cli.errors import RefusedError
from diloco_cli.runtime.registry import SUPERVISOR, release

Action = Literal["kill", "pause", "revive"]
MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 24 * 3600.0


def refusal(action: Action, target: Target, *, hold: bool = False, for_s: float | None = None) -> str | None:
    """Why `action` may not be done to `target`; None if it may."""
    if target.condition == "unknown" and not (action == "revive" and target.held):
        return target.why
    if target.untouchable is not None:
        return target.untouchable
    if action == "revive":
        return _refusal_to_revive(target)
    if target.condition == "dead":
        return f"{target.name} does not run: {target.why}"
    if action == "pause":
        return _refusal_to_pause(target, for_s)
    if hold and target.kind == SUPERVISOR:
        return "no process restarts a supervisor, so --hold means nothing for it"
    return None


def _refusal_to_pause(target: Target, for_s: float | None) -> str | None:
    if target.condition == "paused":
        return f"{target.name} is paused already"
    if for_s is not None and not MIN_PAUSE_S <= for_s <= MAX_PAUSE_S:
        return f"a pause must last {MIN_PAUSE_S} s to {MAX_PAUSE_S:.0f} s, got {for_s:g} s"
    return None


def _refusal_to_revive(target: Target) -> str | None:
    if target.condition == "paused" or target.held:
        return None
    if target.condition == "running":
        return f"{target.name} runs, and nothing holds it"
    if target.kind == SUPERVISOR:
        return "a dead supervisor is not revived but replaced"
    if target.supervised:
        return f"{target.name} is dead but not held: the supervisor restarts it, or has ended it for good"
    return f"{target.name} is dead and no supervisor lives that could restart it"


def hint_for(action: Action, target: Target) -> str:
    """One command to try after a refusal."""
    if action == "revive" and not target.supervised:
        return f"go on with `diloco resume {target.run}`"
    if target.condition == "paused":
        return f"let it go on with `diloco chaos revive {target.name} --run {target.run}`"
    return f"list the units with `diloco chaos list --run {target.run}`"


def plan_kill(run: str, unit: str, *, hold: bool = False) -> Kill:
    """Raises RefusedError, with the reason, if the rails do not allow it."""
    target = find_target(run, unit)
    _check("kill", target, refusal("kill", target, hold=hold))
    return Kill(target, hold)


def plan_pause(run: str, unit: str, *, for_s: float | None = None) -> PauseFault:
    target = find_target(run, unit)
    _check("pause", target, refusal("pause", target, for_s=for_s))
    return PauseFault(target, for_s)


def execute(fault: Fault) -> JournalEntry:
    """Records, injects, verifies. The fault stays until it is healed (`diloco chaos revive`)."""
    target = fault.target
    entry = record_plan(target.run, fault.kind, target.name, pid=target.pid)
    return _inject(fault, entry)


def execute_pause(fault: PauseFault, *, on_paused: Callable[[JournalEntry], None] = lambda entry: None) -> JournalEntry:
    """Pause; with a time limit, wait for its end. Ctrl-C ends the pause at once, and so does this process's death."""
    if fault.for_s is None or fault.target.identity is None:
        return execute(fault)
    target = fault.target
    entry = record_plan(target.run, fault.kind, target.name, pid=target.pid, for_s=fault.for_s)
    try:
        with healer(target.run, fault.target.identity, entry, fault.for_s) as wait:
            entry = _inject(fault, entry)
            on_paused(entry)
            with suppress(TimeoutExpired):  # a stuck healer: this process heals below
                wait()
    finally:
        healed = fault.heal()
        entry = record(target.run, entry, healed=healed)
    return entry


@dataclass(frozen=True)
class Revival:
    """What was healed. `restarts`: the supervisor lives and will start the unit again."""

    entry: JournalEntry
    continued: bool
    released: bool
    restarts: bool


def plan_revive(run: str, unit: str) -> Target:
    target = find_target(run, unit)
    _check("revive", target, refusal("revive", target))
    return target


def revive(target: Target) -> Revival:
    """SIGCONT if it is paused; removes its hold, so that the supervisor starts it again."""
    entry = record_plan(target.run, "revive", target.name, pid=target.pid)
    paused = target.condition == "paused"
    continued = paused and PauseFault(target).heal()
    released = target.held and release(target.run, target.name)
    done = (continued or not paused) and (released or not target.held)
    entry = record(target.run, entry, injected=True, verified=done)
    for earlier in read_entries(target.run):
        if done and earlier.target == target.name and earlier.injected and earlier.healed is None:
            record(target.run, earlier, healed=True)
    return Revival(entry, continued, released, target.supervised and target.condition == "dead")


def overview(run: str) -> list[tuple[Target, JournalEntry | None]]:
    """Every target, and the last action on it."""
    last = {entry.target: entry for entry in read_entries(run)}
    return [(target, last.get(target.name)) for target in list_targets(run)]


def _inject(fault: Fault, entry: JournalEntry) -> JournalEntry:
    try:
        fault.inject()
    except RefusedError as error:
        record(fault.target.run, entry, injected=False, skipped=str(error))
        raise
    return record(fault.target.run, entry, injected=True, verified=fault.verify())


def _check(action: Action, target: Target, reason: str | None) -> None:
    if reason is not None:
        raise RefusedError(f"refused to {action} {target.name}: {reason}", hint=hint_for(action, target))
