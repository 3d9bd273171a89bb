"""The only place that runs a foreign command: with its words, what it reads, a time limit, and on which host."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from diloco_cli.environment import environment_value, environment_with
from diloco_cli.errors import DilocoError, TryAgainError, UsageError, escaped

MAX_SAID = 400  # characters
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@%+-]{0,252}")  # it may come from a bucket: never an option of ssh
SSH_FAILED = 255
SSH_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ForwardAgent": "no",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
}
CONFIG_WITHIN_S = 1.0  # to read it, which may ask commands of the user
SHARES_FOR_S = 300  # the next call finds the connection open
MAX_SOCKET = 45  # characters of its folder: ssh adds 58, and a socket's path has at most 107


def tool_directory(name: str) -> Path:
    """Where this command lies. Raises UsageError if there is none here."""
    found = shutil.which(name)
    if found is None:
        hint = "do this where the cluster's commands are"
        hint += "; or reach them by ssh: `via` of a site" if name.startswith("s") and name != "ssh" else ""
        raise UsageError(f"there is no command {name} on this machine", hint=hint)
    return Path(found).parent


def over_ssh(host: str, words: Sequence[str], login: bool = True) -> tuple[str, ...]:
    """The command that runs these words on this host: by the user's own ssh and its config, one connection for many
    calls. `login`: in a login shell, which knows the user's commands, and may take a second or two. What a login prints
    or reads is none of it. Raises UsageError for what is no host."""
    if not HOST.fullmatch(host):
        raise UsageError(f"{host[:MAX_SAID]!a} is no host", hint="infra: ssh/HOST, as in `ssh HOST`")
    options = {**SSH_OPTIONS, **_shared(host)}
    inside = f"export LC_ALL=C; exec {shlex.join(words)} >&3 <&4 3>&- 4<&-"
    there = shlex.join(("sh", "-c", f'exec bash -{"l" * login}c "$0" 3>&1 4<&0 > /dev/null < /dev/null', inside))
    return ("ssh", "-T", *(f"-o{name}={value}" for name, value in options.items()), "--", host, f"exec {there}")


@cache
def _shared(host: str) -> dict[str, str]:
    """How connections are shared, unless the user's config says it: a person may have logged in there by a second
    factor, and only that connection gets in."""
    tool_directory("ssh")
    try:
        asked = subprocess.run(
            ("ssh", "-G", "--", host), capture_output=True, text=True, check=False, timeout=CONFIG_WITHIN_S
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    own = re.search(r"^controlpath (.+)$", asked.stdout, re.M)
    folder = Path(environment_value("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"diloco-ssh-{os.getuid()}"
    if (own is not None and own[1] != "none") or len(str(folder)) > MAX_SOCKET or not _is_private(folder):
        return {}
    return {"ControlMaster": "auto", "ControlPath": f"{folder}/%C", "ControlPersist": f"{SHARES_FOR_S}"}


def _is_private(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and found.st_mode & 0o170_077 == 0o040_000


def run_tool(
    words: Sequence[str],
    given: str = "",
    *,
    within_s: float,
    refusal: type[DilocoError],
    via: str | None = None,
    login: bool = True,
) -> str:
    """What it wrote to stdout. Raises UsageError if it is not here, TryAgainError if it takes too long, and `refusal`,
    with its own words, if it fails. `via`: the host on which it runs, `login` there."""
    name = words[0] if via is None else f"ssh {via}"
    called = words if via is None else over_ssh(via, words, login)
    tool_directory(called[0])
    try:
        with tempfile.TemporaryFile() as said:  # a connection that stays for the next call may hold it open
            done = subprocess.run(
                called,
                input=given.encode(),
                stdout=subprocess.PIPE,
                stderr=said,
                timeout=within_s,
                env=environment_with(LC_ALL="C"),
                check=False,
            )
            said.seek(0)
            errors = said.read()
    except subprocess.TimeoutExpired:
        raise TryAgainError(f"{name} did not answer within {within_s:g} s") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be run: {error.strerror}") from None
    if via is not None and done.returncode == SSH_FAILED:
        raise refusal(f"{name}: {_said(errors, last=2)}", hint=f"what ssh itself says: ssh {via} true")
    if done.returncode != 0:
        raise refusal(f"{name}: {_said(errors or done.stdout) or f'ended with status {done.returncode}'}")
    return done.stdout.decode(errors="replace")


def start_tool(words: Sequence[str], errors: Path) -> subprocess.Popen[bytes]:
    """It prints until its stdin is closed. What it says to stderr is in the file `errors`."""
    tool_directory(words[0])
    pipe = subprocess.PIPE
    with errors.open("wb") as said:
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=said, start_new_session=True)


def _said(words: bytes, last: int = 0) -> str:
    """On one line. `last`: only so many lines, where a server's banner comes before what matters."""
    lines = [escaped(line.strip()) for line in words.decode(errors="replace").splitlines() if line.strip()]
    return "; ".join(lines[-last:])[:MAX_SAID]
