"""A run's files on this machine, by which other commands and the next supervisor find the run and its processes.

run.json            the run's name and URL
units/<unit>.json   the identity of the last process of a unit
supervised.json     what the supervisor last decided about each unit, and why
hold/<unit>         present: the supervisor must not restart this unit
supervisor.json     the identity of the supervising process
supervisor.lock     locked by it as long as it lives: the kernel unlocks it on any death
logs/<unit>.log     what a unit printed, and what the supervisor said
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco_cli.clock import sleep_s, utc_now_text, wall_s
from diloco_cli.config.codec import from_plain
from diloco_cli.errors import NoSpaceError, NotFoundError, RefusedError, UsageError, escaped
from diloco_cli.paths import (
    NAME,
    UnreadableError,
    checked_name,
    home_directory,
    make_directory,
    read_json,
    run_directory,
    write_json,
)
from diloco_cli.runtime.processes import Identity, is_alive, own_identity

FORMAT = 1
SUPERVISOR = "supervisor"
LAUNCH_HINT = "start one with `diloco launch RUN.yaml`, or see `diloco runs`"


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


def write_unit(run: str, record: UnitRecord) -> None:
    write_json(_unit_path(run, record.name), {"format": FORMAT, **asdict(record)})


def read_unit(run: str, name: str) -> UnitRecord | Ignored | None:
    """The record of a unit, or the reason why its file is ignored."""
    path = _unit_path(run, name)
    try:
        body = read_json(path)
        found = None if body is None else from_plain(UnitRecord, body, strict=False)
    except (UnreadableError, UsageError) as error:
        return Ignored(path, str(error))
    return found if found is None or found.name == name else Ignored(path, f"it is not the record of unit {name}")


def list_units(run: str) -> list[UnitRecord]:
    """All records, by name."""
    paths = sorted((_directory(run) / "units").glob("[a-z0-9]*.json"))
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
        return from_plain(dict[str, Supervised], body.get("units", {}))
    except (UnreadableError, UsageError):
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
    """The last supervisor of the run, dead or alive; None too if its file is torn: the lock, not this file, keeps a
    second supervisor out."""
    try:
        body = read_json(_directory(run) / "supervisor.json")
        return None if body is None else from_plain(Identity, body.get("identity"))
    except (UnreadableError, UsageError):
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
        body = {"format": FORMAT, "identity": asdict(identity), "started_s": wall_s()}
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


def _directory(run: str) -> Path:
    return run_directory(checked_name(run, "name of a run"))


def _unit_path(run: str, unit: str) -> Path:
    return _directory(run) / "units" / f"{checked_name(unit, 'name of a unit')}.json"


def _hold_path(run: str, unit: str) -> Path:
    return _directory(run) / "hold" / checked_name(unit, "name of a unit")


@dataclass(frozen=True)
class KnownRun:
    """A run that this directory has seen: `run.json`."""

    name: str
    url: str
    created_s: float


def remember_run(name: str, url: str) -> KnownRun:
    """Notes the run in this directory; the first noted time of creation stays."""
    known = read_run(name)
    run = KnownRun(name, url, known.created_s if known else wall_s())
    write_json(_directory(name) / "run.json", asdict(run))
    return run


def read_run(name: str) -> KnownRun | None:
    """The noted run; None if there is none here, or its file is invalid: the bucket alone is enough."""
    try:
        body = read_json(_directory(name) / "run.json")
        found = None if body is None else from_plain(KnownRun, body, strict=False)
    except (UnreadableError, UsageError):
        return None
    return found if found is not None and found.name == name else None


def known_runs() -> list[KnownRun]:
    """All runs of this directory, newest first."""
    home = home_directory()
    names = sorted(path.name for path in home.iterdir()) if home.is_dir() else []
    runs = [run for name in names if NAME.fullmatch(name) and (run := read_run(name))]
    return sorted(runs, key=lambda run: (run.created_s, run.name), reverse=True)


def resolve_run(text: str | None, say: Callable[[str], None]) -> KnownRun:
    """The run of this directory with that name or URL; without one the newest, which `say` is told."""
    runs = known_runs()
    if text is None:
        if not runs:
            raise NotFoundError("no run is known", where=str(home_directory()), hint=LAUNCH_HINT)
        say(f"run {runs[0].name} ({runs[0].url}), the newest of this directory")
        return runs[0]
    by_name = {run.name: run for run in reversed(runs)}
    by_url = {run.url.rstrip("/"): run for run in by_name.values()}
    found = by_name.get(text) or by_url.get(text.rstrip("/"))
    if found is None:
        known = ", ".join(list(by_name)[-5:]) or "none"
        message = f"run {text!r} is not known to this directory; known: {known}"
        raise NotFoundError(message, where=str(home_directory()), hint=LAUNCH_HINT)
    return found


MAX_TAIL_BYTES = 4 * 1024 * 1024
MAX_LINE_CHARACTERS = 16_384
FOLLOW_EVERY_S = 0.25
STORE_LINES = 20  # the last ones of a log, in which a word about the store is looked for
STORE_MARK = " store: "
_TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?")  # all in UTC


@dataclass(frozen=True)
class Line:
    unit: str
    text: str


def log_path(run: str, unit: str) -> Path:
    return _directory(run) / "logs" / f"{checked_name(unit, 'name of a unit')}.log"


def log_files(run: str, unit: str | None = None) -> dict[str, Path]:
    """The existing logs, by unit. Raises NotFoundError if there is none, or none of the given unit."""
    folder = run_directory(run) / "logs"
    found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    chosen = {name: path for name, path in found.items() if unit in (None, name)}
    if not chosen:
        missing = "no log" if unit is None else f"no log of {unit}"
        message = f"{missing} on this machine; logs here: {', '.join(found) or 'none'}"
        raise NotFoundError(message, where=str(folder), hint=f"see `diloco status {run}`")
    return chosen


def note_line(path: Path, text: str) -> None:
    """Append a line with the time now, as a process's own log has it."""
    make_directory(path.parent)
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
        log.write(f"{utc_now_text()} {text}\n".encode(errors="backslashreplace"))


