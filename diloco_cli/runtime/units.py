"""Units: which of a run start on this machine, what a person has to start on others, and how their processes are
started: each in a session of its own, with a log, a secret and bounded threads. `Child` is a process that works for the
command that started it and answers in lines of JSON; `start_detached` starts a supervisor that outlives its terminal.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from diloco_cli.clock import monotonic_s, sleep_s, wall_s
from diloco_cli.config.hardware import SITE_KEYS, data_class_of
from diloco_cli.config.settings import RESERVED_NAMES, SyncerSettings
from diloco_cli.environment import environment_value, environment_with
from diloco_cli.errors import DilocoError, NoSpaceError, RunFailedError, TryAgainError, UsageError
from diloco_cli.paths import NO_SPACE_ERRNOS, checked_name, make_directory
from diloco_cli.protocol.log.commit_log import require_keys
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.protocol.log.state import IllegalStateError
from diloco_cli.randomness import new_private_key, nonce
from diloco_cli.runtime.consent import code_of, data_elsewhere, format_digest, signing_secret
from diloco_cli.runtime.processes import TOKEN_VARIABLE, Identity, identify, is_alive
from diloco_cli.runtime.registry import (
    SUPERVISOR,
    UnitRecord,
    cause_environment,
    log_path,
    printable,
    read_resuming,
    read_supervisor,
    run_name,
    store_fault_path,
    write_unit,
)
from diloco_cli.signing import KEY_FILE_VARIABLE, KEY_VARIABLE, LOG, Secret, learner_signer, syncer_signer
from diloco_cli.store.open import FAULT_VARIABLE


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
DRAIN_S = 3.5  # for a learner's last offers after SIGTERM: a machine leaves within 10 s (supervisor.StopPolicy)
JOB_DRAIN_S, JOB_ENDS_S = 20.0, 28.0  # in a job; Slurm usually kills 30 s after its SIGTERM
MAX_LOG_BYTES = 16 * 1024 * 1024
TRY_AGAIN_ERRNOS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE})
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


def learner_unit(name: str, run_url: str, *, threads: int, drain_s: float = DRAIN_S) -> UnitSpec:
    """`--name=VALUE` is one word, so that a value can never become an option."""
    command = diloco_command("learner", f"--drain={drain_s:g}s", f"--run={run_url}", f"--name={name}")
    return UnitSpec(name, "learner", command, thread_environment(threads))


def syncer_units(run_url: str, settings: SyncerSettings, alike: bool = False) -> list[UnitSpec]:
    """The syncer, unless the learners' processes host it, and its standbys. If there are any, a syncer that died comes
    back as a standby. `alike`: instead of them two or more, of which whoever finds no syncer serves, so that an engine
    may take each of them and bring it back."""
    command, threads = diloco_command("syncer", f"--run={run_url}"), thread_environment(1)

    def standby(name: str) -> tuple[str, ...]:
        return (*command, "--standby", f"--name={name}", *(["--alike"] if alike else []))

    names = [f"standby-{i + 1}" for i in range(settings.standbys)]
    if alike and not settings.on_learners:
        names = [f"{SYNCER}-{i}" for i in range(1 + max(1, settings.standbys))]
    standbys = [UnitSpec(name, "syncer", standby(name), threads, later=standby(name)) for name in names]
    if settings.on_learners or alike:
        return standbys
    return [UnitSpec(SYNCER, "syncer", command, threads, later=standby(SYNCER) if standbys else ()), *standbys]


def standing_by(spec: UnitSpec) -> UnitSpec:
    """The same syncer, as one that takes over once none is heard."""
    if "--standby" in spec.command:
        return spec
    command = (*spec.command, "--standby", f"--name={spec.name}")
    return replace(spec, command=command, later=command)


def restarted(spec: UnitSpec, dead_pid: int | None) -> UnitSpec:
    """The same unit after its process `dead_pid` has ended."""
    if not spec.later or dead_pid is None:
        return spec
    return replace(spec, command=(*spec.later, f"--instead-of={dead_pid}"))


def thread_environment(threads: int) -> dict[str, str]:
    """Bounds the threads of numeric libraries, which would otherwise use every core in every unit."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


LOCAL = "local"
ENGINES = frozenset(SITE_KEYS)  # to which `launch` submits


@dataclass(frozen=True)
class RunUnit:
    """One process that the run consists of, with what starts it: `infra` as in an inventory. `island`: of a learner;
    `url`: of the bucket that it works with."""

    spec: UnitSpec
    infra: str
    url: str
    island: Island | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_submitted(self) -> bool:
        return is_submitted(self.infra)

    def signers(self, run: RunFormat) -> tuple[str, ...]:
        """As whom it signs."""
        return (syncer_signer(self.name),) if self.island is None else signers_on(run, self.name)


