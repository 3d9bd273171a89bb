"""A run's files on this machine, by which other commands and the next supervisor find the run and its processes. A run
is its URL, so they lie in a folder for each URL: two runs of one name never meet.

run.json            the run's name and URL, and the folder from which it was launched
units/<unit>.json   the identity of the last process of a unit
supervised.json     what the supervisor last decided about each unit, and why
resuming.json       how its successor goes on
hold/<unit>         present: the supervisor must not restart this unit
errors/<unit>.json  the last error of a unit's process, for its supervisor; a process without one tells the bucket
faults/<unit>.json  what is done on purpose to its calls to the store (store/wrappers.py)
supervisor.json     the identity of the supervising process
supervisor.lock     locked by it as long as it lives: the kernel unlocks it on any death
logs/<unit>.log     what a unit printed, and what the supervisor said
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text, wall_s
from diloco_cli.config.codec import from_plain, to_plain
from diloco_cli.config.settings import Site
from diloco_cli.digests import digest
from diloco_cli.environment import environment_value
from diloco_cli.errors import (
    DilocoError,
    FencedError,
    NoSpaceError,
    NotFoundError,
    RefusedError,
    TerminatedError,
    UsageError,
    escaped,
)
from diloco_cli.events.bucket import WRITE_EVERY_S, tell_event
from diloco_cli.events.cause import Cause, cause_of
from diloco_cli.paths import (
    UnreadableError,
    checked_name,
    make_directory,
    read_json,
    user_state_directory,
    write_json,
)
from diloco_cli.runtime.processes import Identity, is_alive, own_identity
from diloco_cli.store.url import real_url, split_url

FORMAT = 1
SUPERVISOR = "supervisor"
CAUSE_VARIABLE = "DILOCO_CAUSE_FILE"  # PID:PATH, the supervisor's pid and the file that it will read
MAX_NAME_CHARACTERS = 40
DIGITS = 12
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


def write_unit(url: str, record: UnitRecord) -> None:
    write_json(_unit_path(url, record.name), {"format": FORMAT, **asdict(record)})


def read_unit(url: str, name: str) -> UnitRecord | Ignored | None:
    """The record of a unit, or the reason why its file is ignored."""
    path = _unit_path(url, name)
    try:
        body = read_json(path)
        found = None if body is None else from_plain(UnitRecord, body, strict=False)
    except (UnreadableError, UsageError) as error:
        return Ignored(path, str(error))
    return found if found is None or found.name == name else Ignored(path, f"it is not the record of unit {name}")


def list_units(url: str) -> list[UnitRecord]:
    """All records, by name."""
    paths = sorted((run_directory(url) / "units").glob("[a-z0-9]*.json"))
    entries = (read_unit(url, path.stem) for path in paths)
    return [entry for entry in entries if isinstance(entry, UnitRecord)]


@dataclass(frozen=True)
class Supervised:
    """What the supervisor last decided about a unit: its state, why, how often it has been started, and how its last
    process has ended ("": none has)."""

    state: str
    starts: int
    reason: str
    last_end: str = ""


def note_supervised(url: str, units: Mapping[str, Supervised]) -> None:
    """For other commands on this machine. Without space the old note stays: it must not end the supervision."""
    with suppress(NoSpaceError):
        noted = {name: asdict(unit) for name, unit in units.items()}
        write_json(run_directory(url) / "supervised.json", {"units": noted})


def read_supervised(url: str) -> dict[str, Supervised]:
    """By unit; empty if there is no valid note."""
    try:
        body = read_json(run_directory(url) / "supervised.json") or {}
        return from_plain(dict[str, Supervised], body.get("units", {}))
    except (UnreadableError, UsageError):
        return {}


def hold(url: str, unit: str) -> None:
    """From now on the supervisor leaves this unit down when it ends."""
    path = _hold_path(url, unit)
    make_directory(path.parent)
    path.touch(mode=0o600)


def release(url: str, unit: str) -> bool:
    """Let the supervisor restart the unit again; whether it was held."""
    try:
        _hold_path(url, unit).unlink()
    except FileNotFoundError:
        return False
    return True


def is_held(url: str, unit: str) -> bool:
    return _hold_path(url, unit).exists()


def read_supervisor(url: str) -> Identity | None:
    """The last supervisor of the run, dead or alive; None too if its file is torn: the lock, not this file, keeps a
    second supervisor out."""
    try:
        body = read_json(run_directory(url) / "supervisor.json")
        return None if body is None else from_plain(Identity, body.get("identity"))
    except (UnreadableError, UsageError):
        return None


def living_supervisor(url: str) -> Identity | None:
    identity = read_supervisor(url)
    return identity if identity is not None and is_alive(identity) else None


def store_fault_path(url: str, unit: str) -> Path:
    return run_directory(url) / "faults" / f"{checked_name(unit, 'name of a unit')}.json"


@contextmanager
def telling_why(url: str, unit: str) -> Iterator[None]:
    """Around all that a unit's process does."""
    try:
        yield
    except (TerminatedError, FencedError):
        raise
    except Exception as error:
        with suppress(DilocoError, OSError):  # the error itself is what matters
            tell(url, unit, cause_of(error))
        raise


