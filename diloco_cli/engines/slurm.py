"""Slurm: sbatch, squeue, scancel, scontrol; no accounting, and no JSON, whose fields change with every release.

What a site needs beyond this (account, time limit, quality of service) sbatch reads from the user's SBATCH_ACCOUNT,
SBATCH_TIMELIMIT, SBATCH_QOS and so on. They count more than a script, and less than sbatch's own words: so what a job
cannot do without is in both, and its memory in the script alone (SBATCH_MEM_PER_NODE=0: all of a node's).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePath

from diloco_cli.engines.port import Job, JobSpec, JobState, LogCommands, job_names, of_each_unit
from diloco_cli.engines.ssh import check_installed, tails_of
from diloco_cli.engines.tool import over_ssh, run_tool, tool_directory
from diloco_cli.engines.wheel import bring, setup_line
from diloco_cli.environment import environment_value
from diloco_cli.errors import DilocoError, RefusedError, TryAgainError, UsageError
from diloco_cli.paths import make_directory, write_whole
from diloco_cli.signing import KEY_FILE_VARIABLE

SUBMITS_WITHIN_S = 30.0
ANSWERS_WITHIN_S = 15.0
NOTICE_S = 60  # before the job's time is up
PLACE = re.compile(r"[A-Za-z0-9_.,@+-]{1,200}")
JOB_VARIABLE = "SLURM_JOB_ID"
FIRST_PORT, PORTS = 20_000, 10_000  # below those that Linux gives to clients
WAITS_FOR_STEP = """\
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
"$@" & step=$!
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
"""
FORGET = """\
{logs} | while read -r log; do
  case $log in */diloco-*-jobs/*.log) rm -f -- "${{log%.log}}.key" ;; esac
done
"""
BESIDE = "  # diloco: also before what acts beside the unit"
CHANGEABLE = ("partition", "cpus-per-task", "gpus-per-node", "mem")  # by who edits a script
COLUMNS = "%i|%j|%T|%r|%N|%U|%k"
STATES = {
    "PENDING": JobState.QUEUED,
    "REQUEUED": JobState.QUEUED,
    "REQUEUE_FED": JobState.QUEUED,
    "CONFIGURING": JobState.STARTING,
    "RUNNING": JobState.RUNNING,
    "COMPLETING": JobState.LEAVING,
    "STAGE_OUT": JobState.LEAVING,
    "SIGNALING": JobState.LEAVING,
    "REQUEUE_HOLD": JobState.HELD,
    "SPECIAL_EXIT": JobState.HELD,
    "SUSPENDED": JobState.HELD,
    "STOPPED": JobState.HELD,
    "COMPLETED": JobState.ENDED,
    "CANCELLED": JobState.ENDED,
    "REVOKED": JobState.ENDED,
    "PREEMPTED": JobState.ENDED,
    "FAILED": JobState.FAILED,
    "LAUNCH_FAILED": JobState.FAILED,
    "TIMEOUT": JobState.FAILED,
    "DEADLINE": JobState.FAILED,
    "NODE_FAIL": JobState.FAILED,
    "BOOT_FAIL": JobState.FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
}
NOT_NOW = "Requested node configuration is not available"
OUT = re.compile("down|drain|fail|maint|reboot|unk|inval|resp|perfctrs")  # a node's state, in which it starts no job
HELD = re.compile(r"JobHeld|[Hh]eld\b|JobRequeueHold")
MEANINGS = {
    "Resources": "waits for free nodes",
    "Priority": "others are before it",
    "BeginTime": "Slurm holds a job back for two minutes after a requeue",
    "Dependency": "another job of its name has not ended",
    "Nodes required for job are DOWN": "scontrol show node says why, and who mends it",
    "PartitionConfig": "asks for more than the partition has: it would wait for ever",
    "BadConstraints": "no node is like this: it would wait for ever",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is down",
    "PartitionTimeLimit": "asks for more time than the partition allows",
    "ReqNodeNotAvail": "its nodes are down or reserved",
    "JobHeldUser": "held: scontrol release",
    "launch failed": "Slurm could not start it: scontrol release, once that is mended",
    "JobHeldAdmin": "held by an administrator",
    "JobLaunchFailure": "it could not be started, perhaps because its folder is gone, or its process was killed",
    "NonZeroExitCode": "its log says why",
}
REFUSALS = {  # sbatch's words, and what helps
    "account|QOS|qos": "yours: sacctmgr show assoc user=$USER format=account,partition,qos; then SBATCH_ACCOUNT,"
    " SBATCH_QOS, or `account` and `options` of a site; for a limit on jobs: squeue --me",
    "this partition|partition.* specified": "infra: slurm/PARTITION, or `options: {partition: ...}` of a site;"
    " partitions: sinfo -s",
    "contact slurm controller|timed out": "whether it is up: scontrol ping",
}


def options_of(spec: JobSpec) -> dict[str, str]:
    """For sbatch; "" for those without a value. A site's own count less than what a job cannot do without."""
    site = spec.site
    given = {} if site is None else {name: v for name, v in site.options.items() if v is not None and v is not False}
    named = {name: "" if v is True else str(v) for name, v in given.items()}
    account = {"account": site.account} if site is not None and site.account else {}
    ours = {
        "job-name": spec.name,
        **({"partition": spec.place} if site is None else {}),
        "comment": mark(spec.run),
        "chdir": str(spec.folder),
        "output": str(spec.log).replace("%", "%%"),
        "open-mode": "append",
        "nodes": str(spec.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(spec.cores),
        **({"gpus-per-node": str(spec.gpus)} if spec.gpus else {}),
        "requeue": "",
        "dependency": "singleton",
        "signal": f"B:USR2@{NOTICE_S}",
        "export": "NIL",
    }
    return account | named | {name: v for name, v in ours.items() if name not in named or name not in CHANGEABLE}


def render(spec: JobSpec, tools: str) -> str:
    """The batch script. `tools`: the directory of Slurm's commands. Raises UsageError for words that could not stand in
    it: they may come from a bucket."""
    options = options_of(spec)
    site = spec.site
    setup = "" if site is None else setup_line(site.setup or "", site.directory or "", site.install)
    if not PLACE.fullmatch(spec.place):
        raise UsageError(f"{spec.place!a} is no partition", where=spec.unit, hint="infra: slurm/PARTITION")
    if bad := [word for word in (*options, *options.values(), *spec.command, tools, setup) if not word.isprintable()]:
        raise UsageError(f"control characters cannot stand in a batch script: {bad[0]!a}", where=spec.unit)
    options |= {"mem": f"{spec.memory_gb}G"} if spec.memory_gb and "mem" not in options else {}
    asked = [f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "") for name, value in options.items()]
    key = [] if spec.key is None else [f"export {KEY_FILE_VARIABLE}={shlex.quote(str(spec.key))}"]
    # `exec`: signals of Slurm reach the unit itself; the notice kills nothing before it listens
    own = [f'export HOME=~ PATH={shlex.quote(tools)}:"$PATH"', *key, *([setup] if setup else [])]
    lines = ["#!/bin/bash", *asked, "trap '' USR2", *(line + BESIDE for line in own)]
    return "\n".join([*lines, f"exec {shlex.join(spec.command)}", ""])


def step(command: tuple[str, ...], nodes: int, host: str) -> tuple[str, ...]:
    """From inside a job: the same command on each of its nodes, as one step, which ends as soon as one of them is lost.
    They meet on this `host`, at a port that no other job of it has. Raises UsageError outside of a job.

    srun kills its tasks when it is told to end, so the shell before it tells them instead, and they drain."""
    job = environment_value(JOB_VARIABLE)
    if job is None:
        raise UsageError(f"it has {nodes} nodes, and this is no job of Slurm", hint="diloco learner, on each of them")
    cores = environment_value("SLURM_CPUS_PER_TASK") or "1"
    return (
        *("/bin/bash", "-c", WAITS_FOR_STEP, "bash", "srun", "--overlap", "--kill-on-bad-exit=1", "--export=ALL"),
        *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cores}"),
        *("/bin/bash", "-c", 'exec "$@" --node-rank="$SLURM_NODEID"', "bash", *command),
        *(f"--nodes={nodes}", f"--rendezvous={host}:{FIRST_PORT + int(job) % PORTS}"),
    )


def mark(run: str) -> str:
    """The comment by which jobs of the run at this URL are known."""
    return f"diloco {run}"


def read_queue(text: str, run: str, run_name: str, me: str, engine: str = "slurm") -> list[Job]:
    """The jobs of the run at this URL in what squeue printed, by unit. Lines of another form are warnings of a site.
    `me`: the number of this user."""
    prefix, found = job_names(run_name, run), []
    for line in text.splitlines():
        columns = line.strip().split("|", 6)
        if len(columns) == 7 and columns[1].startswith(prefix) and columns[6] == mark(run):
            number, name, state, reason, node, user, _ = columns
            job = _job(number, name.removeprefix(prefix), state, reason, node, engine)
            found.append(job if user == me else replace(job, owner=user))
    return of_each_unit(sorted(found, key=lambda job: int(re.sub(r"\D.*", "", job.id) or 0)))


def _job(number: str, unit: str, state: str, reason: str, node: str, engine: str) -> Job:
    """A state that is not known here counts as one in which the job lives: nothing is submitted twice for it."""
    known = STATES.get(state, JobState.STARTING)
    if known is JobState.QUEUED and HELD.search(reason):
        known = JobState.HELD
    has_waited = state == "CANCELLED"  # the reason is still that of the queue
    said = "" if reason in ("None", "(null)") or has_waited else reason
    word = said if known is JobState.QUEUED and said else " ".join(filter(None, (_odd(state), said)))
    meaning = next((text for name, text in MEANINGS.items() if said.startswith(name)), "")
    return Job(unit, engine, number, known, f"{word}: {meaning}" if meaning else word, "" if node == "(null)" else node)


def _odd(state: str) -> str:
    """Slurm's word where ours does not say as much."""
    return "" if state in ("PENDING", "RUNNING", "FAILED", "COMPLETED") else state


def _refusal_hint(spec: JobSpec, said: str) -> str:
    found = next((hint for words, hint in REFUSALS.items() if re.search(words, said)), "")
    if found and "limit" not in said:
        return found
    asks = f"{spec.nodes} x ({spec.cores} cores, {spec.gpus} GPUs, {spec.memory_gb or '?'} GB)"
    is_memory = spec.memory_gb and re.search(f"memory|{NOT_NOW}", said, re.IGNORECASE)
    whole = "; for all the memory that a node has: SBATCH_MEM_PER_NODE=0" if is_memory else ""
    what_helps = found or f"what nodes have: sinfo -o '%P %D %c %G %m'{whole}"
    return f"it asks for {asks}; {what_helps}"


@cache
def counts_memory(partition: str, via: str | None) -> bool:
    """Whether this partition's nodes have told Slurm their memory: else it refuses every job that asks for some."""
    words = ("sinfo", "-h", "-o", "%m", *(("-p", partition) if partition else ()))
    said = run_tool(words, within_s=ANSWERS_WITHIN_S, refusal=UsageError, via=via)
    return any(megabytes.rstrip("+") not in ("0", "1") for megabytes in said.split())


@cache
def _there(via: str | None, *words: str) -> str:
    return run_tool(words, within_s=ANSWERS_WITHIN_S, refusal=UsageError, via=via).strip()


@dataclass(frozen=True)
class Slurm:
    """`via`: the host on which its commands run, and which sees `directory`, as all nodes do; `setup`, `install`: as of
    a site."""

    name: str = "slurm"
    via: str | None = None
    directory: str = ""
    setup: str = ""
    install: str | None = None
    may_change = re.compile(rf"#SBATCH --({'|'.join(CHANGEABLE)})=")

    @property
    def sees_files(self) -> bool:
        return self.via is None

    @property
    def cluster(self) -> str:
        """Its name, which many clusters have, and its controller's host."""
        try:
            said = _there(self.via, "scontrol", "show", "config")
        except UsageError:  # some sites have no such command
            return ""
        found = re.findall(r"^(?:ClusterName|SlurmctldHost\[0\]) *= *([^\s(]+)", said, re.M)
        return "@".join(found)

    def render(self, spec: JobSpec) -> str:
        if self.via is None:
            tools = str(tool_directory("sbatch"))
        else:
            tools = str(PurePath(_there(self.via, "bash", "-c", "command -v sbatch")).parent)
        counted = counts_memory(options_of(spec).get("partition", ""), self.via)
        return render(spec if counted else replace(spec, memory_gb=0), tools)

    def check(self, spec: JobSpec) -> None:
        with ThreadPoolExecutor(1) as beside:
            answer = beside.submit(self._sbatch, spec, "--test-only")
            if self.via is not None:
                check_installed(self.via, self.setup, self.directory, self.install, spec)
        try:
            answer.result()
        except UsageError as error:
            if NOT_NOW not in error.message or not self._is_out(options_of(spec).get("partition", "")):
                raise

    def _is_out(self, partition: str) -> bool:
        """Whether all of its nodes are down or drained: `--test-only` then refuses every job, while sbatch takes it,
        and the queue says what it waits for. As long as one is left, what is refused may be more than any node has."""
        words = ("sinfo", "-h", "-o", "%T", *(("-p", partition) if partition else ()))
        states = self._run(words, ANSWERS_WITHIN_S, UsageError).split()
        return bool(states) and all(map(OUT.search, states))

    def make_ready(self, tell: Callable[[str], None]) -> None:
        if self.via is not None and self.install is not None:
            bring(self.via, self.setup, self.directory, self.install, tell)

    def submit(self, spec: JobSpec, key: str | None = None) -> Job:
        self._make_folder(spec, key)
        number = self._sbatch(spec, "--parsable").strip().splitlines()[-1].partition(";")[0]
        return Job(spec.unit, self.name, number, JobState.QUEUED, "submitted")

    def _make_folder(self, spec: JobSpec, key: str | None) -> None:
        """A job whose log's folder is missing would fail without a word."""
        if self.via is not None:
            logs, script = shlex.quote(str(spec.log.parent)), "umask 077\n"
            script += f"mkdir -p {logs} && touch {shlex.quote(str(spec.log))} || exit 1\n"
            if spec.key is not None and key is not None:
                script += f"printf %s {shlex.quote(key)} > {shlex.quote(str(spec.key))}\n"
            self._run(("bash", "-s"), SUBMITS_WITHIN_S, UsageError, script)
            return
        try:
            make_directory(spec.log.parent)
            spec.log.touch(mode=0o600)
            if spec.key is not None and key is not None:
                write_whole(spec.key, key.encode())
        except OSError as error:
            raise UsageError(f"cannot be written: {error.strerror}", where=str(spec.log.parent)) from None

    def _sbatch(self, spec: JobSpec, option: str) -> str:
        try:
            options = options_of(spec).items()
            kept = [(name, value) for name, value in options if spec.text is None or name not in CHANGEABLE]
            given = (f"--{name}" + (f"={value}" if value else "") for name, value in kept)
            return self._run(("sbatch", option, *given), SUBMITS_WITHIN_S, UsageError, spec.text or self.render(spec))
        except UsageError as error:
            error.where = error.where or f"{spec.unit} (slurm/{spec.place})"
            error.hint = error.hint or _refusal_hint(spec, error.message)
            raise

    def jobs(self, run: str, run_name: str, within_s: float = ANSWERS_WITHIN_S) -> list[Job]:
        words = ("squeue", "-h", "-t", "all", "-o", COLUMNS)
        if self.via is None:
            said, user = self._run(words, within_s, TryAgainError), str(os.getuid())
        else:
            both = ("bash", "-c", f"id -u; exec {shlex.join(words)}")
            user, _, said = self._run(both, within_s, TryAgainError).partition("\n")
        return read_queue(said, run, run_name, user, self.name)

    def log_words(self, run: str, run_name: str, units: Sequence[str], lines: int, follow: bool) -> LogCommands:
        if self.via is None:
            return {}
        script = f"cd {shlex.quote(f'{self.directory}/{job_names(run_name, run)}jobs')} || exit 1\n"
        script += tails_of({unit: f"{unit}.log" for unit in units}, lines, follow)
        return {tuple(units): over_ssh(self.via, ("bash", "-c", script))}

    def cancel(self, jobs: Collection[Job]) -> None:
        if jobs:
            ids = [job.id for job in jobs]
            self._run(("scancel", *ids), SUBMITS_WITHIN_S, TryAgainError)
            with suppress(DilocoError):  # they have ended, or read no key any more: keys do not lie about
                words = ("squeue", "-h", "-t", "all", "-j", ",".join(ids), "-O", "StdOut:4096")
                script = FORGET.format(logs=shlex.join(words))
                self._run(("bash", "-s"), ANSWERS_WITHIN_S, TryAgainError, script)

    def hasten(self, jobs: Collection[Job]) -> None:
        """Lift what holds a requeued job back. Where a site does not let its user, the job waits its two minutes."""
        for job in jobs:
            if job.why.startswith("BeginTime"):
                with suppress(DilocoError):
                    words = ("scontrol", "update", f"jobid={job.id}", "StartTime=now")
                    self._run(words, ANSWERS_WITHIN_S, TryAgainError)

    def preempt(self, job: Job) -> None:
        self._run(("scontrol", "requeue", job.id), ANSWERS_WITHIN_S, RefusedError)

    def run_in(self, job: Job, words: Sequence[str], within_s: float) -> str:
        step = ("srun", f"--jobid={job.id}", "--overlap", "--nodes=1", "--ntasks=1", "--relative=0", "--export=NIL")
        if not self.sees_files:  # its commands are found as in the job: since then diloco may have been brought anew
            words = ("/bin/bash", "-c", f'{{\n{self._setup_of(job)}\n}} > /dev/null\nexec "$@"', "bash", *words)
        return self._run((*step, *words), within_s, RefusedError)

    def _setup_of(self, job: Job) -> str:
        """What its script has of `render` before its command, without lines of the user, which may work and write."""
        script = self._run(("scontrol", "write", "batch_script", job.id, "-"), ANSWERS_WITHIN_S, RefusedError)
        return "\n".join([":", *(line for line in script.splitlines() if line.endswith(BESIDE))])

    def _run(self, words: tuple[str, ...], within_s: float, refusal: type[DilocoError], given: str = "") -> str:
        return run_tool(words, given, within_s=within_s, refusal=refusal, via=self.via)


def queue_again() -> None:
    """From inside a job: it goes back into the queue, and is ended here. Raises TryAgainError if Slurm refuses."""
    number = environment_value(JOB_VARIABLE)
    if number is not None:
        run_tool(("scontrol", "requeue", number), within_s=ANSWERS_WITHIN_S, refusal=TryAgainError)
