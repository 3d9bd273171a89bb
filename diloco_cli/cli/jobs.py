"""The units of a run that are jobs of an engine: `launch` and `resume` submit what is missing, and watch; `stop` ends
what is left; `status` shows the engine's word for them. Nothing here holds a job: it goes on when the command ends."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from diloco_cli.cli.arguments import LOOK_S, OpenRun, boxed, foreground_store
from diloco_cli.cli.output import talk
from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.config.codec import parse_object
from diloco_cli.config.settings import Site
from diloco_cli.engines.files import edited
from diloco_cli.engines.port import Engine, Job, JobSpec, JobState, LogCommands, job_names, of_each_unit
from diloco_cli.engines.sites import engine_of
from diloco_cli.environment import environment_with
from diloco_cli.errors import DilocoError, RefusedError, StoreError, UsageError, escaped
from diloco_cli.observe.unit_states import working
from diloco_cli.paths import make_directory
from diloco_cli.protocol.actors.requests import stop_stands
from diloco_cli.protocol.log.keys import job_hint_key
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.consent import signing_secret
from diloco_cli.runtime.processes import is_started_by_diloco
from diloco_cli.runtime.registry import log_path, note_sites, sites_of, this_folder
from diloco_cli.runtime.units import (
    RunUnit,
    consent_words,
    devices_of,
    diloco_command,
    is_of_cores,
    is_submitted,
    keys_of,
    threads_of,
    units_of,
)
from diloco_cli.signing import KEY_VARIABLE
from diloco_cli.store.port import Store
from diloco_cli.store.url import join_url
from diloco_cli.store.wrappers import Deadline

if TYPE_CHECKING:
    from diloco_cli.plan.plan import Plan
    from diloco_cli.report.numbers import LaunchPlan

ANSWERS_WITHIN_S = 15.0
ASKED_WITHIN_S, ASKED_EVERY_S = 2.0, 10.0  # by a command that does not need the answer
PROCESS_GB, MEMORY_ROOM = 3.0, 1.5  # torch's own memory in each process; times what is planned for the rest
SYNCER_CORES = 2  # it merges, and its evaluator computes beside it
DRAIN_S, LOOKS_EVERY_S = 20.0, 1.0
SHELLS_OWN = re.compile(r"(AWS|AZURE|GOOGLE|GCE_METADATA|HF)_\w+|(https?|all)_proxy|DILOCO_ALLOW_HTTP", re.IGNORECASE)
WAITS = (JobState.QUEUED, JobState.HELD)
MAX_ASKED = 32  # engines at a time
NAMED = (
    "ask where it was launched; to name it here: `diloco launch --create-only` beside its files, or, for this machine's"
    " own Slurm, `diloco resume --region REGION`"
)
MAX_HINT_BYTES = 4096
Thing = TypeVar("Thing")


def job_spec(
    run: RunFormat,
    home: str,
    unit: RunUnit,
    folder: Path,
    plan: Plan | LaunchPlan | None = None,
    consent: tuple[str, ...] | None = None,
    sites: Mapping[str, Site | None] | None = None,
) -> JobSpec:
    """`folder`: where modules are looked for, and where the folder of its logs lies, unless its site has a directory.
    All nodes have to see it. `plan`: knows how much memory it needs."""
    site = (sites or {}).get(unit.infra)
    folder = folder / ((site and site.directory) or "")
    logs = folder / f"{job_names(run.name, home)}jobs"  # another folder than that of another run of this name
    stores = unit.island is None or run.settings.syncer.on_learners
    words = consent_words(run, unit.url, stores=stores) if consent is None else consent
    nodes, cores, gpus, syncer = 1, SYNCER_CORES, 0, plan and plan.syncer
    if (island := unit.island) is not None:
        nodes = island.nodes
        gpus = 0 if is_of_cores(island) else island.num_accelerators // nodes
        cores = threads_of(island, run.settings.train.threads) * (island.ranks // nodes)
    words = ("unit", unit.name, f"--run={unit.url}", *words)
    command = diloco_command(*words) if engine_of(unit.infra, site).sees_files else ("diloco", *words)
    return JobSpec(
        run=home,
        run_name=run.name,
        unit=unit.name,
        infra=unit.infra,
        command=(*_devices_on_host(run, unit), *command),
        folder=folder,
        log=logs / f"{unit.name}.log",
        nodes=nodes,
        cores=cores,
        gpus=gpus,
        memory_gb=0 if plan is None else memory_gb(unit, plan, run.settings.syncer.on_learners),
        key=None if run.signing is None else logs / f"{unit.name}.key",
        busy_cores=None if unit.island is not None else syncer.busy_cores if syncer else 0.0,
        site=site,
    )


def _devices_on_host(run: RunFormat, unit: RunUnit) -> tuple[str, ...]:
    """Words before the command that give islands of one host devices of their own: by ssh nobody else does."""
    beside = [island for island in run.islands if island.infra == unit.infra]
    if unit.island is None or not unit.infra.startswith("ssh/"):
        return ()
    own = devices_of(beside, talk, None)[beside.index(unit.island)]
    return ("env", *(f"{name}={value}" for name, value in own.items())) if own else ()


def memory_gb(unit: RunUnit, plan: Plan | LaunchPlan, on_learners: bool) -> int:
    """Of each node, with room: an engine kills who takes more, for good. 0: the plan does not say."""
    syncer_gb = 0.0 if plan.syncer is None else plan.syncer.memory_gb
    if unit.island is None:
        return math.ceil(2 * PROCESS_GB + MEMORY_ROOM * syncer_gb)  # its evaluator, too
    planned = next((island for island in plan.islands if island.name == unit.name), None)
    if planned is None:
        return 0
    ranks = planned.ranks // planned.nodes
    needed_gb = planned.host_memory_gb_needed + (planned.memory_gb_needed * ranks if is_of_cores(unit.island) else 0.0)
    return math.ceil(PROCESS_GB * ranks + MEMORY_ROOM * (needed_gb + (syncer_gb if on_learners else 0.0)))


@dataclass(frozen=True)
class EngineWords:
    """What the engines know of the run's jobs; `silent`: by unit, why its engine could not be asked. That holds up no
    other one."""

    jobs: list[Job]
    silent: dict[str, DilocoError]

    @property
    def trouble(self) -> str:
        why = [f"{error}: {NAMED}" if isinstance(error, RefusedError) else str(error) for error in self.silent.values()]
        return f"jobs: not asked: {'; '.join(dict.fromkeys(why))}" if why else ""


def engine_for(url: str, infra: str) -> Engine:
    """Of the run at this URL."""
    return engine_of(infra, sites_of(url).get(infra))


def _at_once(things: Iterable[tuple[Engine, Thing]], do: Callable[[Engine, list[Thing]], None]) -> None:
    """`do` with each engine and what is its own, with all at once. One that fails holds up none of the others; then its
    error is raised."""
    of_engine: dict[str, tuple[Engine, list[Thing]]] = {}
    for engine, thing in things:
        of_engine.setdefault(engine.name, (engine, []))[1].append(thing)
    with ThreadPoolExecutor(MAX_ASKED) as pool:
        calls = [pool.submit(do, *own) for own in of_engine.values()]
    if failed := [error for call in calls if (error := call.exception()) is not None]:
        raise failed[0]


def _ask(opened: OpenRun, units: Collection[RunUnit], within_s: float = ANSWERS_WITHIN_S) -> EngineWords:
    """All engines of these units; of syncers also those that have them where no region is chosen. Of two that are one
    cluster, and both know a job, the unit's own counts."""
    run, url, names = opened.format, opened.url, {unit.name for unit in units}
    jobs, silent, sites = dict[tuple[str, str], Job](), _strange(url, units), sites_of(url)
    wherever = [*units, *(unit for unit in units_of(run, url) if unit.is_submitted and unit.name in names)]

    def ask(engine: Engine, own: list[str]) -> None:
        try:
            found = engine.jobs(run.home_of(url), run.name, within_s)
        except DilocoError as error:
            silent.update(dict.fromkeys(own, error))
            return
        for job in found:
            if job.unit in own or (job.unit, job.id) not in jobs:
                jobs[job.unit, job.id] = job

    _at_once(((engine_for(url, unit.infra), unit.name) for unit in wherever if unit.infra in sites), ask)
    known = {unit for unit, _ in jobs}
    silent = {unit: error for unit, error in silent.items() if unit not in known}
    return EngineWords(of_each_unit(list(jobs.values())), silent)


