"""ssh: hosts without a scheduler, by the user's own ssh and its config. A unit is started apart, so it outlives the
connection, in a folder of its own on that host, which has its `log` and its `key`, and says how it is:

    lock    held while it lives: at most one of a name does; nobody needs to trust a number of a process for that
    lease   the number of its process, the id of the host's boot, and the URL of its run
    status  how it ended; without it, and with the lock free, it was killed, or the host was restarted

A host that cannot be reached says nothing of its units: they were not asked.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from diloco_cli import __version__
from diloco_cli.engines.port import Job, JobSpec, JobState, LogCommands, job_names
from diloco_cli.engines.tool import over_ssh, run_tool
from diloco_cli.engines.wheel import HINT, bring, found_there, setup_line
from diloco_cli.errors import DilocoError, RefusedError, TryAgainError, UsageError
from diloco_cli.signing import KEY_FILE_VARIABLE
from diloco_cli.store.url import parse_url

ANSWERS_WITHIN_S = 15.0
STARTS_WITHIN_S = 60.0
ENDS_WITHIN_S = 30  # of SIGTERM: `diloco unit` is done before
FOLDERS = """\
jobs=~/.local/state/diloco/jobs/"$(uname -n)"
"""
UNIT = """\
#!/bin/bash
# {unit}, started by diloco on {host}, apart from its connection
exec 9>> lock
flock -w 5 9 || exit 9
job=$PWD
read -r boot < /proc/sys/kernel/random/boot_id
trap : HUP INT TERM USR2
rm -f status
printf '%s\\n' "$$ $boot "{run} > lease.new && mv lease.new lease
cd
eval {setup} 9>&-
cd -- {directory} &&
{key}{command}
echo $? > "$job/status"
rm -f "$job/key"
"""
IN_JOB = """\
cd "$jobs" || exit 1
lease=$(grep -l "^{pid} " -- *-{unit}/lease)
[ -f "${{lease%lease}}unit" ] || {{ echo "no folder, or two, of unit "{unit}" with process {pid}" >&2; exit 1; }}
setup=$(grep "^eval " -- "${{lease%lease}}unit")
cd
eval "$setup" > /dev/null < /dev/null
"""
AT_HOME = """\
cd
eval {setup} > /dev/null < /dev/null
"""
THERE = "cd -- {directory} || exit 1\n"
NO_BUCKET = "no bucket"
VERSION = f"""\
{AT_HOME}[ -d {{bucket}} ] || exec echo {{no_bucket}}
{{found}}{THERE}exec diloco --version
"""
TOOLS = """\
for tool in flock setsid; do
  command -v $tool > /dev/null || { echo "there is no command $tool, of util-linux" >&2; exit 1; }
done
read -r boot < /proc/sys/kernel/random/boot_id || exit 1
"""
START = """\
umask 077
mkdir -p "$jobs"/{name} && cd "$jobs"/{name} || exit 1
exec 8< . && flock 8 || exit 1  # one after the other
if flock -sw {ends_s} lock true; then
  rm -f lease status
  printf %s {unit} > unit.new && mv unit.new unit || exit 1
  [ -z {key} ] || {{ printf %s {key} > key.new && mv key.new key; }} || exit 1
  setsid -f bash unit 8>&- < /dev/null >> log 2>&1 || exit 1
fi
for i in {{1..100}}; do [ -f lease ] && break; sleep 0.1; done
read -r pid rest < lease && echo "$pid"
"""
LOOK = """\
cd "$jobs" 2> /dev/null || exit 0
read -r now < /proc/sys/kernel/random/boot_id
for job in {prefix}*; do
  read -r pid boot run 2> /dev/null < "$job/lease" || continue
  if ! flock -sn "$job/lock" true; then word=lives
  elif ! read -r word 2> /dev/null < "$job/status"; then [ "$boot" = "$now" ] && word=killed || word=restarted
  fi
  echo "$job|$pid|$word|$run"
done
"""
CANCEL = """\
cd "$jobs" || exit 1
for pid in {pids}; do
  for job in $(grep -l "^$pid " */lease); do
    lock=${{job%/lease}}/lock
    flock -sn "$lock" true && continue
    kill -TERM -- "-$pid"
    setsid -f bash -c 'flock -sw {ends_s} "$1" true || {{ rm -f "${{1%lock}}key"; kill -KILL -- "-$0"; }}' \
      "$pid" "$lock" < /dev/null > /dev/null 2>&1
  done
