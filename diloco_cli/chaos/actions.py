"""Faults on the record: safety rails first, then the journal, the fault, the check that it happened; and healing.

The journal has one JSON object a line, appended, never rewritten: a fault's plan before it is injected, then its
results, under one `id`. A pause is ended by a small process of its own (`healer`), which is started before anything is
paused and also ends the pause if the chaos command dies: both ends of a pipe notice any death.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, Literal

from diloco_cli.chaos.faults import (
    Disturbance,
    Fault,
    Kill,
    PauseFault,
    Target,
    end_disturbance,
    find_target,
    list_targets,
    resume_process,
)
from diloco_cli.clock import utc_now_text
from diloco_cli.config.codec import from_plain, parse_object
from diloco_cli.errors import RefusedError, TryAgainError, UsageError
from diloco_cli.faults import FaultKind
from diloco_cli.paths import make_directory
from diloco_cli.randomness import nonce
from diloco_cli.runtime.processes import Identity
from diloco_cli.runtime.registry import SUPERVISOR, release, run_directory
from diloco_cli.runtime.units import Child, end_all

MAX_READ_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class JournalEntry:
    """`injected`, `verified`, `healed`: None while not known. `seed`: a storm's; None where a person chose the
    fault."""

    id: str
    time: str
    seed: int | None
    fault: str
    target: str
    pid: int | None = None
    for_s: float | None = None
    injected: bool | None = None
    verified: bool | None = None
    healed: bool | None = None
    skipped: str | None = None


def record_plan(
    url: str, fault: str, target: str, *, pid: int | None, for_s: float | None = None, seed: int | None = None
) -> JournalEntry:
    """Written and synced before the fault happens."""
    return _append(url, JournalEntry(nonce(), utc_now_text(), seed, fault, target, pid, for_s))


def record(url: str, entry: JournalEntry, **changes: Any) -> JournalEntry:
    return _append(url, replace(entry, **changes))


def read_entries(url: str) -> list[JournalEntry]:
    """The latest state of every fault, in the order of their plans. Torn lines are left out."""
    try:
        with _path(url).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_READ_BYTES))
            lines = file.read(MAX_READ_BYTES).splitlines()
    except FileNotFoundError:
        return []
    entries: dict[str, JournalEntry] = {}
    for entry in filter(None, map(_parse, lines)):
        entries[entry.id] = _merged(entries.get(entry.id), entry)
    return list(entries.values())


def _merged(before: JournalEntry | None, after: JournalEntry) -> JournalEntry:
    """The later line's values, but None never replaces a value: another writer (the healer) may not know it."""
    if before is None:
        return after
    known = {name: value for name, value in asdict(after).items() if value is not None}
    return replace(before, **known)


def _append(url: str, entry: JournalEntry) -> JournalEntry:
    path = _path(url)
    make_directory(path.parent)
    # The blank line keeps this line apart from a torn last line of a crashed writer.
    line = b"\n" + json.dumps(asdict(entry), allow_nan=False).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return entry


def _parse(line: bytes) -> JournalEntry | None:
    try:
        return from_plain(JournalEntry, parse_object(line, MAX_READ_BYTES), strict=False)
    except (UsageError, ValueError, OverflowError):
        return None


def _path(url: str) -> Path:
    return run_directory(url) / "chaos.jsonl"


READY, GO = "ready", "go"
START_S = 15.0
END_S = 10.0
MAX_LINE_BYTES = 4096


@contextmanager
def healer(url: str, identity: Identity, entry: JournalEntry, for_s: float) -> Iterator[Callable[[], None]]:
    """The chaos command's side. Leaving the block for any reason heals. The function that it yields starts the time of
    the pause and waits for its end."""
    child = Child("diloco_cli.chaos.actions", apart=True)
    try:
        child.tell({"url": url, "entry": entry.id, "identity": asdict(identity), "for_s": for_s})
        if not is_ready(child):
            raise TryAgainError("the process that would end the pause did not start, so nothing was paused")

        def wait() -> None:
            child.tell(GO)  # if it has died, the caller heals by itself
            child.process.wait(for_s + END_S)

        yield wait
    finally:
        end_all([child], END_S)


def is_ready(child: Child) -> bool:
    try:
        return bool(child.answer(START_S) == READY)
    except (TimeoutError, ValueError):
        return False


def main() -> None:
    """The healer's side: an order, `ready`, then `go` or the pipe's end, then the time's or the pipe's end."""
    order = json.loads(_read_line())
    identity = from_plain(Identity, order["identity"])
    print(json.dumps(READY), flush=True)
    if _read_line() == f"{json.dumps(GO)}\n".encode():
        select.select([0], [], [], float(order["for_s"]))
    healed = resume_process(identity)
    entry = next(entry for entry in read_entries(order["url"]) if entry.id == order["entry"])
    record(order["url"], entry, healed=healed)


def _read_line() -> bytes:
    """Byte by byte, so that nothing is left in a buffer that `select` does not see."""
    line = b""
    while len(line) < MAX_LINE_BYTES and not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line


