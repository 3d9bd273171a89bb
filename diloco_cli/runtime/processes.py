"""Processes of this machine: the kernel's facts, the identity of a process, and signals to it.

An identity is a pid, the kernel's start time of that pid, and a secret in the environment: pids are reused, and any
process may have the same command line. Only this module sends signals to processes of a run: to the identified process,
or to none.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.environment import environment_value
from diloco_cli.errors import RefusedError, TryAgainError

TOKEN_VARIABLE = "DILOCO_UNIT_TOKEN"
ZOMBIE = "Z"
STOPPED = "T"
DEAD_STATES = frozenset({ZOMBIE, "X"})
MAX_ANCESTORS = 1024
PROC = Path("/proc")
_PSUTIL_STATES = {"zombie": ZOMBIE, "dead": "X", "stopped": STOPPED, "sleeping": "S", "running": "R"}


def is_started_by_diloco() -> bool:
    """Whether this process is a unit of a supervisor, or a supervisor in the background: it has a log."""
    return environment_value(TOKEN_VARIABLE) is not None


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

    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
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
    state, parent, group, session, *fields = stat[stat.rindex(b")") + 2 :].decode("ascii").split()
    start_time = f"{_boot_id()}:{fields[15]}"
    return ProcessFacts(pid, int(parent), int(group), int(session), state, start_time, _token_linux(pid))


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

    token = None
    try:
        process = psutil.Process(pid)
        state = _PSUTIL_STATES.get(process.status(), "S")
        with suppress(psutil.AccessDenied):
            token = process.environ().get(TOKEN_VARIABLE)
        group, session, start_time = os.getpgid(pid), os.getsid(pid), f"{process.create_time():.6f}"
        return ProcessFacts(pid, process.ppid(), group, session, state, start_time, token)
    except (psutil.NoSuchProcess, OSError):
        return None


def usable_cores() -> int:
    """The number of cores that this process may use, on Linux; elsewhere the number of cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Identity:
    """`token` None: started without one (a supervisor in the foreground); pid and start time then decide."""

    pid: int
    start_time: str
    token: str | None = None

    def __repr__(self) -> str:
        """Without the secret: identities end up in messages."""
        return f"Identity(pid={self.pid}, start_time={self.start_time!r})"


def identify(pid: int, token: str | None) -> Identity:
    """The identity of a process that the caller has just started and that still holds its pid."""
    facts = read_process(pid)
    if facts is None:
        raise TryAgainError(f"process {pid} was gone before it could be identified")
    return Identity(pid, facts.start_time, token)


def own_identity() -> Identity:
    """This process, with the token that the kernel can confirm."""
    facts = read_process(os.getpid())
    if facts is None:
        raise TryAgainError("the kernel does not tell about this process (is /proc mounted?)")
    return Identity(facts.pid, facts.start_time, facts.token)


def mismatch(identity: Identity, facts: ProcessFacts | None) -> str | None:
    """Why the process with these facts is not the one of `identity`, or None if it is, and lives. Pure."""
    if facts is None:
        return f"no process has pid {identity.pid}"
    if facts.start_time != identity.start_time:
        return f"pid {identity.pid} now belongs to another process (it started at another time)"
    if not facts.living:
        return f"process {identity.pid} is dead and only waits to be collected by its parent"
    if identity.token is not None and facts.token != identity.token:
        return f"process {identity.pid} does not hold this unit's secret token"
    return None


def is_alive(identity: Identity) -> bool:
    """Whether the identified process runs (or is paused). A zombie counts as dead."""
    return mismatch(identity, read_process(identity.pid)) is None


def is_paused(identity: Identity) -> bool:
    facts = read_process(identity.pid)
    return mismatch(identity, facts) is None and facts is not None and facts.state == STOPPED


def refusal_to_signal(pid: int, own_pid: int, own_ancestors: tuple[int, ...]) -> str | None:
    """Why no signal may go to `pid`, whatever process has it; None if it may. Pure."""
    if pid <= 1:
        return f"pid {pid} is the system or a whole group"
    if pid == own_pid:
        return f"process {pid} is this command itself"
    if pid in own_ancestors:
        return f"process {pid} is an ancestor of this command"
    return None


def signal_process(identity: Identity, signum: int) -> None:
    """Sends `signum` to the identified process; RefusedError if it may not be signalled, is gone, or is another one.

    On Linux the pidfd is opened first and the facts are compared after: if they match, the identified process
    has held this pid all the time, so the descriptor is its own, and a reused pid cannot get the signal. Elsewhere a
    race of microseconds remains.
    """
    reason = refusal_to_signal(identity.pid, os.getpid(), ancestors(os.getpid()))
    if reason is not None:
        raise RefusedError(f"refused to signal: {reason}")
    descriptor = None
    try:
        if sys.platform == "linux":
            descriptor = os.pidfd_open(identity.pid)
        reason = mismatch(identity, read_process(identity.pid))
        if reason is None and sys.platform == "linux" and descriptor is not None:
            signal.pidfd_send_signal(descriptor, signum)
        elif reason is None:
            os.kill(identity.pid, signum)
    except ProcessLookupError:
        reason = f"no process has pid {identity.pid}"
    finally:
        if descriptor is not None:
            os.close(descriptor)
    if reason is not None:
        hint = "list the units with `diloco chaos list`"
        raise RefusedError(f"nothing was signalled: {reason}", hint=hint)


def signal_unit(identity: Identity, signum: int) -> None:
    """As `signal_process`, and then the ranks whose parent that process is."""
    ranks = ranks_of(identity.pid)
    signal_process(identity, signum)
    for facts in ranks:
        _signal_quietly(Identity(facts.pid, facts.start_time, facts.token), signum)


def signal_family(identity: Identity, signum: int) -> int:
    """Signals the processes that the unit left behind with its secret (children that outlived it); how many."""
    if identity.token is None:
        return 0
    count = 0
    for facts in holders_of(identity.token):
        if facts.session != identity.pid or facts.pid == identity.pid:
            continue
        count += _signal_quietly(Identity(facts.pid, facts.start_time, facts.token), signum)
    return count


def _signal_quietly(identity: Identity, signum: int) -> bool:
    """False if the process has ended by now, or may not be signalled."""
    try:
        signal_process(identity, signum)
    except RefusedError:
        return False
    return True