def _strange(url: str, units: Iterable[RunUnit]) -> dict[str, DilocoError]:
    """By name, those whose engine is not asked: nobody has named it on this machine, so that a stranger may have chosen
    the host that this user's keys would open, or it may mean another machine's Slurm."""
    sites = sites_of(url)
    strange = {unit.name: unit.infra for unit in units if unit.infra not in sites}
    why = RefusedError(f"the run's bucket alone names {', '.join(dict.fromkeys(strange.values()))}", hint=NAMED)
    return dict.fromkeys(strange, why)


def just_typed(region: str | None) -> str | None:
    """The region, if a person has named it now. A successor repeats what its predecessor was told: since then another
    cluster may have been given that region's units."""
    return None if is_started_by_diloco() else region


def name_partitions(url: str, run: RunFormat, region: str | None) -> None:
    """The user's word for a region is one for this machine's own Slurm, which is no host that a bucket could choose.
    What was named here before stays."""
    named = [unit.infra for unit in units_of(run, url, region) if unit.infra.startswith("slurm/")] if region else []
    if named:
        note_sites(url, {**dict.fromkeys(named), **sites_of(url)})


def _cancel(url: str, jobs: Iterable[Job]) -> None:
    _at_once(((engine_for(url, job.engine), job) for job in jobs), lambda engine, own: engine.cancel(own))