def is_submitted(infra: str) -> bool:
    """Whether `launch` submits it to an engine."""
    kind, _, place = infra.partition("/")
    return kind in ENGINES and place != ""


def units_of(run: RunFormat, url: str, region: str | None = None, syncer_here: bool = False) -> list[RunUnit]:
    """What the run, or its `region`, consists of, but for what its owners start by hand (`starts_elsewhere`). Where
    islands are jobs, so are the syncers, unless `syncer_here`: a machine that submits may be switched off."""
    regions = sorted({island.region for island in run.islands} | {syncer_region(run)})
    if region is not None and region not in regions:
        raise UsageError(f"run {run.name} has no region {region!r}; it has: {', '.join(regions)}")
    home, found = run.home_of(url), []
    for island in run.islands:
        if region in (None, island.region) and (island.infra == LOCAL or is_submitted(island.infra)):
            place, threads = run.url_for(island.region, home), threads_of(island, run.settings.train.threads)
            drain_s = JOB_DRAIN_S if is_submitted(island.infra) else DRAIN_S
            spec = learner_unit(island.name, place, threads=threads, drain_s=drain_s)
            found.append(RunUnit(spec, island.infra, place, island))
    if region in (None, syncer_region(run)):
        places = [LOCAL] if syncer_here else _syncers_infra(run, region)
        specs = syncer_units(home, run.settings.syncer, alike=places != [LOCAL])
        found += [RunUnit(spec, places[i % len(places)], home) for i, spec in enumerate(specs)]
    return found


def _syncers_infra(run: RunFormat, region: str | None) -> list[str]:
    """Those of the islands that are jobs here, in the syncer's region first: one syncer in each, so that an engine that
    takes a whole partition away takes one syncer alone. `region`: the only one whose partitions this cluster has."""
    jobs = [island for island in run.islands if is_submitted(island.infra) and region in (None, island.region)]
    jobs.sort(key=lambda island: island.region != syncer_region(run))
    return list(dict.fromkeys(island.infra for island in jobs)) or [LOCAL]


def units_here(
    run: RunFormat, url: str, region: str | None, warn: Callable[[str], None], syncer_here: bool = False
) -> list[UnitSpec]:  # fmt: skip
    """Those of `region` (or of all regions) that start on this machine: the learners of local islands, and the syncers,
    unless they are jobs."""
    planned = units_of(run, url, region, syncer_here)
    here = [unit for unit in planned if unit.infra == LOCAL]
    if not planned:
        raise UsageError(f"no island of region {region} runs on this machine (infra: local)")
    secret = signing_secret()
    signers = [LOG if unit.island is None else learner_signer(unit.name) for unit in here]
    given = secret is None or not secret.is_operators
    require_keys(run, secret, tuple(dict.fromkeys(signers)) if given else (), url)
    islands = [unit.island for unit in here if unit.island is not None]
    visible = environment_value("CUDA_VISIBLE_DEVICES")
    devices = dict(zip([island.name for island in islands], devices_of(islands, warn, visible), strict=True))
    units = []
    for unit in here:
        own = {**devices.get(unit.name, {}), **keys_of(run, unit.signers(run), secret)}
        units.append(replace(unit.spec, environment={**unit.spec.environment, **own}))
    return units


def starts_elsewhere(run: RunFormat, url: str, region: str | None) -> Iterator[str]:
    """What a person has to start on other machines, with its command: one line each."""
    home = run.home_of(url)
    for island in run.islands:
        by_hand = island.infra != LOCAL and not is_submitted(island.infra)
        if by_hand and region in (None, island.region):
            yield from _begins(run, island, run.url_for(island.region, home))
    syncers = None if run.settings.syncer.on_learners else syncer_region(run)
    regions = {island.region for island in run.islands} | ({syncers} if syncers else set())
    for other in sorted(regions - {region}) if region is not None else ():
        serves = other == syncers
        there = run.url_for(other, home)
        words = f"{there} --region {other}{_consent(run, there, stores=serves)}"
        yield f"region {other}{', with the syncer' if serves else ''}: unless it runs already: diloco resume {words}"


