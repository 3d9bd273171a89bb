"""Units and how their processes are started: each in a session of its own, with a log, a secret and bounded threads.

A unit's states, and every allowed transition, are one table. `Child` is a process that works for the command that
started it and answers in lines of JSON; `start_detached` starts a supervisor that outlives its terminal.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from diloco_cli.clock import monotonic_s, sleep_s, wall_s
from diloco_cli.config.settings import RESERVED_NAMES, SyncerSettings
from diloco_cli.environment import environment_with
from diloco_cli.errors import DilocoError, NoSpaceError, RunFailedError, TryAgainError, UsageError
from diloco_cli.protocol.log.state import IllegalStateError
from diloco_cli.randomness import nonce
from diloco_cli.runtime.files import NO_SPACE_ERRNOS, checked_name, make_directory
from diloco_cli.runtime.logs import printable
from diloco_cli.runtime.processes import TOKEN_VARIABLE, Identity, identify, is_alive
from diloco_cli.runtime.registry import SUPERVISOR, UnitRecord, log_path, read_supervisor, write_unit
from diloco_cli.runtime.restart import cause_environment


def python_command(module: str, *words: str) -> tuple[str, ...]:
    """`python -m MODULE WORD...` that imports nothing from the working directory, which may be a stranger's."""
    return (sys.executable, "-P", "-m", module, *words)


def diloco_command(*words: str) -> tuple[str, ...]:
    return python_command("diloco_cli", *words)