def hasten(url: str, jobs: Iterable[Job]) -> None:
    """Lift what holds them back after a requeue."""
    _at_once(((engine_for(url, job.engine), job) for job in jobs), lambda engine, own: engine.hasten(own))


def jobs_before(opened: OpenRun, state: RunState, planned: Sequence[RunUnit], alone: bool = True) -> EngineWords:
    """Before anything of the run is changed: its jobs that go on. While a stop stands there are none: those that have
    seen it, or will, are ended first; what is submitted now follows them, as at most one job of a name runs.

    `alone`: nothing else is started. Then it raises the error of an engine that does not answer, if none does."""
    run = opened.format
    try:
        known = _ask(opened, planned)
        if alone and len(known.silent) == len(planned):
            raise known.silent[planned[0].name]
        if others := [job for job in known.jobs if job.lives and job.owner]:
            units, owner = ", ".join(job.unit for job in others), others[0].owner
            raise RefusedError(
                f"jobs of run {run.name} are those of another user, {owner}: {units}",
                hint=f"who has submitted them resumes it; to look on: diloco status {opened.word}",
            )
        stands = opened.url == run.home_of(opened.url) and opened.perform(stop_stands(run, state))
        if stands and any(job.lives for job in known.jobs):
            talk(f"run {run.name} was just stopped: waiting at most {DRAIN_S:.0f} s for jobs that end")
            end_jobs(opened)
    except DilocoError as error:
        error.hint = error.hint or f"nothing was submitted; once it answers: diloco resume {opened.word}"
        raise
    return EngineWords([] if stands else known.jobs, known.silent)


