"""The one place that sends signals to processes of a run: to exactly the identified one, or to nobody."""

from __future__ import annotations

import os
import signal
import sys

from diloco_cli.errors import RefusedError
from diloco_cli.runtime.identity import Identity, mismatch
from diloco_cli.runtime.kernel import ancestors, holders_of, read_process


def refusal_to_signal(pid: int, own_pid: int, own_ancestors: tuple[int, ...]) -> str | None:
    """Why no signal may go to `pid`, whoever it is; None if it may. Pure."""
    if pid <= 1:
        return f"pid {pid} is the system or a whole group"
    if pid == own_pid:
        return f"process {pid} is this command itself"
    if pid in own_ancestors:
        return f"process {pid} is an ancestor of this command"
    return None


def signal_process(identity: Identity, signum: int) -> None:
    """Sends `signum` to this very process; RefusedError if it may not be touched, is gone or is a stranger.

    On Linux the pidfd is opened first and the facts are compared after: if they match, the identified process
    has held this pid all along, so the descriptor is its own and no reuse can come between.
    """
    reason = refusal_to_signal(identity.pid, os.getpid(), ancestors(os.getpid()))
    if reason is not None:
        raise RefusedError(f"refused to signal: {reason}")
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        _signal_by_pidfd(identity, signum)
    else:
        _signal_portable(identity, signum)


def signal_family(identity: Identity, signum: int) -> int:
    """Signals what the unit left in its session with its secret (a child that outlived it); how many."""
    if identity.token is None:
        return 0
    count = 0
    for facts in holders_of(identity.token):
        if facts.session != identity.pid or facts.pid == identity.pid:
            continue
        count += _signal_quietly(Identity(facts.pid, facts.start_time, facts.token), signum)
    return count


def _signal_quietly(identity: Identity, signum: int) -> bool:
    """False if it has gone meanwhile, or may not be touched."""
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
    """psutil compares the creation time once more before it signals: a race remains, of microseconds."""
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
    return RefusedError(f"nothing was signalled: {reason}", hint="see who lives with `diloco chaos list`")