class Child:
    """`python -m MODULE WORD...`, which ends by itself at the end of its stdin: see `end_all`. `apart`: in a session of
    its own, so that only the parent gets Ctrl-C, and without stderr. `env`: added to the present environment."""

    def __init__(self, module: str, *words: str, apart: bool = False, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            python_command(module, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if apart else None,
            text=True,
            env=environment_with(**(env or {})),
            start_new_session=apart,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def tell(self, message: object) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the missing answer shows that
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def answer(self, within_s: float) -> Any:
        """The value in its next line, None if it has ended. Raises TimeoutError."""
        try:
            line = self._lines.get(timeout=max(0.0, within_s))
        except queue.Empty:
            raise TimeoutError(f"no answer within {within_s:.0f} s") from None
        return json.loads(line) if line else None

    def end(self, within_s: float) -> None:
        """Close its stdin, wait, and kill it if it does not end."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        self.process.kill()
        self.process.wait()
        self._listener.join(within_s)  # longer only if a child of its own holds the pipe

    def _listen(self) -> None:
        """Queue every line of its stdout, and an empty one when it has ended."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")


def end_all(children: Sequence[Child], within_s: float) -> None:
    """End all these children, by killing those that do not end in time."""
    for child in children:
        assert child.process.stdin is not None
        with suppress(OSError):
            child.process.stdin.close()
    for child in children:
        child.end(within_s)


Kind = Literal["learner", "syncer"]
SYNCER = "syncer"
DRAIN_S = 3.5  # for a learner's last offers after SIGTERM: a machine leaves within 10 s (ending.StopPolicy)
MAX_LOG_BYTES = 16 * 1024 * 1024
TRY_AGAIN_ERRNOS = frozenset({11, 12, 23, 24})  # EAGAIN, ENOMEM, ENFILE, EMFILE
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class UnitSpec:
    """One process to keep alive. `environment` is added to this process's own.

    `later`: the command after it has died here, if that differs: a syncer comes back as a standby, because another one
    may have taken over. The dead process's pid is added, so that the standby need not wait for it to fall silent."""

    name: str
    kind: Kind
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    later: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checked_name(self.name, f"name of a {self.kind}")
        if self.kind == "learner" and self.name in RESERVED_NAMES:
            raise UsageError(f"a learner cannot be named {self.name}: reserved are syncer and supervisor")


def learner_unit(name: str, run_url: str, *, threads: int) -> UnitSpec:
    """A learner's unit. `--name=VALUE` is one word, so that a value can never become an option."""
    command = diloco_command("learner", f"--drain={DRAIN_S:g}s", f"--run={run_url}", f"--name={name}")
    return UnitSpec(name, "learner", command, thread_environment(threads))


def syncer_unit(run_url: str, *, threads: int) -> UnitSpec:
    command = diloco_command("syncer", f"--run={run_url}")
    return UnitSpec(SYNCER, "syncer", command, thread_environment(threads))


def standby_unit(name: str, run_url: str, *, threads: int) -> UnitSpec:
    command = (*syncer_unit(run_url, threads=threads).command, "--standby", f"--name={name}")
    return UnitSpec(name, "syncer", command, thread_environment(threads), later=command)


def syncer_units(run_url: str, settings: SyncerSettings, *, threads: int) -> list[UnitSpec]:
    """The syncer, unless the learners' processes host it, and its standbys. If there are any, a syncer that died comes
    back as a standby."""
    standbys = [standby_unit(f"standby-{i + 1}", run_url, threads=threads) for i in range(settings.standbys)]
    if settings.on_learners:
        return standbys
    syncer = syncer_unit(run_url, threads=threads)
    later = standby_unit(SYNCER, run_url, threads=threads).command if standbys else ()
    return [replace(syncer, later=later), *standbys]


def restarted(spec: UnitSpec, dead_pid: int | None) -> UnitSpec:
    """The same unit after its process `dead_pid` has ended."""
    if not spec.later or dead_pid is None:
        return spec
    return replace(spec, command=(*spec.later, f"--instead-of={dead_pid}"))


def thread_environment(threads: int) -> dict[str, str]:
    """Bounds the threads of numeric libraries, which would otherwise use every core in every unit."""
    if threads < 1:
        raise UsageError(f"threads of a unit must be at least 1, got {threads}")
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def start_unit(run: str, spec: UnitSpec) -> tuple[subprocess.Popen[bytes], UnitRecord]:
    """Starts the unit and notes its identity. It outlives this process: the next supervisor adopts it.

    If this process dies between the two, the unit is not registered; its successor fences it off in the bucket.
    """
    token = nonce()
    environment = {**spec.environment, **cause_environment(run, spec.name), TOKEN_VARIABLE: token}
    child = spawn(run, spec.name, spec.command, environment)
    try:
        record = UnitRecord(spec.name, spec.kind, identify(child.pid, token), wall_s())
        write_unit(run, record)
    except BaseException:
        child.kill()
        child.wait()
        raise
    return child, record


def spawn(run: str, log_name: str, command: tuple[str, ...], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process in a session of its own, reading nothing, appending what it prints to its log."""
    path = log_path(run, log_name)
    try:
        make_directory(path.parent)
        bound_log(path)
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_with(PYTHONUNBUFFERED="1", **environment),
                start_new_session=True,
            )
    except OSError as error:
        raise _cannot_start(log_name, command, error) from error


def _cannot_start(name: str, command: tuple[str, ...], error: OSError) -> DilocoError:
    message = f"{name} cannot be started: {error.strerror}"
    if error.errno in NO_SPACE_ERRNOS:
        return NoSpaceError(message)
    if error.errno in TRY_AGAIN_ERRNOS:
        return TryAgainError(message)
    return RunFailedError(message, where=command[0])


def bound_log(path: Path) -> None:
    """A log that grew too large becomes `<name>.log.1` and begins anew, even while its process lives: that one only
    appends, so it writes on at the new end. What it writes in between is lost."""
    if not path.exists() or path.stat().st_size <= MAX_LOG_BYTES:
        return
    with suppress(OSError):  # on a full disk the old lines are dropped
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    os.truncate(path, 0)


class UnitState(StrEnum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    BACKOFF = "BACKOFF"
    HELD = "HELD"
    DONE = "DONE"
    FAILED = "FAILED"


class UnitEvent(StrEnum):
    SPAWNED = "spawned"  # its process was started, or a living one was adopted
    DIED = "died"  # it ended and will be started again
    FINISHED = "finished"  # it ended and need not be started again
    GAVE_UP = "gave up"  # it ended too often
    DUE = "due"  # its backoff is over
    HOLD = "hold"  # it is to stay down
    RELEASED = "released"  # it may be started again
    RUN_OVER = "run over"  # the run ended or is being stopped


TRANSITIONS: dict[tuple[UnitState, UnitEvent], UnitState] = {
    (UnitState.STARTING, UnitEvent.SPAWNED): UnitState.RUNNING,
    (UnitState.STARTING, UnitEvent.DIED): UnitState.BACKOFF,
    (UnitState.STARTING, UnitEvent.GAVE_UP): UnitState.FAILED,
    (UnitState.STARTING, UnitEvent.HOLD): UnitState.HELD,
    (UnitState.STARTING, UnitEvent.RUN_OVER): UnitState.DONE,
    (UnitState.RUNNING, UnitEvent.DIED): UnitState.BACKOFF,
    (UnitState.RUNNING, UnitEvent.HOLD): UnitState.HELD,
    (UnitState.RUNNING, UnitEvent.FINISHED): UnitState.DONE,
    (UnitState.RUNNING, UnitEvent.GAVE_UP): UnitState.FAILED,
    (UnitState.BACKOFF, UnitEvent.DUE): UnitState.STARTING,
    (UnitState.BACKOFF, UnitEvent.HOLD): UnitState.HELD,
    (UnitState.BACKOFF, UnitEvent.RUN_OVER): UnitState.DONE,
    (UnitState.HELD, UnitEvent.RELEASED): UnitState.STARTING,
    (UnitState.HELD, UnitEvent.RUN_OVER): UnitState.DONE,
}
LAST_STATES = frozenset({UnitState.DONE, UnitState.FAILED})


def next_state(state: UnitState, event: UnitEvent) -> UnitState:
    """The state after the event. Raises IllegalStateError for a transition that the table does not have."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalStateError(f"a unit cannot go on from {state} when {event}") from None


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