def submit_missing(
    opened: OpenRun,
    planned: Sequence[RunUnit],
    folder: Path | None,
    before: EngineWords,
    files: Path | None = None,
    by_region: bool = False,
) -> list[Job]:
    """Submit each unit that has no job which lives; the jobs of all. If one is refused, none is left behind. `files`:
    where their edited texts lie; `by_region`: the user has named the region whose units they are."""
    run, known = opened.format, {job.unit: job for job in before.jobs}
    if before.silent:
        talk(f"{before.trouble}; left alone: {', '.join(before.silent)}; then: diloco resume {opened.word}")
    reached = [unit for unit in planned if unit.name not in before.silent]
    missing = [unit for unit in reached if unit.name not in known or not known[unit.name].lives]
    missing = _without_those_of_others(opened, missing, by_region)
    is_served = any(unit.island is None and unit not in missing for unit in planned)
    missing = _in_order(missing, is_served)
    own = [] if opened.url.startswith("file:") else sorted(filter(SHELLS_OWN.fullmatch, environment_with()))
    if missing and own:
        where = "in files on the nodes, as ~/.aws/config, or, if it is no secret, in `setup` of a site"
        talk(f"warning: jobs do not get {', '.join(own)} of this shell: what they need has to stand {where}")
    specs = specs_of(opened, missing, folder or _submitted_from(opened, planned) or Path(this_folder()))
    if files is not None:
        specs = {name: edited(files, spec, run.plan) for name, spec in specs.items()}
    make_ready(specs.values())
    check_jobs(specs.values())
    done, tried = list[Job](), set[str]()
    try:
        _leave_hints(opened, missing)
        _submit(opened, missing, specs, done, tried)
    except BaseException:
        _take_back(opened, done, tried, missing)
        raise
    hasten(opened.url, (job for job in known.values() if job.lives))
    if done:
        talk(f"submitted {len(done)} job{'s' * (len(done) > 1)}; what they print: diloco logs")
        known |= {job.unit: job for job in [*done, *_ask(opened, missing).jobs]}
    return [known[unit.name] for unit in planned if unit.name in known]


def _in_order(units: Sequence[RunUnit], is_served: bool) -> list[RunUnit]:
    """A syncer before the islands, which may fill a queue and would train nothing together; others of them stand by."""
    syncers = [unit for unit in units if unit.island is None]
    first = [] if is_served else syncers[:1]
    return [*first, *(unit for unit in units if unit.island is not None), *syncers[len(first) :]]


def _without_those_of_others(opened: OpenRun, units: Sequence[RunUnit], by_region: bool) -> list[RunUnit]:
    """The units but for those that a Slurm was given which cannot be asked from here: they may wait in its queue. The
    user's word for their region brings them here, unless they work there now."""
    ours, named = {""}, [engine_for(opened.url, infra) for infra in filter(is_submitted, sites_of(opened.url))]
    with suppress(DilocoError):  # of one that does not answer it is not known
        _at_once(((engine, "") for engine in named if units), lambda engine, own: ours.add(engine.cluster))

    def given(unit: RunUnit) -> dict[str, Any]:
        with suppress(ValueError, DilocoError):  # whoever may not read them submits all the same
            data = _store_of(opened, unit).get(job_hint_key(unit.name), MAX_HINT_BYTES)
            said = parse_object(data or b"{}", MAX_HINT_BYTES)
            return said if isinstance(said.get("cluster"), str) else {}
        return {}

    with ThreadPoolExecutor(MAX_ASKED) as pool:
        hints = list(pool.map(given, units if ours != {""} else []))
    there = {unit.name: said for unit, said in zip(units, hints, strict=False) if said.get("cluster", "") not in ours}
    works = working(boxed(opened, Deadline(LOOK_S)).facts(), there) if there else []
    left = works if by_region else list(there)
    for name, said in there.items():
        told = "it is left alone" if name in left else "it may have two jobs now"
        where = f"{said.get('host')} has given it to Slurm cluster {said['cluster']}"
        talk(f"{name}: {escaped(where)}{', where it works' if name in works else ''}: {told}")
    if left and not works:
        talk(f"to submit them here all the same: diloco resume {opened.word} --region REGION")
    return [unit for unit in units if unit.name not in left]


