"""`diloco unit`: what a job runs. The supervisor of one unit, inside the job: a crash is treated alike everywhere, and
an engine need only bring back what it took away itself. How it ends: engines/port.py."""

from __future__ import annotations

import glob
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import FrameType
from typing import Annotated, NoReturn, TypeVar

import typer

from diloco_cli.cli.arguments import AllowCode, AllowStore, OpenRun, head_of, named_here, open_run
from diloco_cli.cli.jobs import ASKED_WITHIN_S
from diloco_cli.cli.output import talk
from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.engines.port import AGAIN_STATUS
from diloco_cli.engines.slurm import Slurm, queue_again, step
from diloco_cli.environment import environment_value, set_environment
from diloco_cli.errors import DilocoError, UsageError
from diloco_cli.learner.parent import PARENT_VARIABLE
from diloco_cli.protocol.actors.requests import is_at_rest
from diloco_cli.runtime.consent import NamedHere, consented, stores_of
from diloco_cli.runtime.registry import living_supervisor, log_path
from diloco_cli.runtime.restart import Exit, RestartPolicy, decide
from diloco_cli.runtime.supervisor import Asking, SignalCount, SupervisionResult, supervise
from diloco_cli.runtime.units import (
    JOB_ENDS_S,
    RunUnit,
    UnitSpec,
    consent_words,
    diloco_command,
    syncer_may_start,
    units_of,
)
from diloco_cli.signing import KEY_FILE_VARIABLE
from diloco_cli.store.retry import gone_after_s

LOOKS_EVERY_S = 5.0  # the unit itself follows the log far closer
HEARS_EVERY_S = 0.2
HASTENS_EVERY_S = 10.0
Result = TypeVar("Result")


class Notices(SignalCount):
    """As `SignalCount`; an engine tells a job to leave as often as it likes, and kills it once its grace is over.
    SIGUSR2: the job's time will be up soon; `is_cancelled`: another one says that the job itself is to end."""

    signals = (*SignalCount.signals, signal.SIGUSR2)
    is_cancelled = False

    def __enter__(self) -> SignalCount:
        signal.signal(signal.SIGUSR2, self._hear)  # until now it was ignored, as the script says
        return super().__enter__()

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.is_cancelled |= signum != signal.SIGUSR2
        if self.count == 0:
            super()._hear(signum, frame)


def unit(
    name: str = typer.Argument(..., metavar="NAME", help="Of an island, or of a syncer that is a job."),
    run: str = typer.Option(..., "--run", help="URL of the run's bucket and prefix."),
    allow_code: list[str] = AllowCode,
    allow_store: list[str] = AllowStore,
    beside: list[str] = typer.Argument(None, metavar="[-- COMMAND...]", help="For one that is alive: act beside it."),
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the nodes of its island meet, each of which runs this command."),
    ] = None,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of them this is.")] = 0,
) -> None:
    """Keep one unit of a run alive inside a job, until the run is over or the job has to leave."""
    if beside:
        _act_beside(name, run, beside)
    here, heard = named_here(allow_code, allow_store), Notices()
    with heard, TemporaryDirectory(prefix=_prefix(name)) as folder:
        in_job = environment_value("DILOCO_HOME") is None
        if in_job:  # on the node: a home that nodes share would mix the processes and locks of all of them up
            set_environment("XDG_STATE_HOME", folder)
        found = _patiently(lambda: _looked_up(run), heard)
        if found is None:
            outcome = SupervisionResult("left", heard.first)
        else:
            opened, over = found
            chosen = _chosen(opened, name)
            if over is not None:
                talk(f"run {opened.name} is {over}")
                _forget_key(name)
                return
            if in_job:
                _log_to_stdout(opened.url, name)
            outcome = _keep_alive(opened, _in_job(opened, chosen, rendezvous, node_rank), here, heard)
        status = outcome.exit_status
        if outcome.reason == "interrupted":  # the run was over before the signal came
            status = 0
        elif outcome.reason == "left" and heard.first == signal.SIGUSR2 and not heard.is_cancelled:
            status = AGAIN_STATUS
            _queue_again()
    if status == 0:
        _forget_key(name)
    sys.exit(status)


def _forget_key(name: str) -> None:
    """The file that this job alone was given, once the run is over: whoever submits the unit again makes another."""
    path = Path(environment_value(KEY_FILE_VARIABLE) or "")
    if path.match(f"diloco-*-jobs/{name}.key"):
        path.unlink(missing_ok=True)


def _prefix(name: str) -> str:
    return f"diloco-{name.replace(os.sep, '-')}-"


