"""Who a process is: a pid, the kernel's start time of that pid, and a secret in its environment.

A bare pid can be a stranger: pids are used again. A command line can be a stranger: anybody can write one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from diloco_cli.errors import TryAgainError
from diloco_cli.runtime.kernel import STOPPED, ProcessFacts, read_process


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
    """Whether this very process runs (or is paused). A zombie is dead."""
    return mismatch(identity, read_process(identity.pid)) is None


def is_paused(identity: Identity) -> bool:
    facts = read_process(identity.pid)
    return mismatch(identity, facts) is None and facts is not None and facts.state == STOPPED


def identity_to_json(identity: Identity) -> dict[str, Any]:
    return {"pid": identity.pid, "start_time": identity.start_time, "token": identity.token}


def identity_from_json(value: Any) -> Identity:
    """Raises ValueError on anything that no release has written."""
    if not isinstance(value, dict):
        raise ValueError("an identity must be an object")
    pid, start_time, token = value.get("pid"), value.get("start_time"), value.get("token")
    if type(pid) is not int or pid <= 1 or not isinstance(start_time, str):
        raise ValueError("an identity needs `pid` > 1 and a text `start_time`")
    if token is not None and not (isinstance(token, str) and token):
        raise ValueError("`token` of an identity must be a text or null")
    return Identity(pid, start_time, token)