done
"""
ENDINGS = {
    "0": (JobState.ENDED, "the run is over"),
    "143": (JobState.ENDED, "it was asked to leave"),
    "killed": (JobState.GONE, "its process was killed"),
    "restarted": (JobState.GONE, "the host was restarted"),
    "9": (JobState.FAILED, "another process has its place"),
}


def render(spec: JobSpec, host: str, setup: str, directory: str) -> str:
    """The script that keeps the unit's place on the host, and runs it."""
    key = "" if spec.key is None else f'{KEY_FILE_VARIABLE}="$job/key" '
    words = {"unit": spec.unit, "host": host, "run": spec.run, "setup": setup or ":", "directory": directory}
    if bad := [word for word in (*words.values(), *spec.command) if not word.isprintable()]:
        raise UsageError(f"control characters cannot stand in a script: {bad[0]!a}", where=spec.unit)
    quoted = {name: shlex.quote(word) for name, word in words.items()}
    return UNIT.format(**quoted, key=key, command=shlex.join(spec.command))


def check_installed(host: str, setup: str, directory: str, install: str | None, spec: JobSpec, tools: str = "") -> None:
    """Raises UsageError, in its own words, if `diloco` there is none, another version, or cannot be run (where it is to
    be installed first: if that cannot begin), and if the bucket is a folder that is not there, as far as it is on this
    machine already."""
    is_folder = spec.run.startswith("file:") and f"--run={spec.run}" in spec.command
    bucket = Path(parse_url(spec.run).place if is_folder else "/")
    while not bucket.is_dir():
        bucket = bucket.parent
    words = {
        "setup": shlex.quote(setup or ":"),
        "directory": shlex.quote(directory),
        "bucket": shlex.quote(str(bucket)),
        "found": found_there(directory, install),
    }
    hint = f"what it is there: ssh {host} \"bash -lc 'diloco --version'\"; a line before it: `setup` of a site"
    hint = HINT.format(host=host) if install else f"{hint}; or have it brought: `install: wheel` of a site"
    make = f"ssh {host} mkdir -p {shlex.quote(directory)}; or another `directory` of the site"
    try:
        script = tools + VERSION.format(**words, no_bucket=NO_BUCKET)
        found = _answer(host, script)
    except DilocoError as error:
        error.where, error.hint = spec.unit, error.hint or (make if f" cd: {directory}: " in error.message else hint)
        raise
    if found == NO_BUCKET:
        hint = f"store: {{url: gs://...}}, or a folder that {host} sees, too"
        raise UsageError(f"ssh {host}: the folder of the bucket is not there: {bucket}", where=spec.unit, hint=hint)
    if found != __version__:
        raise UsageError(f"ssh {host}: diloco there is {found[:40]!a}, here {__version__}", where=spec.unit, hint=hint)


@cache
def _answer(host: str, script: str) -> str:
    return run_tool(("bash", "-s"), script, within_s=STARTS_WITHIN_S, refusal=UsageError, via=host).strip()


def tails_of(logs: Mapping[str, str], lines: int, follow: bool) -> str:
    """The script of bash that prints these logs, by unit, as `Engine.log_words` says. What is followed ends with its
    stdin: nobody else would end it there."""
    script = "own= code=0\n"
    for unit, log in logs.items():
        marked = f'while IFS= read -r line || [ -n "$line" ]; do printf "%s|%s\\n" {shlex.quote(unit)} "$line"; done'
        mark = f" > >({marked})" if len(logs) > 1 else ""
        path = shlex.quote(log)
        script += f'tail -n {lines} -F -- {path} 2> /dev/null{mark} & own+=" $!"\n' if follow else ""
        script += "" if follow else f"tail -n {lines} -- {path}{mark} || code=1\nwait $!\n"
    return script + ("cat > /dev/null; kill $own\n" if follow else "exit $code\n")


