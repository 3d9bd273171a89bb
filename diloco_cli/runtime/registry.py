"""A run's files on this machine, by which other commands and the next supervisor find the run and its processes.

run.json            the run's name and URL
units/<unit>.json   the identity of the last process of a unit
supervised.json     what the supervisor last decided about each unit, and why
hold/<unit>         present: the supervisor must not restart this unit
supervisor.json     the identity of the supervising process
supervisor.lock     locked by it as long as it lives: the kernel unlocks it on any death
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_cli.clock import wall_s
from diloco_cli.config.codec import from_plain
from diloco_cli.errors import NoSpaceError, NotFoundError, RefusedError, UsageError
from diloco_cli.paths import home_directory, run_directory
from diloco_cli.runtime.files import NAME, UnreadableError, checked_name, make_directory, read_json, write_json
from diloco_cli.runtime.processes import Identity, identity_from_json, identity_to_json, is_alive, own_identity

FORMAT = 1
SUPERVISOR = "supervisor"
MAX_UNITS = 10_000


@dataclass(frozen=True)
class UnitRecord:
    """The last process that a supervisor started for a unit; it may be dead by now."""

    name: str
    kind: str
    identity: Identity
    started_s: float


@dataclass(frozen=True)
class Ignored:
    """A file that is not a valid record, and why."""

    path: Path
    reason: str


def log_path(run: str, unit: str) -> Path:
    return _directory(run) / "logs" / f"{checked_name(unit, 'name of a unit')}.log"


def write_unit(run: str, record: UnitRecord) -> None:
    body = {
        "format": FORMAT,
        "name": record.name,
        "kind": record.kind,
        "identity": identity_to_json(record.identity),
        "started_s": record.started_s,
    }
    write_json(_unit_path(run, record.name), body)


def read_unit(run: str, name: str) -> UnitRecord | Ignored | None:
    """The record of a unit, or the reason why its file is ignored."""
    path = _unit_path(run, name)
    try:
        body = read_json(path)
        return None if body is None else _unit_from_json(body, name)
    except ValueError as error:
        return Ignored(path, str(error))


def list_units(run: str) -> list[UnitRecord]:
    """All records, by name."""
    paths = sorted((_directory(run) / "units").glob("[a-z0-9]*.json"))[:MAX_UNITS]
    entries = (read_unit(run, path.stem) for path in paths)
    return [entry for entry in entries if isinstance(entry, UnitRecord)]


@dataclass(frozen=True)
class Supervised:
    """What the supervisor last decided about a unit: its state, why, how often it has been started, and how its last
    process has ended ("": none has)."""

    state: str
    starts: int
    reason: str
    last_end: str = ""


def note_supervised(run: str, units: Mapping[str, Supervised]) -> None:
    """For other commands on this machine. Without space the old note stays: it must not end the supervision."""
    with suppress(NoSpaceError):
        write_json(_directory(run) / "supervised.json", {"units": {name: asdict(unit) for name, unit in units.items()}})


def read_supervised(run: str) -> dict[str, Supervised]:
    """By unit; empty if there is no valid note."""
    try:
        body = read_json(_directory(run) / "supervised.json") or {}
        return {name: from_plain(Supervised, unit) for name, unit in body["units"].items()}
    except (KeyError, AttributeError, ValueError, UsageError):
        return {}


def hold(run: str, unit: str) -> None:
    """From now on the supervisor leaves this unit down when it ends."""
    path = _hold_path(run, unit)
    make_directory(path.parent)
    path.touch(mode=0o600)


def release(run: str, unit: str) -> bool:
    """Let the supervisor restart the unit again; whether it was held."""
    try:
        _hold_path(run, unit).unlink()
    except FileNotFoundError:
        return False
    return True


def is_held(run: str, unit: str) -> bool:
    return _hold_path(run, unit).exists()


def read_supervisor(run: str) -> Identity | None:
    """The last supervisor of the run, dead or alive; None too if its file is torn."""
    try:
        body = read_json(_directory(run) / "supervisor.json")
        return None if body is None else identity_from_json(body.get("identity"))
    except ValueError:
        # The lock, not this file, keeps a second supervisor out; with a torn file its pid is unknown.
        return None


def living_supervisor(run: str) -> Identity | None:
    identity = read_supervisor(run)
    return identity if identity is not None and is_alive(identity) else None


@contextmanager
def supervisor_lock(run: str) -> Iterator[Identity]:
    """Holds the run on this machine for this process. Raises RefusedError while another supervisor lives."""
    make_directory(_directory(run))
    descriptor = os.open(_directory(run) / "supervisor.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _second_supervisor(run) from None
        identity = own_identity()
        body = {"format": FORMAT, "identity": identity_to_json(identity), "started_s": wall_s()}
        write_json(_directory(run) / "supervisor.json", body)
        yield identity
    finally:
        os.close(descriptor)


def _second_supervisor(run: str) -> RefusedError:
    other = read_supervisor(run)
    who = "another process" if other is None else f"process {other.pid}"
    return RefusedError(
        f"run {run} is already supervised on this machine by {who}",
        hint=f"watch it with `diloco status {run}`, end it with `diloco stop {run}`, "
        "or use another DILOCO_HOME for a second region of it here",
    )


def _unit_from_json(body: dict[str, Any], name: str) -> UnitRecord:
    if type(body.get("format")) is not int or body["format"] > FORMAT:
        raise UnreadableError(f"format {body.get('format')!r} is not one of 1..{FORMAT}")
    kind, started_s = body.get("kind"), body.get("started_s")
    if body.get("name") != name or not isinstance(kind, str):
        raise UnreadableError(f"is not the record of unit {name}")
    if not isinstance(started_s, int | float):
        raise UnreadableError("`started_s` is not a number")
    return UnitRecord(name, kind, identity_from_json(body.get("identity")), float(started_s))


def _directory(run: str) -> Path:
    return run_directory(checked_name(run, "name of a run"))


def _unit_path(run: str, unit: str) -> Path:
    return _directory(run) / "units" / f"{checked_name(unit, 'name of a unit')}.json"


def _hold_path(run: str, unit: str) -> Path:
    return _directory(run) / "hold" / checked_name(unit, "name of a unit")


MAX_RUNS = 10_000
LAUNCH_HINT = "start one with `diloco launch RUN.yaml`, or see `diloco runs`"


@dataclass(frozen=True)
class KnownRun:
    """A run that this directory has seen: `run.json`."""

    name: str
    url: str
    created_s: float


def remember_run(name: str, url: str) -> KnownRun:
    """Notes the run in this directory; the first noted time of creation stays."""
    known = read_run(name)
    run = KnownRun(checked_name(name, "name of a run"), url, known.created_s if known else wall_s())
    body = {"name": run.name, "url": run.url, "created_s": run.created_s}
    write_json(run_directory(name) / "run.json", body)
    return run


def read_run(name: str) -> KnownRun | None:
    """The noted run; None if there is none here, or its file is invalid: the bucket alone is enough."""
    try:
        body = read_json(run_directory(checked_name(name, "name of a run")) / "run.json")
        return None if body is None else _run_from_json(body, name)
    except ValueError:
        return None


def known_runs() -> list[KnownRun]:
    """All runs of this directory, newest first."""
    home = home_directory()
    names = sorted(path.name for path in home.iterdir()) if home.is_dir() else []
    runs = [run for name in names[:MAX_RUNS] if NAME.fullmatch(name) and (run := read_run(name))]
    return sorted(runs, key=lambda run: (run.created_s, run.name), reverse=True)


def newest_run() -> KnownRun:
    runs = known_runs()
    if not runs:
        raise NotFoundError("no run is known", where=str(home_directory()), hint=LAUNCH_HINT)
    return runs[0]


def resolve_run(text: str | None, say: Callable[[str], None]) -> KnownRun:
    """The run of this directory with that name or URL; `say` reports which run was chosen if none was given."""
    if text is None:
        run = newest_run()
        say(f"run {run.name} ({run.url}), the newest of this directory")
        return run
    by_name = {run.name: run for run in reversed(known_runs())}
    by_url = {run.url.rstrip("/"): run for run in by_name.values()}
    found = by_name.get(text) or by_url.get(text.rstrip("/"))
    if found is None:
        known = ", ".join(list(by_name)[-5:]) or "none"
        message = f"run {text!r} is not known to this directory; known: {known}"
        raise NotFoundError(message, where=str(home_directory()), hint=LAUNCH_HINT)
    return found


def _run_from_json(body: dict[str, Any], name: str) -> KnownRun | None:
    url, created_s = body.get("url"), body.get("created_s")
    if body.get("name") != name or not isinstance(url, str) or not isinstance(created_s, int | float):
        return None
    return KnownRun(name, url, float(created_s)) if math.isfinite(created_s) else None
