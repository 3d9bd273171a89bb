"""Trust on first use: the operator's public key that each run's address was first seen with on this machine.

A key file names its operator, so a process with a key asks nobody. One without believes FORMAT.json once, says whose
key that is, and from then on no other: neither another operator nor no signature at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from diloco_cli.digests import digest
from diloco_cli.errors import RefusedError
from diloco_cli.paths import user_state_directory
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.signing import Secret, is_public_key, short_key

MAX_BYTES = 4096


def trust_of(run: RunFormat) -> str:
    """Whom a run trusts, for people."""
    if run.signing is None:
        return "not signed: whoever may write into the bucket is trusted"
    return f"signed: whom the operator's key {short_key(run.signing.operator)} has certified is trusted, as that alone"


def check_operator(run: RunFormat, url: str, secret: Secret | None, tell: Callable[[str], None]) -> None:
    """Raises RefusedError if this address was seen with another operator's key before; `tell` names a new key."""
    path = _path_of(url)
    known, named = _known(path), None if run.signing is None else run.signing.operator
    if secret is not None or known == named:
        if named is not None and known != named:
            _remember(path, url, named)  # the key in use says so
        return
    if known is not None:
        now = "is not signed" if named is None else f"names the operator's key {short_key(named)}"
        raise RefusedError(
            f"run {run.name} {now}, and was seen here with the operator's key {short_key(known)}",
            where=url,
            hint=f"somebody may have replaced FORMAT.json; if a new run is meant to be there: rm {path}",
        )
    assert named is not None
    tell(f"run {run.name} names the operator's key {short_key(named)}: believed, as it is seen here for the first time")
    _remember(path, url, named)


def _path_of(url: str) -> Path:
    return user_state_directory("operators") / f"{digest(url.rstrip('/').encode())}.json"


def _known(path: Path) -> str | None:
    """A file that is absent, torn or foreign says nothing."""
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None
    operator = said.get("operator") if isinstance(said, dict) else None
    return operator if isinstance(operator, str) and is_public_key(operator) else None


def _remember(path: Path, url: str, operator: str) -> None:
    """Where this cannot be written, the next process believes FORMAT.json for the first time again."""
    new = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"url": url, "operator": operator}, file)
        new.replace(path)