def read_jobs(text: str, run: str, run_name: str, engine: str) -> list[Job]:
    """The jobs of the run at this URL in what the host said."""
    prefix, found = job_names(run_name, run), []
    for line in text.splitlines():
        columns = line.split("|", 3)
        if len(columns) == 4 and columns[0].startswith(prefix) and columns[3] == run:
            name, pid, word, _ = columns
            state, why = JobState.RUNNING, ""
            if word != "lives":
                signal = int(word) - 128 if word.isdigit() else 0
                failed = f"killed by signal {signal}" if signal > 0 else f"status {word}: its log says why"
                state, why = ENDINGS.get(word, (JobState.FAILED, failed))
            found.append(Job(name.removeprefix(prefix), engine, pid, state, why))
    return found


@dataclass(frozen=True)
class Ssh:
    """`host`: as in `ssh HOST`; `setup`: a line before `diloco`; `directory`: its working directory, from its home;
    `install`: as of a site."""

    name: str
    host: str
    setup: str = ""
    directory: str = "."
    install: str | None = None
    sees_files = False
    cluster = ""
    may_change = re.compile("eval |cd -- ")

    def render(self, spec: JobSpec) -> str:
        return render(spec, self.host, setup_line(self.setup, self.directory, self.install), self.directory)

    def check(self, spec: JobSpec) -> None:
        if spec.nodes > 1:
            raise UsageError(
                f"{spec.unit} has {spec.nodes} nodes: by ssh an island is one host",
                where=spec.infra,
                hint="infra: ssh without /HOST, and start it there by hand; or a scheduler",
            )
        check_installed(self.host, self.setup, self.directory, self.install, spec, TOOLS)

    def make_ready(self, tell: Callable[[str], None]) -> None:
        if self.install is not None:
            bring(self.host, self.setup, self.directory, self.install, tell)

    def submit(self, spec: JobSpec, key: str | None = None) -> Job:
        words = {"name": spec.name, "unit": spec.text or self.render(spec), "key": key or ""}
        script = START.format(**{k: shlex.quote(v) for k, v in words.items()}, ends_s=ENDS_WITHIN_S)
        pid = self._run(script, STARTS_WITHIN_S, UsageError).strip()
        if not pid:
            raise UsageError(f"ssh {self.host}: it did not start", where=spec.unit, hint="diloco logs")
        return Job(spec.unit, self.name, pid, JobState.RUNNING)

    def jobs(self, run: str, run_name: str, within_s: float = ANSWERS_WITHIN_S) -> list[Job]:
        script = LOOK.format(prefix=shlex.quote(job_names(run_name, run)))
        return read_jobs(self._run(script, within_s, TryAgainError, login=False), run, run_name, self.name)

    def log_words(self, run: str, run_name: str, units: Sequence[str], lines: int, follow: bool) -> LogCommands:
        logs = {unit: f"{job_names(run_name, run)}{unit}/log" for unit in units}
        script = f'{FOLDERS}cd "$jobs" || exit 1\n{tails_of(logs, lines, follow)}'
        return {tuple(units): over_ssh(self.host, ("bash", "-c", script), login=False)}

    def cancel(self, jobs: Collection[Job]) -> None:
        pids = " ".join(job.id for job in jobs if job.id.isdigit())
        script = CANCEL.format(pids=pids, ends_s=ENDS_WITHIN_S)
        self._run(script, ANSWERS_WITHIN_S, TryAgainError, login=False)

    def hasten(self, jobs: Collection[Job]) -> None:
        """Nothing holds them back."""

    def preempt(self, job: Job) -> None:
        raise RefusedError(f"nothing preempts units on {self.host}", hint=f"diloco chaos kill {job.unit}")

    def run_in(self, job: Job, words: Sequence[str], within_s: float) -> str:
        """With what the job's own script has set up: since then diloco may have been brought anew."""
        own = {"pid": job.id, "unit": shlex.quote(job.unit), "directory": shlex.quote(self.directory)}
        return self._run((IN_JOB + THERE).format(**own) + f"exec {shlex.join(words)}\n", within_s, RefusedError)

    def _run(self, script: str, within_s: float, refusal: type[DilocoError], login: bool = True) -> str:
        words = ("bash", "-s")
        return run_tool(words, FOLDERS + script, within_s=within_s, refusal=refusal, via=self.host, login=login)