def starts_everywhere(run: RunFormat, url: str) -> Iterator[str]:
    """The same of a run of which nothing runs yet: its jobs, its syncer, unless learners host it, and its islands."""
    home, units = run.home_of(url), units_of(run, url)
    jobs = [unit.name for unit in units if unit.is_submitted]
    if jobs:
        yield f"the jobs {', '.join(jobs)}, where they are submitted: diloco resume {home}"
    if any(unit.infra == LOCAL and unit.island is None for unit in units) and not run.settings.syncer.on_learners:
        words = _consent(run, home, stores=True)
        yield f"the syncer, anywhere: diloco syncer --run {home}{words if run.regions else ''}"
        if words and not run.regions and run.settings.model.is_built:
            yield f"  with{words} where the model's code and its data are: then it has evaluations"
        yield from _key_of(run, home, "syncer", "NAME")
    for island in run.islands:
        if island.name not in jobs:
            yield from _begins(run, island, run.url_for(island.region, home))


def own_start(name: str, url: str) -> str:
    """How an island of an own loop takes part."""
    return f'in its own script: join("{url}", name="{name}", ...)'


def _begins(run: RunFormat, island: Island, url: str) -> Iterator[str]:
    yield from _started(run, island, url)
    yield from _key_of(run, url, "learner", island.name)


def _key_of(run: RunFormat, url: str, role: str, name: str) -> Iterator[str]:
    if run.signing is not None:
        yield f"  with a key of its own, made there: diloco key request {url} {role} {name} FILE"


def _started(run: RunFormat, island: Island, url: str) -> Iterator[str]:
    if data_class_of(island.infra) is not None:
        yield f"{island.name} ({island.infra}): {own_start(island.name, url)}"
        return
    words = f"--run {url} --name {island.name}"
    words += _consent(run, url, stores=run.settings.syncer.on_learners)
    yield f"{island.name} ({island.infra}): start it there: diloco learner {words}"
    if island.nodes > 1:
        yield (
            f"  on each of its {island.nodes} nodes, with --nodes {island.nodes} --node-rank 0 (1, ...) and"
            " --rendezvous HOST:PORT of node 0 in its private network; or by"
            " torchrun ... -m -- diloco_cli learner ..."
        )


def _consent(run: RunFormat, url: str, *, stores: bool) -> str:
    return "".join(f" {word}" for word in consent_words(run, url, stores=stores))


def consent_words(run: RunFormat, url: str, *, stores: bool) -> tuple[str, ...]:
    """The words by which another machine consents to what the run's format names, if the process there needs any."""
    needed = code_of(run.settings) or data_elsewhere(run, url) or (stores and run.regions)
    return ("--allow-code", format_digest(run)) if needed else ()


def syncer_may_start(run: RunFormat, units: list[UnitSpec]) -> bool:
    """Whether one of these units serves the run, now or after a takeover."""
    return run.settings.syncer.on_learners or any(unit.kind == "syncer" for unit in units)


def syncer_region(run: RunFormat) -> str:
    """Where `--region` starts the syncer: the home region, or the first one if none is named."""
    return run.home_region or min(island.region for island in run.islands)


def is_of_cores(island: Island) -> bool:
    return island.accelerator.lower() == "cpu"