def _act_beside(name: str, run: str, words: list[str]) -> NoReturn:
    """Become this command of diloco, with the notes of the unit's supervisor on this node."""
    for folder in Path(gettempdir()).glob(f"{_prefix(glob.escape(name))}*"):
        if environment_value("DILOCO_HOME") is None and folder.stat().st_uid == os.getuid():
            set_environment("XDG_STATE_HOME", str(folder))
            if living_supervisor(run) is not None:
                break
    os.execv(sys.executable, diloco_command(*words))


def _looked_up(run: str) -> tuple[OpenRun, str | None]:
    """The run, and its phase if it is over."""
    opened = open_run(run, at_home=False)
    state = head_of(opened)
    over = state.phase == "FINISHED" or opened.perform(is_at_rest(opened.format, state))
    return opened, state.phase if over else None


def _patiently(ask: Callable[[], Result], heard: SignalCount) -> Result | None:
    """As a crash of the unit is treated: nobody else brings a job back that began while its store was away. None if it
    has to leave before there is an answer."""
    exits: list[Exit] = []
    while not heard.count:
        try:
            return ask()
        except DilocoError as error:
            exits.append(Exit(monotonic_s(), error.exit_status, 0.0))
            again = decide(exits, exits[-1].at_s, RestartPolicy())
            if again.at_s is None:
                raise
            talk(f"{utc_now_text()} {error}; {again.reason.rpartition('; ')[2]}")
            while not heard.count and monotonic_s() < again.at_s:
                sleep_s(HEARS_EVERY_S)
    return None


def _keep_alive(opened: OpenRun, spec: UnitSpec, here: NamedHere, heard: SignalCount) -> SupervisionResult:
    from diloco_cli.cli.supervision import FollowedLog, line_of, stop_policy, telling

    consented(opened.format, opened.url, here, stores_of(opened.format), code=spec.kind == "learner")
    with (
        telling(opened, [spec], lambda event: talk(f"{utc_now_text()} {line_of(event)}")) as tell,
        _hastening(opened, spec),
    ):
        return supervise(
            opened.url,
            [spec],
            run_state=FollowedLog(opened).phase,
            on_event=tell,
            signals=heard,
            state_every_s=LOOKS_EVERY_S,
            stop=replace(stop_policy(opened.format, [spec]), kill_s=JOB_ENDS_S, give_up_s=JOB_ENDS_S + 1.0),
            gone_after_s=gone_after_s(),
        )


def _hastening(opened: OpenRun, spec: UnitSpec) -> AbstractContextManager[object]:
    """What is held back after a requeue is hastened by the units that serve the run: nobody else may watch. Together
    they ask the engine no oftener than one would."""
    run = opened.format
    units = [unit for unit in units_of(run, opened.url) if unit.is_submitted]
    serve = [unit.name for unit in units if unit.infra.startswith("slurm/") and syncer_may_start(run, [unit.spec])]
    if spec.name not in serve:
        return nullcontext()

    def look() -> str:
        engine = Slurm()  # this job's own
        try:
            engine.hasten(engine.jobs(run.home_of(opened.url), run.name, ASKED_WITHIN_S))
        except DilocoError as error:
            return str(error)
        return ""

    return Asking(look, HASTENS_EVERY_S * len(serve))


def _chosen(opened: OpenRun, name: str) -> RunUnit:
    url = opened.format.home_of(opened.url)
    units = {found.name: found for here in (False, True) for found in units_of(opened.format, url, None, here)}
    if name not in units:
        raise UsageError(f"run {opened.name} has no unit {name!a}; it has: {', '.join(units)}", where=opened.url)
    return units[name]


def _in_job(opened: OpenRun, chosen: RunUnit, rendezvous: str | None, node_rank: int) -> UnitSpec:
    """The unit as it runs in a job: it dies with this process, or it would live on where an engine ends nothing but
    what it has started itself. Other nodes have none of this one's notes, nor its consent."""
    spec, run = chosen.spec, opened.format
    if rendezvous is not None:
        spec = replace(spec, command=(*spec.command, f"--rendezvous={rendezvous}", f"--node-rank={node_rank}"))
    if rendezvous is not None or chosen.island is None or chosen.island.nodes == 1:
        return replace(spec, environment={**spec.environment, PARENT_VARIABLE: str(os.getpid())})
    words = (*spec.command, *consent_words(run, chosen.url, stores=run.settings.syncer.on_learners))
    return replace(spec, command=step(words, chosen.island.nodes, os.uname().nodename))


def _log_to_stdout(url: str, name: str) -> None:
    """What the unit prints goes where this process's own words go: into the job's log, which stays when the node's
    folder goes. It is bounded there, too."""
    path = log_path(url, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = Path(f"/proc/{os.getpid()}/fd/{sys.stdout.fileno()}")
    if own.exists():
        path.symlink_to(own)


def _queue_again() -> None:
    talk("the time of this job is up: back into the queue")
    try:
        queue_again()
    except DilocoError as error:
        talk(f"{error}; to bring it back: diloco resume, where it was submitted")