def _leave_hints(opened: OpenRun, units: Sequence[RunUnit]) -> None:
    """In the bucket of each: other machines cannot see what waits in the queue of this one's Slurm. Who may not write
    them there submits all the same."""

    clusters = dict[str, str]()
    for infra in {unit.infra for unit in units}:
        with suppress(DilocoError):  # one that does not answer is not told
            clusters[infra] = engine_for(opened.url, infra).cluster

    def put(unit: RunUnit) -> str:
        try:
            if cluster := clusters.get(unit.infra):
                said = json.dumps({"cluster": cluster, "host": os.uname().nodename})
                _store_of(opened, unit).put(job_hint_key(unit.name), said.encode())
        except StoreError as error:
            return f"warning: a `resume` on another Slurm will not know of {unit.name}: {error}"
        return ""

    with ThreadPoolExecutor(MAX_ASKED) as pool:
        for warning in filter(None, pool.map(put, units)):
            talk(warning)


def _store_of(opened: OpenRun, unit: RunUnit) -> Store:
    return opened.store if unit.url == opened.url else foreground_store(unit.url)


def _submit(
    opened: OpenRun, units: Sequence[RunUnit], specs: Mapping[str, JobSpec], done: list[Job], tried: set[str]
) -> None:
    """To all engines at once, to each of them one after the other. `done` gets those that were submitted, `tried` the
    units that may have been: a job of any other unit was submitted by somebody else meanwhile."""
    keys = {unit.name: _key_of(opened.format, unit) for unit in units}

    def submit(engine: Engine, own: list[RunUnit]) -> None:
        for unit in own:
            tried.add(unit.name)
            done.append(engine.submit(specs[unit.name], keys[unit.name]))
            if engine.sees_files:
                _show_log(opened.url, specs[unit.name])

    _at_once(((engine_for(opened.url, unit.infra), unit) for unit in units), submit)


def specs_of(opened: OpenRun, units: Sequence[RunUnit], folder: Path) -> dict[str, JobSpec]:
    """By unit. `folder`: from which they are submitted."""
    from diloco_cli.report.numbers import read_launch_plan

    run, plan = opened.format, read_launch_plan(opened.store) if units else None
    home, sites = run.home_of(opened.url), sites_of(opened.url)
    return {unit.name: job_spec(run, home, unit, folder.absolute(), plan, sites=sites) for unit in units}


def _take_back(opened: OpenRun, done: list[Job], tried: Collection[str], units: Sequence[RunUnit]) -> None:
    """Cancel what was submitted, and what an engine has taken without having said so in time."""
    run, trouble = opened.format, ""
    found = _ask(opened, units)
    try:
        trouble = found.trouble
        _cancel(opened.url, (job for job in found.jobs if job.lives and job.unit in tried))
    except DilocoError as error:
        trouble = str(error)
    if trouble:
        numbers = ", ".join(job.id for job in done) or "what was submitted last"
        talk(f"warning: jobs may be left ({numbers}): {trouble}; to end them: diloco stop {opened.word}")
    else:
        talk(f"run {run.name} exists, and has none of these jobs; once this is mended: diloco resume {opened.word}")


def _submitted_from(opened: OpenRun, units: Iterable[RunUnit]) -> Path | None:
    """The folder from which this machine has submitted them before: their modules and relative data are found there."""
    placed = {infra for infra, site in sites_of(opened.url).items() if site and site.directory}
    own = (log_path(opened.url, unit.name) for unit in units if unit.infra not in placed)
    logs = [path for path in own if path.is_symlink()]
    before = [path.readlink().parent.parent for path in logs]
    return next((folder for folder in before if folder.is_dir()), None)


