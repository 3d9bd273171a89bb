"""The kernel's facts about a process, on which every decision about it is based. Reads only."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

TOKEN_VARIABLE = "DILOCO_UNIT_TOKEN"
ZOMBIE = "Z"
STOPPED = "T"
DEAD_STATES = frozenset({ZOMBIE, "X"})
MAX_ANCESTORS = 1024
PROC = Path("/proc")
_PSUTIL_STATES = {"zombie": ZOMBIE, "dead": "X", "stopped": STOPPED, "sleeping": "S", "running": "R"}


@dataclass(frozen=True)
class ProcessFacts:
    """pid and `start_time` together are unique on this machine. `token`: None where it cannot be read."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    start_time: str
    token: str | None

    @property
    def living(self) -> bool:
        return self.state not in DEAD_STATES


def read_process(pid: int) -> ProcessFacts | None:
    """The facts about the process that holds `pid` now, or None."""
    if pid <= 0:
        return None
    return _read_linux(pid) if sys.platform == "linux" else _read_portable(pid)


def ancestors(pid: int) -> tuple[int, ...]:
    """The parent of `pid`, its parent, and so on up to pid 1."""
    line: list[int] = []
    facts = read_process(pid)
    while facts is not None and facts.parent > 0 and len(line) < MAX_ANCESTORS:
        line.append(facts.parent)
        facts = read_process(facts.parent)
    return tuple(line)


def holders_of(token: str) -> tuple[ProcessFacts, ...]:
    """Every living process whose environment holds this secret: a unit and the children that inherited it."""
    found = (read_process(pid) for pid in _all_pids())
    return tuple(facts for facts in found if facts is not None and facts.living and facts.token == token)


def ranks_of(pid: int) -> tuple[ProcessFacts, ...]:
    """The living children of a unit's process in its own group: the ranks of an island, if it is their parent. A hosted
    syncer has a group of its own."""
    parent = read_process(pid)
    if parent is None:
        return ()
    found = (read_process(child) for child in _children(pid))
    return tuple(facts for facts in found if facts is not None and facts.living and facts.group == parent.group)


def _children(pid: int) -> list[int]:
    if sys.platform == "linux":
        try:
            return [int(child) for child in (PROC / str(pid) / "task" / str(pid) / "children").read_text().split()]
        except OSError:
            return []
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def _all_pids() -> list[int]:
    if sys.platform == "linux":
        return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()]
    import psutil

    return psutil.pids()


def _read_linux(pid: int) -> ProcessFacts | None:
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name in brackets and may itself hold blanks and brackets.
    fields = stat[stat.rindex(b")") + 2 :].decode("ascii").split()
    return ProcessFacts(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_time=f"{_boot_id()}:{fields[19]}",
        token=_token_linux(pid),
    )


def _boot_id() -> str:
    """The id of this boot: start times are ticks since boot, so without it they would not be unique after a reboot."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "boot"


def _token_linux(pid: int) -> str | None:
    """The token in the environment with which the process was started; None, which never matches, if unreadable."""
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    prefix = f"{TOKEN_VARIABLE}=".encode()
    values = [entry[len(prefix) :] for entry in environment.split(b"\0") if entry.startswith(prefix)]
    return values[0].decode("utf-8", "replace") if values else None


def _read_portable(pid: int) -> ProcessFacts | None:
    """Elsewhere (macOS): the same facts through psutil."""
    import psutil

    try:
        process = psutil.Process(pid)
        state = _PSUTIL_STATES.get(process.status(), "S")
        start_time = f"{process.create_time():.6f}"
        parent = process.ppid()
    except psutil.NoSuchProcess:
        return None
    return ProcessFacts(pid, parent, _group(pid), _session(pid), state, start_time, _token_portable(process))


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _token_portable(process: psutil.Process) -> str | None:
    import psutil

    try:
        return process.environ().get(TOKEN_VARIABLE)
    except psutil.Error:
        return None


def usable_cores() -> int:
    """The number of cores that this process may use, on Linux; elsewhere the number of cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
