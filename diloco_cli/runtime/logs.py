"""The logs of a run's units on this machine: their last lines, new lines, and their lines about the store."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.clock import sleep_s, utc_now_text
from diloco_cli.errors import NotFoundError
from diloco_cli.escaping import escaped
from diloco_cli.paths import run_directory
from diloco_cli.runtime.files import make_directory
from diloco_cli.runtime.registry import SUPERVISOR, log_path

MAX_TAIL_BYTES = 4 * 1024 * 1024
MAX_LINE_CHARACTERS = 16_384
FOLLOW_EVERY_S = 0.25
STORE_LINES = 20  # of each log
STORE_MARK = " store: "
_TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?")  # all in UTC


@dataclass(frozen=True)
class Line:
    unit: str
    text: str


def log_files(run: str, unit: str | None = None) -> dict[str, Path]:
    """The existing logs, by unit. Raises NotFoundError if there is none, or none of the given unit."""
    found = {path.stem: path for path in sorted((run_directory(run) / "logs").glob("*.log"))}
    if unit is None and found:
        return found
    if unit is not None and unit in found:
        return {unit: found[unit]}
    known = ", ".join(found) or "none"
    missing = "no log" if unit is None else f"no log of {unit}"
    where = str(log_path(run, unit or "syncer").parent)
    raise NotFoundError(
        f"{missing} on this machine; logs here: {known}", where=where, hint=f"see `diloco status {run}`"
    )


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
        if self.path.exists():
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
        if len(self.rest) > MAX_LINE_CHARACTERS:
            whole, self.rest = [*whole, self.rest], b""
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
    """(time, text) of the newest line about the store in a unit's log; empty if there is none."""
    said = [line for line in tail(log_path(run, unit), STORE_LINES) if STORE_MARK in line]
    before, _, text = said[-1].partition(STORE_MARK) if said else ("", "", "")
    return before.partition(" ")[0], text


class StoreWords:
    """Lines about the store that were logged since this was made, each once. While the bucket takes no heartbeats, the
    logs alone show a failing store."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._told: dict[str, str] = {}
        self.news()

    def news(self) -> list[Line]:
        """The newest such line of each unit, if it was not returned before."""
        try:
            files = log_files(self._run)
        except NotFoundError:
            return []
        found = []
        for unit, path in sorted(files.items()):
            if unit == SUPERVISOR:  # which repeats these lines
                continue
            said = [text for text in tail(path, STORE_LINES) if STORE_MARK in text]
            if said and self._told.get(unit) != said[-1]:
                self._told[unit] = said[-1]
                found.append(Line(unit, said[-1].partition(STORE_MARK)[2]))
        return found