def tail(path: Path, num_lines: int) -> list[str]:
    """The last lines, safe to print; only the last 4 MiB are looked at."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_TAIL_BYTES))
            lines = file.read(MAX_TAIL_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    if not lines[-1]:
        lines.pop()
    return [printable(line) for line in lines[-num_lines:]] if num_lines > 0 else []


def printable(line: bytes) -> str:
    """The line with control characters escaped: text from the bucket in a log must not control a terminal."""
    return escaped(line.decode("utf-8", "backslashreplace").rstrip("\r")[:MAX_LINE_CHARACTERS], keep="\t")


def by_time(lines: Iterable[Line], last: dict[str, str]) -> list[Line]:
    """The lines in the order of the times that they begin with; one without (a traceback's) follows the line before it
    of the same unit. `last`: the newest time of each unit's log, kept from call to call."""
    timed = []
    for line in lines:
        found = _TIME.match(line.text)
        if found is not None:
            last[line.unit] = found[0]
        timed.append((last.get(line.unit, ""), line))
    return [line for _, line in sorted(timed, key=lambda pair: pair[0])]


@dataclass
class _Follower:
    """Reads what is added to one log, also after it was rotated."""

    unit: str
    path: Path
    inode: int = 0
    offset: int = 0
    rest: bytes = b""

    def __post_init__(self) -> None:
        stat = self.path.stat()
        self.inode, self.offset = stat.st_ino, stat.st_size

    def read(self) -> list[Line]:
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self.inode or stat.st_size < self.offset:
                    self.inode, self.offset = stat.st_ino, 0
                file.seek(self.offset)
                data = file.read(MAX_TAIL_BYTES)
        except FileNotFoundError:
            return []
        self.offset += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        return [Line(self.unit, printable(line)) for line in whole]


def follow(files: dict[str, Path], stop: Callable[[], bool] = lambda: False) -> Iterator[Line]:
    """Every line that is added from now on, until `stop`; those that are found at once in the order of their times."""
    followers = [_Follower(unit, path) for unit, path in files.items()]
    last: dict[str, str] = {}
    while not stop():
        lines = by_time((line for follower in followers for line in follower.read()), last)
        yield from lines
        if not lines:
            sleep_s(FOLLOW_EVERY_S)


def last_store_word(run: str, unit: str) -> tuple[str, str]:
    """(time, text) of the newest line about the store in a unit's log; empty if there is none. While the bucket takes
    no heartbeats, the logs alone show a failing store."""
    said = [line for line in tail(log_path(run, unit), STORE_LINES) if STORE_MARK in line]
    before, _, text = said[-1].partition(STORE_MARK) if said else ("", "", "")
    return before.partition(" ")[0], text
