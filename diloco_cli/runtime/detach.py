"""Starts a supervisor that outlives its terminal."""

from __future__ import annotations

from collections.abc import Mapping

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.errors import DilocoError, RunFailedError, TryAgainError
from diloco_cli.randomness import nonce
from diloco_cli.runtime.identity import Identity, is_alive
from diloco_cli.runtime.kernel import TOKEN_VARIABLE
from diloco_cli.runtime.logs import printable
from diloco_cli.runtime.registry import SUPERVISOR, log_path, read_supervisor
from diloco_cli.runtime.units import spawn

POLL_S = 0.05
REGISTERS_WITHIN_S = 30.0
QUOTED_LOG_BYTES = 2000


def start_detached(run: str, command: tuple[str, ...], environment: Mapping[str, str] = {}) -> Identity:
    """Starts `command`, which must call `supervise`, in a session of its own, with `environment` added; returns once
    it has registered.

    If it ended instead, raises the error that it reported, with the same exit status. If it is too slow, ends it and
    raises TryAgainError.
    """
    offset = _log_size(run)
    child = spawn(run, SUPERVISOR, command, {**environment, TOKEN_VARIABLE: nonce()})
    deadline_s = monotonic_s() + REGISTERS_WITHIN_S
    while monotonic_s() < deadline_s:
        identity = read_supervisor(run)
        if identity is not None and identity.pid == child.pid and is_alive(identity):
            return identity
        if child.poll() is not None:
            raise _ended(run, child.returncode, offset)
        sleep_s(POLL_S)
    child.kill()
    child.wait()
    raise TryAgainError(
        f"the supervisor of run {run} did not register within {REGISTERS_WITHIN_S:g} s, and was ended",
        where=str(log_path(run, SUPERVISOR)),
        hint=f"read `diloco logs {SUPERVISOR} --run {run}`, or launch without --detach",
    )


def _log_size(run: str) -> int:
    path = log_path(run, SUPERVISOR)
    return path.stat().st_size if path.exists() else 0


def _ended(run: str, status: int, offset: int) -> DilocoError:
    path = log_path(run, SUPERVISOR)
    # A log that is shorter than before was rotated: all its lines are this supervisor's.
    start = offset if _log_size(run) >= offset else 0
    with path.open("rb") as log:
        log.seek(max(start, _log_size(run) - QUOTED_LOG_BYTES))
        words = log.read(QUOTED_LOG_BYTES)
    lines = [printable(line) for line in words.split(b"\n") if line.strip()]
    error, hint = _last(lines, "error:"), _last(lines, "hint:")
    kinds = {kind.exit_status: kind for kind in DilocoError.__subclasses__() if "exit_status" in vars(kind)}
    return kinds.get(status, RunFailedError)(
        f"the supervisor of run {run} ended with status {status} before it registered: "
        + (error or (lines[-1] if lines else "it said nothing")),
        where=str(path),
        hint=hint or f"read `diloco logs {SUPERVISOR} --run {run}`",
    )


def _last(lines: list[str], word: str) -> str | None:
    """The text behind `word` on the last line that begins with it."""
    return next((line[len(word) :].strip() for line in reversed(lines) if line.startswith(word)), None)