def _show_log(url: str, spec: JobSpec) -> None:
    """`diloco logs` finds the log where those of this machine's units are, if it is a file here."""
    known_as = log_path(url, spec.unit)
    if spec.log.is_file():
        make_directory(known_as.parent)
        known_as.unlink(missing_ok=True)
        known_as.symlink_to(spec.log)


def _key_of(run: RunFormat, unit: RunUnit) -> str | None:
    """One of its own, of a signed run."""
    if run.signing is None:
        return None
    own = keys_of(run, unit.signers(run), signing_secret()).get(KEY_VARIABLE)
    if own is None:
        raise UsageError(f"run {run.name} is signed: submit its jobs with the operator's key", where=unit.name)
    return own


def log_commands(opened: OpenRun, unit: str | None, lines: int, follow: bool) -> LogCommands:
    """Of the jobs whose logs are not on this machine."""
    run, found = opened.format, LogCommands()
    chosen = [one for one in units_of(run, opened.url) if one.is_submitted and unit in (None, one.name)]
    if strange := _strange(opened.url, chosen):
        talk(f"no logs of {', '.join(strange)}: {next(iter(strange.values()))}: {NAMED}")

    def ask(engine: Engine, own: list[str]) -> None:
        found.update(engine.log_words(run.home_of(opened.url), run.name, own, lines, follow))

    named = [one for one in chosen if one.name not in strange]
    _at_once(((engine_for(opened.url, one.infra), one.name) for one in named), ask)
    return found


def planned_jobs(plan: Plan, region: str | None, folder: Path, syncer_here: bool = False) -> list[JobSpec]:
    """What `launch` would submit. The digest by which a job consents to code is known once the run is created."""
    from diloco_cli.launch.plan_files import planned_format, signed

    url = join_url(plan.inventory.store.url, plan.run.name)
    run, found = signed(planned_format(plan, url), signing_secret()), []
    sites = plan.inventory.sites_by_infra
    for unit in units_of(run, url, region, syncer_here):
        if unit.is_submitted:
            consent = ("--allow-code", "DIGEST") if consent_words(run, unit.url, stores=True) else ()
            found.append(job_spec(run, url, unit, folder.absolute(), plan, consent, sites))
    return found


def make_ready(specs: Iterable[JobSpec]) -> None:
    """Bring diloco to where sites want it, to each place once, to all at once."""
    wanting = ((spec.site, spec) for spec in specs if spec.site is not None and spec.site.install)
    places = {(site.host, site.directory, site.install): spec for site, spec in wanting}.values()
    _at_once(((engine_of(spec.infra, spec.site), spec) for spec in places), lambda engine, own: engine.make_ready(talk))


def check_jobs(specs: Iterable[JobSpec]) -> None:
    """Each shape once, all engines at once: a host takes few connections at a time. Raises UsageError for jobs that the
    engine would refuse, or never start."""
    shapes = {(spec.infra, spec.nodes, spec.cores, spec.gpus, spec.memory_gb, spec.text): spec for spec in specs}

    def check(engine: Engine, own: list[JobSpec]) -> None:
        for spec in own:
            engine.check(spec)

    _at_once(((engine_of(spec.infra, spec.site), spec) for spec in shapes.values()), check)


def asked(opened: OpenRun) -> tuple[list[Job], str]:
    """What the engines say of the run's jobs, and of learners that have none; and which were not asked, and why."""
    units = [unit for unit in units_of(opened.format, opened.url) if unit.is_submitted]
    found = _ask(opened, units, ASKED_WITHIN_S)
    told = {job.unit for job in found.jobs} | found.silent.keys()
    for unit in units:
        if unit.island is not None and unit.name not in told:
            name = engine_for(opened.url, unit.infra).name
            found.jobs.append(Job(unit.name, name, "", JobState.GONE, f"{name} has no job of it"))
    return found.jobs, found.trouble