def cause_path(url: str, unit: str) -> Path:
    return run_directory(url) / "errors" / f"{checked_name(unit, 'name of a unit')}.json"


def cause_environment(url: str, unit: str) -> dict[str, str]:
    """For a unit that this process starts and will read the cause of."""
    return {CAUSE_VARIABLE: f"{os.getpid()}:{cause_path(url, unit)}"}


def read_cause(path: Path, pid: int) -> Cause | None:
    """What the process with this pid left there."""
    try:
        body = read_json(path) or {}
        return from_plain(Cause, body.get("cause")) if body.get("pid") == pid else None
    except (UnreadableError, UsageError):
        return None


def hint_of(url: str, unit: str, cause: Cause | None) -> str:
    """What to do about a unit that is not started again: what its own error says, else where to look."""
    if cause is not None and cause.hint:
        return cause.hint
    mend = f"mend {cause.place}" if cause is not None and cause.place else f"read `diloco logs {unit} --run {url}`"
    return f"{mend}, then `diloco resume {url}`"


def tell(url: str, unit: str, cause: Cause) -> None:
    """To this process's supervisor, or to the bucket if there is none."""
    supervisor, _, path = (environment_value(CAUSE_VARIABLE) or "").partition(":")
    if path and Path(path).stem == unit:
        write_json(Path(path), {"pid": os.getpid(), "cause": asdict(cause)})
        if supervisor == str(os.getppid()):  # it lives, and tells the bucket
            return
    if cause.of_living:
        return
    # a process that is restarted fast must not flood the bucket
    tell_event(url, "error", unit, cause.text, place_data(cause), every_s=WRITE_EVERY_S)


def place_data(cause: Cause) -> dict[str, str | int | float]:
    return {"place": cause.place} if cause.place else {}


@dataclass(frozen=True)
class Resuming:
    """How the supervision of a run here goes on with another supervisor: words of `diloco resume`, and what its
    environment has besides."""

    words: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def note_resuming(url: str, resuming: Resuming) -> None:
    write_json(run_directory(url) / "resuming.json", asdict(resuming))


def read_resuming(url: str) -> Resuming:
    """As noted last; without words if there is no valid note."""
    try:
        return from_plain(Resuming, read_json(run_directory(url) / "resuming.json") or {})
    except (UnreadableError, UsageError):
        return Resuming()


def refuse_supervised(url: str, patience_s: float = 0.0) -> None:
    """Raises RefusedError while a supervisor of the run lives on this machine, so that a command can say so early.
    `patience_s`: how long one may take that is ending."""
    until_s = monotonic_s() + patience_s
    while living_supervisor(url) is not None:
        if monotonic_s() >= until_s:
            raise _second_supervisor(url)
        sleep_s(FOLLOW_EVERY_S)


