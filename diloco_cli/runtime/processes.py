"""Processes of this machine: the kernel's facts, the identity of a process, and signals to it.

An identity is a pid, the kernel's start time of that pid, and a secret in the environment: pids are reused, and any
process may have the same command line. Only this module sends signals to processes of a run: to the identified process,
or to none.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_cli.errors import RefusedError, TryAgainError

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


def identity_to_json(identity: Identity) -> dict[str, Any]:
    return {"pid": identity.pid, "start_time": identity.start_time, "token": identity.token}


def identity_from_json(value: Any) -> Identity:
    """The identity in a JSON value. Raises ValueError for a value that no release has written."""
    if not isinstance(value, dict):
        raise ValueError("an identity must be an object")
    pid, start_time, token = value.get("pid"), value.get("start_time"), value.get("token")
    if type(pid) is not int or pid <= 1 or not isinstance(start_time, str):
        raise ValueError("an identity needs `pid` > 1 and a text `start_time`")
    if token is not None and not (isinstance(token, str) and token):
        raise ValueError("`token` of an identity must be a text or null")
    return Identity(pid, start_time, token)


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
    has held this pid all the time, so the descriptor is its own, and a reused pid cannot get the signal.
    """
    reason = refusal_to_signal(identity.pid, os.getpid(), ancestors(os.getpid()))
    if reason is not None:
        raise RefusedError(f"refused to signal: {reason}")
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        _signal_by_pidfd(identity, signum)
    else:
        _signal_portable(identity, signum)


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


def _signal_by_pidfd(identity: Identity, signum: int) -> None:
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        raise _stranger(f"no process has pid {identity.pid}") from None
    try:
        reason = mismatch(identity, read_process(identity.pid))
        if reason is not None:
            raise _stranger(reason)
        signal.pidfd_send_signal(descriptor, signum)
    except ProcessLookupError:
        raise _stranger(f"process {identity.pid} ended just now") from None
    finally:
        os.close(descriptor)


def _signal_portable(identity: Identity, signum: int) -> None:
    """psutil compares the creation time once more before it signals: a race of microseconds remains."""
    import psutil

    try:
        process = psutil.Process(identity.pid)
        reason = mismatch(identity, read_process(identity.pid))
        if reason is not None:
            raise _stranger(reason)
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        raise _stranger(f"no process has pid {identity.pid}") from None


def _stranger(reason: str) -> RefusedError:
    return RefusedError(f"nothing was signalled: {reason}", hint="list the units with `diloco chaos list`")