def job_of(opened: OpenRun, name: str) -> tuple[RunUnit, Job] | None:
    """The unit of this name and its job, if it is one. Raises RefusedError if that does not run, or is not ours."""
    unit = next((unit for unit in units_of(opened.format, opened.url) if unit.name == name and unit.is_submitted), None)
    if unit is None:
        return None
    found = _ask(opened, [unit])
    for error in found.silent.values():
        raise error
    job = next((job for job in found.jobs if job.unit == name), None)
    if job is None or job.state is not JobState.RUNNING or job.owner:
        why = (
            "it has none" if job is None else f"of user {job.owner}" if job.owner else f"{job.state} {job.why}".strip()
        )
        raise RefusedError(f"the job of {name} does not run here: {why}", hint=f"diloco status {opened.word}")
    return unit, job


def run_beside(unit: RunUnit, job: Job, words: Sequence[str], within_s: float) -> str:
    """What this command of diloco prints in the unit's job, with the notes that its supervisor has there."""
    engine = engine_for(unit.url, unit.infra)
    command = ("unit", unit.name, f"--run={unit.url}", "--", *words)
    try:
        return engine.run_in(job, diloco_command(*command) if engine.sees_files else ("diloco", *command), within_s)
    except RefusedError as error:
        if (
            said := re.search(r"\berror: (.+?)(?:; hint: (.+?))?(?:; srun: |; command terminated |$)", error.message)
        ) is not None:
            raise RefusedError(said[1], where=f"job {job.id}", hint=said[2]) from None
        raise


class JobWatch:
    """What the engine said of the run's jobs last, and why it did not. It is asked now and then, so that it holds no
    screen up for longer than ASKED_WITHIN_S; `on_answer` takes what it says."""

    def __init__(self, opened: OpenRun, on_answer: Callable[[list[Job], str], None] | None = None) -> None:
        self._opened, self._on_answer = opened, on_answer
        self._jobs, self.trouble, self._due_s = list[Job](), "", 0.0

    def look(self) -> list[Job]:
        if monotonic_s() >= self._due_s:
            self._jobs, self.trouble = asked(self._opened)
            self._due_s = monotonic_s() + ASKED_EVERY_S
            if self._on_answer is not None:
                self._on_answer(self._jobs, self.trouble)
        return self._jobs


class JobNews:
    """Tells what has changed since the answer before."""

    def __init__(self, jobs: Iterable[Job], tell: Callable[[str], None]) -> None:
        self._known, self._trouble, self._tell = {job.unit: job for job in jobs}, "", tell

    def __call__(self, jobs: list[Job], trouble: str) -> None:
        if trouble and trouble != self._trouble:
            self._tell(trouble)
        self._trouble = trouble
        for job in jobs:
            if self._known.get(job.unit) != job:
                self._tell(
                    f"{job.unit}: job {job.id or '-'} {job.state}: {', '.join(filter(None, (job.node, job.why)))}"
                )
            self._known[job.unit] = job


def end_jobs(opened: OpenRun, drain_s: float = DRAIN_S) -> list[str]:
    """After a stop: those that wait are cancelled, those that run get `drain_s` to see it and end, then are cancelled.
    Returns the units whose jobs were cancelled."""
    until_s, cancelled, told = monotonic_s() + drain_s, dict[str, Job](), ""
    while True:
        jobs, trouble = asked(opened)
        if trouble and trouble != told:
            talk(f"{trouble}; jobs that run end by themselves, those that wait once they start")
        told = trouble
        living = [job for job in jobs if job.lives and job.id not in {known.id for known in cancelled.values()}]
        late = monotonic_s() >= until_s
        due = [job for job in living if job.state in WAITS or (late and job.state is not JobState.LEAVING)]
        ended = [job for job in due if not job.owner]  # what others have submitted sees the stop, now or when it starts
        _cancel(opened.url, ended)
        cancelled |= {job.unit: job for job in ended}
        if late or len(ended) == len(living):
            return sorted(cancelled)
        sleep_s(LOOKS_EVERY_S)