Action = Literal["kill", "pause", "disturb", "revive"]
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
    if action == "disturb" and target.kind == SUPERVISOR:
        return "a supervisor has no calls to disturb: its units have"
    if action == "disturb":
        return f"{target.name} is paused, and makes no calls" if target.condition == "paused" else None
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
    if target.condition == "paused" or target.held or target.disturbed:
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
        return f"go on with `diloco resume {target.url}`"
    if target.condition == "paused":
        return f"let it go on with `diloco chaos revive {target.name} --run {target.url}`"
    return f"list the units with `diloco chaos list --run {target.url}`"


def plan_kill(url: str, unit: str, *, hold: bool = False) -> Kill:
    """Raises RefusedError, with the reason, if the rails do not allow it."""
    target = find_target(url, unit)
    _check("kill", target, refusal("kill", target, hold=hold))
    return Kill(target, hold)


def plan_pause(url: str, unit: str, *, for_s: float | None = None) -> PauseFault:
    target = find_target(url, unit)
    _check("pause", target, refusal("pause", target, for_s=for_s))
    return PauseFault(target, for_s)


def plan_disturbance(
    url: str, unit: str, kind: FaultKind, for_s: float, factor: float | None = None, share: float | None = None
) -> Disturbance:
    target = find_target(url, unit)
    _check("disturb", target, refusal("disturb", target))
    return Disturbance(target, kind, for_s, factor or 1.0, 1.0 if share is None else share)


def execute(fault: Fault, seed: int | None = None) -> JournalEntry:
    """Records, injects, verifies. The fault stays until it is healed (`diloco chaos revive`)."""
    (done,) = execute_at_once([fault], seed)
    if isinstance(done, RefusedError):
        raise done
    return done


def execute_at_once(faults: Sequence[Fault], seed: int | None = None) -> list[JournalEntry | RefusedError]:
    """Records all, injects all, then verifies each. An error stands for a fault that was refused."""
    entries = [
        record_plan(fault.target.url, fault.kind, fault.target.name, pid=fault.target.pid, seed=seed)
        for fault in faults
    ]
    errors = [_injected(fault) for fault in faults]
    return [_verified(*one) for one in zip(faults, entries, errors, strict=True)]


def execute_pause(fault: PauseFault, *, on_paused: Callable[[JournalEntry], None] = lambda entry: None) -> JournalEntry:
    """Pause; with a time limit, wait for its end. Ctrl-C ends the pause at once, and so does this process's death."""
    if fault.for_s is None or fault.target.identity is None:
        return execute(fault)
    target = fault.target
    entry = record_plan(target.url, fault.kind, target.name, pid=target.pid, for_s=fault.for_s)
    try:
        with healer(target.url, fault.target.identity, entry, fault.for_s) as wait:
            done = _verified(fault, entry, _injected(fault))
            if isinstance(done, RefusedError):
                raise done
            entry = done
            on_paused(entry)
            with suppress(TimeoutExpired):  # a stuck healer: this process heals below
                wait()
    finally:
        healed = fault.heal()
        entry = record(target.url, entry, healed=healed)
    return entry


@dataclass(frozen=True)
class Revival:
    """What was healed. `continued`: its pause has ended; `cleared`: the fault of its calls; `restarts`: the supervisor
    lives and will start the unit again."""

    entry: JournalEntry
    continued: bool
    cleared: bool
    released: bool
    restarts: bool


def plan_revive(url: str, unit: str) -> Target:
    target = find_target(url, unit)
    _check("revive", target, refusal("revive", target))
    return target


def revive(target: Target) -> Revival:
    """SIGCONT if it is paused; ends a fault of its calls; removes its hold, so that the supervisor starts it again."""
    entry = record_plan(target.url, "revive", target.name, pid=target.pid)
    paused = target.condition == "paused"
    continued = paused and PauseFault(target).heal()
    released = target.held and release(target.url, target.name)
    cleared = target.disturbed != "" and end_disturbance(target.url, target.name)
    done = (continued or not paused) and (released or not target.held)
    entry = record(target.url, entry, injected=True, verified=done)
    for earlier in read_entries(target.url):
        if done and earlier.target == target.name and earlier.injected and earlier.healed is None:
            record(target.url, earlier, healed=True)
    return Revival(entry, continued, cleared, released, target.supervised and target.condition == "dead")


def overview(url: str) -> list[tuple[Target, JournalEntry | None]]:
    """Every target, and the last action on it."""
    last = {entry.target: entry for entry in read_entries(url)}
    return [(target, last.get(target.name)) for target in list_targets(url)]


def _injected(fault: Fault) -> RefusedError | None:
    try:
        fault.inject()
    except RefusedError as error:
        return error
    return None


def _verified(fault: Fault, entry: JournalEntry, error: RefusedError | None) -> JournalEntry | RefusedError:
    if error is not None:
        record(fault.target.url, entry, injected=False, skipped=str(error))
        return error
    return record(fault.target.url, entry, injected=True, verified=fault.verify())


def _check(action: Action, target: Target, reason: str | None) -> None:
    if reason is not None:
        raise RefusedError(f"refused to {action} {target.name}: {reason}", hint=hint_for(action, target))


if __name__ == "__main__":
    main()