def threads_of(island: Island, at_least: int) -> int:
    """The number of threads of each rank of an island: cpu:4 means four cores for all of them."""
    if not is_of_cores(island):
        return at_least
    return max(1, max(at_least, island.num_accelerators) // island.ranks)


def devices_of(islands: list[Island], warn: Callable[[str], None], given: str | None) -> list[dict[str, str]]:
    """Environments that give each of several CUDA islands of one machine devices of its own, one a rank, in order.
    `given`: its CUDA_VISIBLE_DEVICES; None: it has as many as they need. Raises UsageError if an island's ranks
    outnumber the visible devices: ranks cannot share one."""
    cuda = [island for island in islands if not island.accelerator.lower().startswith(("cpu", "mps", "apple"))]
    wanted = sum(island.ranks for island in cuda)
    if len(cuda) < 2 and (given is None or wanted < 2):
        return [{} for _ in islands]
    visible = (given or ",".join(map(str, range(wanted)))).split(",")
    if len(visible) < wanted:
        _refuse_shared(cuda, len(visible))
        warn(f"{len(cuda)} islands share {len(visible)} visible devices")
    environments, first = {}, 0
    for island in cuda:
        own = [visible[(first + rank) % len(visible)] for rank in range(island.ranks)]
        environments[island.name], first = {"CUDA_VISIBLE_DEVICES": ",".join(own)}, first + island.ranks
    return [environments.get(island.name, {}) for island in islands]


def _refuse_shared(cuda: list[Island], num_visible: int) -> None:
    several = [island for island in cuda if island.ranks > 1]
    if several:
        wanted = ", ".join(f"{island.name} {island.ranks}" for island in cuda)
        raise UsageError(
            f"more devices are asked for than the {num_visible} in CUDA_VISIBLE_DEVICES: {wanted}",
            hint="each rank needs one: list fewer accelerators, or put an island elsewhere (infra: ssh)",
        )


def keys_of(run: RunFormat, signers: tuple[str, ...], secret: Secret | None) -> dict[str, str]:
    """A unit of a signed run, started on the operator's machine, gets a new key in place of the operator's secret."""
    if run.signing is None or secret is None or not secret.is_operators:
        return {}
    own = new_private_key()
    return {KEY_VARIABLE: secret.certified(run.run_id, dict.fromkeys(signers, own)), KEY_FILE_VARIABLE: ""}


def signers_on(run: RunFormat, learner: str) -> tuple[str, ...]:
    """As whom the machine of a learner signs: as the learner, and as a syncer if it hosts one."""
    return (learner_signer(learner), *([syncer_signer(learner)] if run.settings.syncer.on_learners else []))


def start_unit(url: str, spec: UnitSpec) -> tuple[subprocess.Popen[bytes], UnitRecord]:
    """Starts the unit and notes its identity. It outlives this process: the next supervisor adopts it.

    If this process dies between the two, the unit is not registered; its successor fences it off in the bucket.
    """
    token = nonce()
    fault = {FAULT_VARIABLE: str(store_fault_path(url, spec.name))}
    environment = {**spec.environment, **cause_environment(url, spec.name), **fault, TOKEN_VARIABLE: token}
    child = spawn(url, spec.name, spec.command, environment)
    try:
        record = UnitRecord(spec.name, spec.kind, identify(child.pid, token), wall_s())
        write_unit(url, record)
    except BaseException:
        child.kill()
        child.wait()
        raise
    return child, record


def spawn(url: str, log_name: str, command: tuple[str, ...], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process in a session of its own, reading nothing, appending what it prints to its log."""
    path = log_path(url, log_name)
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


def start_detached(url: str, command: tuple[str, ...], environment: Mapping[str, str] = {}) -> Identity:
    """Starts `command`, which must call `supervise`, in a session of its own, with `environment` added; returns once
    it has registered.

    If it ended instead, raises the error that it reported, with the same exit status. If it is too slow, ends it and
    raises TryAgainError.
    """
    offset = _log_size(url)
    child = spawn(url, SUPERVISOR, command, {**environment, TOKEN_VARIABLE: nonce()})
    deadline_s = monotonic_s() + REGISTERS_WITHIN_S
    while monotonic_s() < deadline_s:
        identity = read_supervisor(url)
        if identity is not None and identity.pid == child.pid and is_alive(identity):
            return identity
        if child.poll() is not None:
            raise _ended(url, child.returncode, offset)
        sleep_s(POLL_S)
    child.kill()
    child.wait()
    raise TryAgainError(
        f"the supervisor of run {run_name(url)} did not register within {REGISTERS_WITHIN_S:g} s, and was ended",
        where=str(log_path(url, SUPERVISOR)),
        hint=f"read `diloco logs {SUPERVISOR} --run {url}`, or launch without --detach",
    )


def start_successor(url: str) -> Identity:
    """`diloco resume` in the background, as the last supervision here was asked for."""
    noted = read_resuming(url)
    return start_detached(url, diloco_command("resume", url, *noted.words), noted.environment)


def _log_size(url: str) -> int:
    path = log_path(url, SUPERVISOR)
    return path.stat().st_size if path.exists() else 0


def _ended(url: str, status: int, offset: int) -> DilocoError:
    path = log_path(url, SUPERVISOR)
    # A log that is shorter than before was rotated: all its lines are this supervisor's.
    start = offset if _log_size(url) >= offset else 0
    with path.open("rb") as log:
        log.seek(max(start, _log_size(url) - QUOTED_LOG_BYTES))
        words = log.read(QUOTED_LOG_BYTES)
    lines = [printable(line) for line in words.split(b"\n") if line.strip()]
    error, hint = _last(lines, "error:"), _last(lines, "hint:")
    kinds = {kind.exit_status: kind for kind in DilocoError.__subclasses__() if "exit_status" in vars(kind)}
    return kinds.get(status, RunFailedError)(
        f"the supervisor of run {run_name(url)} ended with status {status} before it registered: "
        + (error or (lines[-1] if lines else "it said nothing")),
        where=str(path),
        hint=hint or f"read `diloco logs {SUPERVISOR} --run {url}`",
    )


def _last(lines: list[str], word: str) -> str | None:
    """The text behind `word` on the last line that begins with it."""
    return next((line[len(word) :].strip() for line in reversed(lines) if line.startswith(word)), None)