@contextmanager
def supervisor_lock(url: str) -> Iterator[Identity]:
    """Holds the run on this machine for this process. Raises RefusedError while another supervisor lives."""
    make_directory(run_directory(url))
    descriptor = os.open(run_directory(url) / "supervisor.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _second_supervisor(url) from None
        identity = own_identity()
        body = {"format": FORMAT, "identity": asdict(identity), "started_s": wall_s()}
        write_json(run_directory(url) / "supervisor.json", body)
        yield identity
    finally:
        os.close(descriptor)


def _second_supervisor(url: str) -> RefusedError:
    other = read_supervisor(url)
    who = "another process" if other is None else f"process {other.pid}"
    return RefusedError(
        f"run {run_name(url)} is already supervised on this machine by {who}",
        where=url,
        hint=f"watch it with `diloco status {url}`, end it with `diloco stop {url}`, "
        "or use another DILOCO_HOME for a second region of it here",
    )


def _unit_path(url: str, unit: str) -> Path:
    return run_directory(url) / "units" / f"{checked_name(unit, 'name of a unit')}.json"


def _hold_path(url: str, unit: str) -> Path:
    return run_directory(url) / "hold" / checked_name(unit, "name of a unit")


@dataclass(frozen=True)
class KnownRun:
    """A run, and how this machine knows it: `folder` and `launched_s` are where and when it was last launched
    or resumed here ("" and 0 if it never was); `also` are the run's other URLs, home's and its regions'."""

    name: str
    url: str
    folder: str = ""
    launched_s: float = 0.0
    also: tuple[str, ...] = ()

    @property
    def is_of_this_folder(self) -> bool:
        return self.folder == this_folder() != ""


def this_folder() -> str:
    """The current one; "" if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def run_name(url: str) -> str:
    """The run's name for people: the last part of its URL."""
    return split_url(url)[1]


def run_directory(url: str) -> Path:
    """Where this machine keeps what belongs to the run at this URL."""
    place = real_url(url)
    readable = re.sub("[^a-z0-9-]", "-", run_name(place).lower())[:MAX_NAME_CHARACTERS]
    return _runs_directory() / f"{readable}-{digest(place.encode()).rpartition('-')[2][:DIGITS]}"


def _runs_directory() -> Path:
    return user_state_directory("runs")


def remember_run(url: str, also: Iterable[str] = ()) -> KnownRun:
    """Notes the run on this machine, with the other URLs that it has."""
    run = KnownRun(run_name(url), url, this_folder(), wall_s(), tuple(sorted({*also} - {url})))
    sites = sites_of(url)  # as noted under another one of them
    write_json(run_directory(url) / "run.json", asdict(run))
    if sites:
        note_sites(url, sites)
    return run


def note_sites(url: str, sites: Mapping[str, Site | None]) -> None:
    """What each `infra` means that this machine's user has named."""
    write_json(run_directory(noted_at(url)) / "sites.json", to_plain(sites))


def sites_of(url: str) -> dict[str, Site | None]:
    """By `infra`, as the run at this URL was last launched on this machine; elsewhere only its bucket names them."""
    try:
        return _sites_in((run_directory(noted_at(url)) / "sites.json").read_bytes())
    except (OSError, ValueError, AttributeError, UsageError):
        return {}


@lru_cache(maxsize=1)
def _sites_in(noted: bytes) -> dict[str, Site | None]:
    """They are asked for unit by unit, and a run has hundreds."""
    return {name: site and from_plain(Site, site) for name, site in json.loads(noted).items()}


def known_at(url: str) -> KnownRun:
    """The run at this URL, with what this machine knows of it."""
    return read_run(url) or KnownRun(run_name(url), url)


def noted_at(url: str) -> str:
    """The URL under which this machine keeps its notes of the run at `url`: that, or another one of the same run."""
    if read_run(url) is not None:
        return url
    return next((run.url for run in known_runs() if url in run.also), url)


def read_run(url: str) -> KnownRun | None:
    """The noted run; None if there is none, or its file is invalid: the bucket alone is enough."""
    return _read_run(run_directory(url))


def known_runs() -> list[KnownRun]:
    """All runs of this machine: first those of this folder, the newest first."""
    folder = _runs_directory()
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    runs = [run for path in paths if (run := _read_run(path)) is not None]
    return sorted(runs, key=lambda run: (run.is_of_this_folder, run.launched_s, run.url), reverse=True)


def _read_run(directory: Path) -> KnownRun | None:
    try:
        body = read_json(directory / "run.json")
        found = None if body is None else from_plain(KnownRun, body, strict=False)
        return found if found is not None and run_directory(found.url) == directory else None
    except (UnreadableError, UsageError):
        return None


def run_of_name(name: str) -> KnownRun:
    """The only run of that name on this machine. Raises NotFoundError, or UsageError if there are several."""
    runs = known_runs()
    found = [run for run in runs if run.name == name]
    if len(found) > 1:
        where = ", ".join(run.url for run in found)
        raise UsageError(
            f"{len(found)} runs of this machine are called {name}: {where}",
            hint="name it by its URL, or work in its folder",
        )
    if not found:
        others = ", ".join(list(dict.fromkeys(run.name for run in runs))[:5]) or "none"
        message = f"run {name!r} is not known to this machine; known: {others}"
        hint = f"{LAUNCH_HINT}; a run of another machine is named by its URL"
        raise NotFoundError(message, where=str(_runs_directory()), hint=hint)
    return found[0]


def forget_run(url: str) -> None:
    """Remove all that this machine keeps of the run. Nothing of it may live here."""
    shutil.rmtree(run_directory(url), ignore_errors=True)


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


def log_path(url: str, unit: str) -> Path:
    return run_directory(url) / "logs" / f"{checked_name(unit, 'name of a unit')}.log"


def log_files(url: str, unit: str | None = None) -> dict[str, Path]:
    """The existing logs, by unit. Raises NotFoundError if there is none, or none of the given unit."""
    folder = run_directory(url) / "logs"
    noted = {path.stem: path for path in sorted(folder.glob("*.log"))}
    found = {name: path for name, path in noted.items() if path.exists()}
    chosen = {name: path for name, path in found.items() if unit in (None, name)}
    if not chosen and (gone := [path for name, path in noted.items() if unit in (None, name)]):
        hint = f"no job starts without the folder that it was submitted from: make it again, or: diloco resume {url}"
        raise NotFoundError("a log was here, and is gone with its folder", where=str(gone[0].readlink()), hint=hint)
    if not chosen:
        missing = "no log" if unit is None else f"no log of {unit}"
        message = f"{missing} on this machine: each stays where its unit runs; logs here: {', '.join(found) or 'none'}"
        hint = f"of another run: diloco logs --run RUN; how this one is: diloco status {url}"
        raise NotFoundError(message, where=str(folder), hint=hint)
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


def last_store_word(url: str, unit: str) -> tuple[str, str]:
    """(time, text) of the newest line about the store in a unit's log; empty if there is none. While the bucket takes
    no heartbeats, the logs alone show a failing store."""
    said = [line for line in tail(log_path(url, unit), STORE_LINES) if STORE_MARK in line]
    before, _, text = said[-1].partition(STORE_MARK) if said else ("", "", "")
    return before.partition(" ")[0], text
