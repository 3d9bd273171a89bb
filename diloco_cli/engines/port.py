"""What `diloco` asks of an engine, which queues and runs jobs: one job is one unit of a run. An engine is told what to
run; whether and where is its own decision. All calls are bounded in time, and none imports an engine's client.

A unit in a job is kept alive by `diloco unit`, so an engine need only bring back what it took away itself. How that
command ends:

    0    the run is over, or stopped
    9    another process has the unit's place
    75   the job's time is up: it is in the queue again
    143  it was asked to leave
    else it cannot go on, and a restart by the engine would not heal it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from diloco_cli.config.settings import Site
from diloco_cli.digests import digest, short_digest

AGAIN_STATUS = 75
LogCommands = dict[tuple[str, ...], tuple[str, ...]]
"""By the units whose logs each prints; `UNIT|` stands before each line if they are several."""


class JobState(StrEnum):
    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    LEAVING = "LEAVING"
    HELD = "HELD"  # until a person releases it
    ENDED = "ENDED"  # by itself, or cancelled
    FAILED = "FAILED"
    GONE = "GONE"  # the engine knows no job of the unit


OVER = frozenset({JobState.ENDED, JobState.FAILED, JobState.GONE})


@dataclass(frozen=True)
class Job:
    """`why`: the engine's word for the state, and what that means; `owner`: the other user whose job it is."""

    unit: str
    engine: str
    id: str
    state: JobState
    why: str = ""
    node: str = ""
    owner: str = ""

    @property
    def lives(self) -> bool:
        return self.state not in OVER


@dataclass(frozen=True)
class JobSpec:
    """A unit as a job. `run`: the run's URL at home, by which its jobs are found; `infra`: the engine, and where in it;
    `folder`: the working directory; `cores`, `gpus`, `memory_gb` (0: not known): of each of its `nodes`; `key`: the
    file of its signing key; `busy_cores`: what it keeps busy by the plan, None: all. An engine whose jobs do not see
    this machine's files (`sees_files`) has a folder, a log and a key of its own. `site`: what `infra` names, if that is
    one. `text`: to submit instead of what would be rendered."""

    run: str
    run_name: str
    unit: str
    infra: str
    command: tuple[str, ...]
    folder: Path
    log: Path
    nodes: int = 1
    cores: int = 1
    gpus: int = 0
    memory_gb: int = 0
    key: Path | None = None
    busy_cores: float | None = None
    site: Site | None = None
    text: str | None = None

    @property
    def place(self) -> str:
        return self.infra.partition("/")[2]

    @property
    def name(self) -> str:
        return job_names(self.run_name, self.run) + self.unit


def job_names(run_name: str, run: str) -> str:
    """How the names of the jobs of the run at this URL begin. Slurm lets jobs of one name wait for each other, and two
    runs may have one name."""
    return f"diloco-{run_name}-{short_digest(digest(run.encode()))[:6]}-"


class Engine(Protocol):
    @property
    def name(self) -> str:
        """As `infra` begins: `engine_of` finds the engine by it (sites.py)."""
        ...

    @property
    def sees_files(self) -> bool:
        """Whether its jobs see this machine's files: its Python, the folder from which they are submitted."""
        ...

    @property
    def cluster(self) -> str:
        """Which one it is, of an engine whose name may mean another cluster on another machine; else ""."""
        ...

    @property
    def may_change(self) -> re.Pattern[str]:
        """How lines of what it renders begin that a person may change, or take out."""
        ...

    def render(self, spec: JobSpec) -> str:
        """The text that `submit` hands over. The same spec gives the same bytes."""
        ...

    def check(self, spec: JobSpec) -> None:
        """Raises UsageError, in the engine's own words, if it would refuse the job or could never start it."""
        ...

    def make_ready(self, tell: Callable[[str], None]) -> None:
        """Bring what its jobs need, where the site wants that: may take minutes, and is soon done the next time."""
        ...

    def submit(self, spec: JobSpec, key: str | None = None) -> Job:
        """At most one job of a name runs, however often it is submitted. `key`: what it signs with, of a signed run; it
        stands in no argument, script or comment."""
        ...

    def jobs(self, run: str, run_name: str, within_s: float = 15.0) -> list[Job]:
        """One of each unit that the engine knows. Raises TryAgainError where it does not answer in time."""
        ...

    def log_words(self, run: str, run_name: str, units: Sequence[str], lines: int, follow: bool) -> LogCommands:
        """Commands that print the last lines of what the units' jobs printed, and what is added until their stdin is
        closed; none where that is a file here (`JobSpec.log`)."""
        ...

    def cancel(self, jobs: Collection[Job]) -> None:
        """They are told to leave, and are ended once the site's grace is over."""
        ...

    def hasten(self, jobs: Collection[Job]) -> None:
        """Lift what holds them back after a requeue, where the engine lets its user."""
        ...

    def preempt(self, job: Job) -> None:
        """As the engine does for others: it is told to leave, and comes back. Raises RefusedError where it cannot."""
        ...

    def run_in(self, job: Job, words: Sequence[str], within_s: float) -> str:
        """What this command prints beside the unit, on the first node of its job. Raises RefusedError, with its words,
        if it fails, and where the engine cannot."""
        ...


def of_each_unit(jobs: Sequence[Job]) -> list[Job]:
    """The job that counts for each unit: one that runs before one that waits, one that lives before one that does not,
    then the newest, which comes last."""
    ranks = {JobState.RUNNING: 3, JobState.LEAVING: 2, JobState.STARTING: 2}
    found: dict[str, Job] = {}
    for job in sorted(jobs, key=lambda job: ranks.get(job.state, int(job.lives))):
        found[job.unit] = job
    return sorted(found.values(), key=lambda job: job.unit)
