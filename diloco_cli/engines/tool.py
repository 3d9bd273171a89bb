"""The only place that runs a foreign command: with its words, what it reads, and a time limit."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from diloco_cli.environment import environment_with
from diloco_cli.errors import DilocoError, TryAgainError, UsageError, escaped

MAX_SAID = 400  # characters


def tool_directory(name: str) -> Path:
    """Where this command lies. Raises UsageError if there is none here."""
    found = shutil.which(name)
    if found is None:
        raise UsageError(f"there is no command {name} on this machine", hint="do this where the cluster's commands are")
    return Path(found).parent


def run_tool(words: Sequence[str], given: str = "", *, within_s: float, refusal: type[DilocoError]) -> str:
    """What it wrote to stdout. Raises UsageError if it is not here, TryAgainError if it takes too long, and `refusal`,
    with its own words, if it fails."""
    tool_directory(words[0])
    try:
        done = subprocess.run(
            words,
            input=given.encode(),
            capture_output=True,
            timeout=within_s,
            env=environment_with(LC_ALL="C"),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TryAgainError(f"{words[0]} did not answer within {within_s:g} s") from None
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        raise refusal(f"{words[0]}: {_said(done.stderr or done.stdout) or f'ended with status {done.returncode}'}")
    return done.stdout.decode(errors="replace")


def _said(words: bytes) -> str:
    lines = (escaped(line.strip()) for line in words.decode(errors="replace").splitlines() if line.strip())
    return "; ".join(lines)[:MAX_SAID]
