"""What is submitted, what is taken back, what is cancelled: by a Slurm that is played."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_cli.cli import jobs
from diloco_cli.cli.jobs import (
    EngineWords,
    JobNews,
    JobWatch,
    asked,
    end_jobs,
    hasten,
    job_of,
    job_spec,
    jobs_before,
    just_typed,
    log_commands,
    make_ready,
    name_partitions,
    run_beside,
    specs_of,
    submit_missing,
)
from diloco_cli.cli.operators import stop
from diloco_cli.clock import sleep_s
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import ModelSettings, Site
from diloco_cli.engines import sites, slurm
from diloco_cli.engines.files import write_job_files
from diloco_cli.engines.port import Engine, Job, JobSpec, JobState, LogCommands, job_names
from diloco_cli.errors import RefusedError, StoreError, TryAgainError, UsageError
from diloco_cli.observe.screen import job_lines
from diloco_cli.plan.plan import SyncerNeeds
from diloco_cli.protocol.log.records import RegionStore, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime import units
from diloco_cli.runtime.processes import TOKEN_VARIABLE
from diloco_cli.runtime.registry import log_files, note_sites, remember_run, run_directory, sites_of
from diloco_cli.runtime.units import units_of
from diloco_cli.signing import Secret
from diloco_cli.store.memory import MemoryStore
from tests.cli.bucket import IOWA, NANO, RHINE, make_bucket

URL = "gs://bkt/runs/nano"
RUN = replace(NANO, home_region="us", islands=(replace(IOWA, infra="slurm/us"), replace(RHINE, infra="slurm/eu")))
FOLDER = job_names("nano", URL) + "jobs"  # each run's own
NAMES = ["iowa", "rhine", "syncer-0", "syncer-1"]
SUBMITTED = ["syncer-0", "iowa", "rhine", "syncer-1"]  # in a queue that islands fill, no syncer would come after them
ID = {"iowa": "71", "rhine": "72", "syncer-0": "73", "syncer-1": "74"}


class PlayedSlurm:
    """`queue`: [state, reason] by unit; `refuses`: the unit whose job is refused, at which of sbatch's options."""

    def __init__(self) -> None:
        self.queue: dict[str, list[str]] = {}
        self.texts: dict[str, str] = {}
        self.calls: list[tuple[str, ...]] = []
        self.url, self.user, self.controller = URL, os.getuid(), "a"
        self.loses = ""  # the unit whose job it takes without saying so in time
        self.refuses: tuple[str, str] = ("", "")
        self.answers = True
        self.ends = False  # jobs see the stop, and end

    def run(
        self,
        words: Sequence[str],
        given: str = "",
        *,
        within_s: float,
        refusal: type[Exception],
        via: str | None = None,
    ) -> str:
        if not self.answers:
            raise TryAgainError(f"{words[0]} did not answer within {within_s:g} s")
        if tuple(words) == ("scontrol", "show", "config"):
            return f"ClusterName = lab\nSlurmctldHost[0] = {self.controller}(10.0.0.1)"
        if words[0] == "squeue":
            mine = f"{self.user}|diloco {self.url}"
            begin = job_names("nano", self.url)
            lines = [f"{ID[u]}|{begin}{u}|{s}|{r}||{mine}" for u, (s, r) in self.queue.items()]
            if self.ends:
                over = ("RUNNING", "COMPLETING")
                self.queue = {u: ["COMPLETED" if s in over else s, r] for u, (s, r) in self.queue.items()}
            return "\n".join(lines)
        unit = (re.findall(r"^#SBATCH --job-name=diloco-nano-\w{6}-(\S+)", given, re.M) or [""])[0]
        if self.refuses == (unit, words[1]):
            raise refusal("sbatch: no such thing")
        self.texts[unit] = given
        self.calls.append((*words, unit) if unit else tuple(words))
        if words[1] == "--parsable":
            self.queue[unit] = ["PENDING", "None"]
            if unit == self.loses:
                self.queue["syncer-1"] = ["RUNNING", "None"]  # somebody else resumes the run, too
                raise TryAgainError("sbatch did not answer within 30 s")
        return f"{ID.get(unit, '')}\n"

    def submitted(self) -> list[str]:
        return [call[-1] for call in self.calls if call[1] == "--parsable"]

    def cancelled(self) -> list[tuple[str, ...]]:
        return [call[1:] for call in self.calls if call[0] == "scancel"]


@pytest.fixture(autouse=True)
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was launched from this machine, which keeps nothing of it for other tests."""
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    note_sites(URL, dict.fromkeys(("slurm/us", "slurm/eu", "other/x", "other/us", "other/eu")))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedSlurm:
    found = PlayedSlurm()
    slurm._there.cache_clear()
    monkeypatch.setattr(slurm, "run_tool", found.run)
    monkeypatch.setattr(slurm, "tool_directory", lambda name: Path("/opt/slurm/bin"))
    monkeypatch.setattr(jobs, "LOOKS_EVERY_S", 0.0)
    return found


def opened(run: RunFormat = RUN, stands: bool = False, store: MemoryStore | None = None) -> Any:
    return SimpleNamespace(
        format=run, store=store or MemoryStore(), url=URL, name=run.name, word="nano", perform=lambda steps: stands
    )


def submit(folder: Path, run: RunFormat = RUN, stands: bool = False) -> list[str]:
    """`stands`: a stop that nobody has withdrawn yet."""
    return [job.unit for job in submit_missing(opened(run), units_of(run, URL), folder, known_before(run, stands))]


def known_before(run: RunFormat = RUN, stands: bool = False) -> EngineWords:
    return jobs_before(opened(run, stands), RunState(), units_of(run, URL))


def test_each_unit_without_a_job_that_lives_is_submitted_once(played: PlayedSlurm, tmp_path: Path) -> None:
    assert submit(tmp_path) == NAMES and played.submitted() == SUBMITTED
    logs = {unit: path.resolve() for unit, path in log_files(URL).items()}
    assert logs == {name: tmp_path / FOLDER / f"{name}.log" for name in NAMES}, "`diloco logs` finds them"
    assert submit(tmp_path) == NAMES and played.submitted() == SUBMITTED
    played.queue |= {"rhine": ["CANCELLED", "None"], "iowa": ["PENDING", "BeginTime"]}
    assert submit(tmp_path) == NAMES and played.submitted() == [*SUBMITTED, "rhine"]
    assert [call[1] for call in played.calls if call[0] == "scontrol"] == ["update"], "the requeued one waits no more"


@pytest.mark.parametrize("option", ["--test-only", "--parsable"])
def test_where_one_is_refused_none_is_left_behind(played: PlayedSlurm, tmp_path: Path, option: str) -> None:
    played.refuses = ("rhine", option)
    with pytest.raises(UsageError, match=r"^rhine \(slurm/eu\): sbatch: no such thing$") as error:
        submit(tmp_path)
    assert "it asks for 1 x (1 cores, 0 GPUs, ? GB); what nodes have: sinfo" in str(error.value.hint)
    assert played.submitted() == (["syncer-0", "iowa"] if option == "--parsable" else [])
    assert played.cancelled() == ([("71", "73")] if option == "--parsable" else [])


@pytest.mark.parametrize("refused", [False, True])
def test_what_an_engine_has_taken_without_saying_so_is_taken_back_too_or_told(
    played: PlayedSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: bool
) -> None:
    played.loses = "rhine"
    played.refuses = ("", "71") if refused else ("", "")
    with pytest.raises(TryAgainError, match="sbatch did not answer"):
        submit(tmp_path)
    said = capsys.readouterr().err
    if refused:
        assert "jobs may be left (73, 71): " in said and "diloco stop nano" in said
    else:
        assert played.cancelled() == [("71", "72", "73")]
        assert "run nano exists, and has none of these jobs; once this is mended: diloco resume nano" in said


def test_jobs_of_another_user_are_neither_doubled_nor_cancelled(played: PlayedSlurm, tmp_path: Path) -> None:
    played.user += 1
    played.queue = {"iowa": ["RUNNING", "None"], "rhine": ["PENDING", "None"]}
    with pytest.raises(RefusedError, match=f"another user, {played.user}: iowa, rhine"):
        submit(tmp_path)
    assert end_jobs(opened(), 0.0) == [] and not played.calls


def test_jobs_are_submitted_from_where_they_were_before_wherever_that_is_asked_for(
    played: PlayedSlurm, tmp_path: Path
) -> None:
    submit(tmp_path)
    played.queue["rhine"] = ["FAILED", "None"]
    submit_missing(opened(), units_of(RUN, URL), None, known_before())
    again = [call for call in played.calls if call[-1] == "rhine" and call[1] == "--parsable"]
    assert len(again) == 2 and f"--chdir={tmp_path}" in again[-1]


def test_a_sites_directory_has_its_logs_and_is_no_place_for_others(
    played: PlayedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Site(engine="slurm", directory=f"{tmp_path}/lab")
    monkeypatch.setattr(jobs, "sites_of", lambda url: {"slurm/us": lab, "slurm/eu": None})
    submit(tmp_path / "here")
    places = dict.fromkeys(NAMES, "lab") | {"rhine": "here", "syncer-1": "here"}
    logs = {unit: path.resolve() for unit, path in log_files(URL).items()}
    assert logs == {unit: tmp_path / place / FOLDER / f"{unit}.log" for unit, place in places.items()}
    played.queue["rhine"] = ["FAILED", "None"]
    submit_missing(opened(), units_of(RUN, URL), None, known_before())
    assert f"--chdir={tmp_path}/here" in [call for call in played.calls if call[-1] == "rhine"][-1]


def test_what_a_job_cannot_do_without_is_said_where_no_variable_of_the_user_counts_more(
    played: PlayedSlurm, tmp_path: Path
) -> None:
    submit(tmp_path)
    call = next(call for call in played.calls if call[-1] == "rhine")
    assert {f"--job-name={job_names('nano', URL)}rhine", "--partition=eu", "--requeue", "--export=NIL"} < set(call)


def test_edited_texts_are_submitted_and_sbatchs_own_words_leave_what_they_change(
    played: PlayedSlurm, tmp_path: Path
) -> None:
    units = units_of(RUN, URL)
    write_job_files(tmp_path / "jobs", specs_of(opened(), units, tmp_path).values(), RUN.plan)
    path = tmp_path / "jobs" / "rhine.slurm"
    path.write_text(path.read_text().replace("--partition=eu", "--partition=a100"))
    submit_missing(opened(), units, tmp_path, jobs_before(opened(), RunState(), units), tmp_path / "jobs")
    assert played.submitted() == SUBMITTED and "--partition=a100" in played.texts["rhine"]
    call = next(call for call in played.calls if call[-1] == "rhine")
    assert "--requeue" in call and not [word for word in call if word.startswith("--partition")]


def test_what_jobs_do_not_get_of_a_shell_is_said(
    played: PlayedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if jobs.SHELLS_OWN.fullmatch(name)]:
        monkeypatch.delenv(name)
    submit(tmp_path)
    assert "warning" not in capsys.readouterr().err
    for name in ("AWS_ENDPOINT_URL", "HF_TOKEN", "https_proxy", "DILOCO_ALLOW_HTTP", "no_proxy"):
        monkeypatch.setenv(name, "x")
    played.queue["iowa"] = ["FAILED", "None"]
    submit(tmp_path)
    said = capsys.readouterr().err
    assert "do not get AWS_ENDPOINT_URL, DILOCO_ALLOW_HTTP, HF_TOKEN, https_proxy of this shell" in said
    assert "in `setup` of a site" in said and "submitted 1 job;" in said


def test_a_command_runs_beside_a_unit_in_its_job_and_says_why_it_could_not(
    played: PlayedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.queue = {"iowa": ["RUNNING", "None"], "rhine": ["PENDING", "Resources"]}
    found = job_of(opened(), "iowa")
    assert found is not None and job_of(opened(), "mars") is None
    words = ("chaos", "kill", "iowa")
    assert run_beside(*found, words, 1.0) == "\n"
    call = played.calls[-1]
    assert call[:3] == ("srun", "--jobid=71", "--overlap") and "--relative=0" in call and "--export=NIL" in call
    assert call[-8:] == ("diloco_cli", "unit", "iowa", f"--run={URL}", "--", *words)
    for name, why in (("rhine", "QUEUED Resources"), ("syncer-0", "it has none")):
        with pytest.raises(RefusedError, match=f"the job of {name} does not run here: {why}"):
            job_of(opened(), name)
    said = "srun: would kill; error: iowa is dead; hint: wait; srun: error: us0: task 0: Exited with exit code 8"
    for text, message, hint in ((said, "iowa is dead", "wait"), ("srun: error: no such job", "no such job", None)):
        monkeypatch.setattr(slurm, "run_tool", lambda *given, text=text, **others: raise_refused(text))
        with pytest.raises(RefusedError) as error:
            run_beside(*found, words, 1.0)
        assert (error.value.message, error.value.hint) == (message, hint)


def raise_refused(text: str) -> None:
    raise RefusedError(text)


def test_a_job_of_another_user_is_not_acted_on(played: PlayedSlurm) -> None:
    played.user += 1
    played.queue = {"iowa": ["RUNNING", "None"]}
    with pytest.raises(RefusedError, match=f"of user {played.user}"):
        job_of(opened(), "iowa")


def test_a_silent_engine_is_told_and_nothing_is_submitted(played: PlayedSlurm, tmp_path: Path) -> None:
    played.answers = False
    with pytest.raises(TryAgainError) as error:
        submit(tmp_path)
    assert error.value.hint == "nothing was submitted; once it answers: diloco resume nano"
    assert asked(opened()) == ([], "jobs: not asked: squeue did not answer within 2 s")


class OtherEngine:
    """One that holds its jobs in memory, and fails on demand."""

    name, sees_files, cluster, may_change = "other", False, "", re.compile("#")

    def __init__(self) -> None:
        self.held: dict[str, Job] = {}
        self.fails = False
        self.checks = list[str]()

    def render(self, spec: JobSpec) -> str:
        return ""

    def check(self, spec: JobSpec) -> None:
        self.checks.append(f"{spec.unit} begins")
        sleep_s(0.01)
        self.checks.append(f"{spec.unit} ends")

    def submit(self, spec: JobSpec, key: str | None = None) -> Job:
        if self.fails:
            raise UsageError("other: no such thing")
        return self.held.setdefault(spec.unit, Job(spec.unit, self.name, spec.command[0], JobState.RUNNING))

    def jobs(self, run: str, run_name: str, within_s: float = 0.0) -> list[Job]:
        if self.fails:
            raise TryAgainError("other did not answer")
        return list(self.held.values())

    def cancel(self, jobs: Collection[Job]) -> None:
        for job in jobs:
            del self.held[job.unit]

    def hasten(self, jobs: Collection[Job]) -> None: ...

    def preempt(self, job: Job) -> None: ...

    def run_in(self, job: Job, words: Sequence[str], within_s: float) -> str:
        return ""

    def log_words(self, run: str, run_name: str, units: Sequence[str], lines: int, follow: bool) -> LogCommands:
        return {}


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OtherEngine:
    found = OtherEngine()
    engines: dict[str, Engine] = {"other": found}
    monkeypatch.setitem(sites.KINDS, "other", lambda place, site: engines["other"])
    monkeypatch.setattr(units, "ENGINES", frozenset({"slurm", "other"}))
    return found


BOTH = replace(RUN, islands=(RUN.islands[0], replace(RHINE, infra="other/x")))  # the syncers: one in each


def test_each_unit_is_a_job_of_its_own_engine_and_all_are_taken_back_together(
    played: PlayedSlurm, other: OtherEngine, tmp_path: Path
) -> None:
    other.fails = True
    with pytest.raises(UsageError, match="other: no such thing"):
        submit_missing(opened(BOTH), units_of(BOTH, URL), tmp_path, EngineWords([], {}))
    assert played.submitted() == ["syncer-0", "iowa"] and played.cancelled() == [("71", "73")]
    other.fails = False
    assert submit(tmp_path, BOTH) == NAMES and sorted(other.held) == ["rhine", "syncer-1"]
    assert other.held["rhine"].id == "diloco", "found by its name where jobs do not see this machine's files"
    assert end_jobs(opened(BOTH), 0.0) == NAMES and not other.held


def test_an_engine_is_asked_for_one_shape_after_the_other(other: OtherEngine, tmp_path: Path) -> None:
    """A host takes few connections at a time."""
    run = replace(
        RUN,
        islands=tuple(
            replace(i, infra="other/x", num_accelerators=n) for i, n in zip(RUN.islands, (1, 4), strict=True)
        ),
    )
    submit(tmp_path, run)
    looks = [f"{unit} {word}" for unit in ("syncer-1", "iowa", "rhine") for word in ("begins", "ends")]
    assert other.checks == looks


def test_a_place_of_several_sites_gets_diloco_once(monkeypatch: pytest.MonkeyPatch) -> None:
    brought, brings = list[str](), Site("slurm", "ssh login", "/x", install="wheel")

    def engine_of(infra: str, site: Site) -> SimpleNamespace:
        return SimpleNamespace(name=infra, make_ready=lambda tell: brought.append(str(site.directory)))

    monkeypatch.setattr(jobs, "engine_of", engine_of)
    sites = {
        "slurm/lab": brings,
        "slurm/gpu": replace(brings, options={"partition": "gpu"}),
        "slurm/other": replace(brings, directory="/y"),
        "slurm/has-it": replace(brings, directory="/z", install=None),
        "slurm/here": None,
    }
    make_ready(SimpleNamespace(infra=infra, site=site) for infra, site in sites.items())
    assert sorted(brought) == ["/x", "/y"]


def test_two_sites_of_one_cluster_have_each_job_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"iowa": "7", "rhine": "8", "syncer-0": "9", "guest": "10"}

    def cluster(place: str, site: object) -> Any:
        name = f"other/{place}"
        return SimpleNamespace(
            name=name, jobs=lambda *of: [Job(unit, name, id, JobState.RUNNING) for unit, id in here.items()]
        )

    monkeypatch.setitem(sites.KINDS, "other", cluster)
    monkeypatch.setattr(units, "ENGINES", frozenset({"other"}))
    run = replace(RUN, islands=tuple(replace(i, infra=f"other/{i.region}") for i in RUN.islands))
    found, _ = asked(opened(run))
    engines = {job.unit: job.engine for job in found}
    assert len(found) == 4 and engines.pop("guest") in ("other/us", "other/eu")
    assert engines == {"iowa": "other/us", "rhine": "other/eu", "syncer-0": "other/us"}


def test_all_engines_are_told_at_once_and_one_that_fails_holds_up_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told, all_are = list[str](), threading.Barrier(2, timeout=60.0)

    def cluster(place: str, site: object) -> Any:
        def hasten(own: list[Job]) -> None:
            all_are.wait()
            told.extend(job.unit for job in own)
            if place == "us":
                raise TryAgainError("it did not answer")

        return SimpleNamespace(name=f"other/{place}", hasten=hasten)

    monkeypatch.setitem(sites.KINDS, "other", cluster)
    with pytest.raises(TryAgainError, match="did not answer"):
        hasten(URL, [Job(unit, f"other/{unit}", "7", JobState.QUEUED) for unit in ("us", "eu")])
    assert sorted(told) == ["eu", "us"]


@pytest.mark.parametrize("silent", ["slurm", "other"])
def test_an_engine_that_does_not_answer_holds_up_nothing_of_the_others(
    played: PlayedSlurm, other: OtherEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], silent: str
) -> None:
    submit(tmp_path, BOTH)
    played.queue.pop("iowa")
    other.held.pop("rhine")
    played.answers, other.fails = silent != "slurm", silent == "other"
    jobs, trouble = asked(opened(BOTH))
    words = {"slurm": "squeue did not answer within 2 s", "other": "other did not answer"}
    assert trouble == f"jobs: not asked: {words[silent]}"
    mine, gone = ("syncer-1", "rhine") if silent == "slurm" else ("syncer-0", "iowa")
    assert [(job.unit, job.lives) for job in jobs] == [(mine, True), (gone, False)]
    assert sorted(submit(tmp_path, BOTH)) == sorted([mine, gone])
    left = "iowa, syncer-0" if silent == "slurm" else "rhine, syncer-1"
    assert f"left alone: {left}; then: diloco resume nano" in capsys.readouterr().err
    assert end_jobs(opened(BOTH), 0.0) == sorted([mine, gone])


def test_an_engine_that_is_away_for_an_hour_is_told_once_and_what_changed_meanwhile(
    played: PlayedSlurm, other: OtherEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked every ten seconds, for two at most: nothing else waits for it, and no unit is said to have ended."""
    submit(tmp_path, BOTH)
    now_s, said, asked_of = 0.0, list[str](), list[float]()

    def away(words: Sequence[str], given: str = "", *, within_s: float, **others: Any) -> str:
        asked_of.append(within_s)
        raise TryAgainError("squeue: Unable to contact slurm controller")

    monkeypatch.setattr(jobs, "monotonic_s", lambda: now_s)
    watch = JobWatch(opened(BOTH), JobNews(asked(opened(BOTH))[0], said.append))
    assert len(watch.look()) == 4 and not said
    with monkeypatch.context() as gone:
        gone.setattr(slurm, "run_tool", away)
        for second in range(3600):
            now_s = jobs.ASKED_EVERY_S + second
            assert [job.unit for job in watch.look()] == ["rhine", "syncer-1"]
    assert said == ["jobs: not asked: squeue: Unable to contact slurm controller"]
    assert {*asked_of} == {jobs.ASKED_WITHIN_S} and len(asked_of) <= 3600 / jobs.ASKED_EVERY_S
    played.queue["iowa"] = ["FAILED", "NodeFail"]
    now_s += jobs.ASKED_EVERY_S
    assert len(watch.look()) == 4 and said[1:] == ["iowa: job 71 FAILED: NodeFail"]


def test_nothing_is_asked_that_the_bucket_alone_names(
    played: PlayedSlurm, other: OtherEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_directory(URL) / "sites.json").unlink()
    other.jobs = other.check = other.submit = other.log_words = pytest.fail  # type: ignore[assignment]
    played.queue = {"rhine": ["RUNNING", "None"]}
    found, trouble = asked(opened(BOTH))
    assert found == [] and "the run's bucket alone names slurm/us, other/x: ask where it was launched" in trouble
    assert log_commands(opened(BOTH), None, 20, False) == {}
    assert "no logs of iowa, rhine, syncer-0, syncer-1: the run's bucket alone" in capsys.readouterr().err
    for unit in ("iowa", "rhine"):
        with pytest.raises(RefusedError, match="bucket alone names"):
            job_of(opened(BOTH), unit)
    with pytest.raises(RefusedError, match="bucket alone names"):
        submit(tmp_path, BOTH)
    assert end_jobs(opened(BOTH), 0.0) == [] and "bucket alone names" in capsys.readouterr().err
    assert played.calls == []


def test_a_region_that_the_user_names_is_this_machines_own_slurm(
    played: PlayedSlurm, other: OtherEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_directory(URL) / "sites.json").unlink()
    other.jobs = pytest.fail  # type: ignore[assignment]
    name_partitions(URL, BOTH, None)
    assert sites_of(URL) == {}
    name_partitions(URL, BOTH, "us")
    name_partitions(URL, BOTH, "eu")
    assert sites_of(URL) == {"slurm/us": None}, "no host and no context that the bucket could choose"
    units = units_of(BOTH, URL, "us")
    submit_missing(opened(BOTH), units, tmp_path, jobs_before(opened(BOTH), RunState(), units), by_region=True)
    assert played.submitted() == ["syncer-0", "iowa", "syncer-1"]
    submit(tmp_path, BOTH)
    assert "names other/x: ask where" in (said := capsys.readouterr().err) and "left alone: rhine; then:" in said
    remember_run(URL, ["gs://eu/nano"])
    assert sites_of(remember_run("gs://eu/nano", [URL]).url) == {"slurm/us": None}, "its notes, under another URL"


def test_what_another_cluster_was_given_is_left_alone_until_its_region_is_named(
    played: PlayedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run whose jobs wait, or work, on a Slurm of the same name, which this machine cannot ask."""
    store, heard = MemoryStore(), SimpleNamespace(age_s=1.0, heartbeat=SimpleNamespace(state="TRAINING"))
    stands = SimpleNamespace(age_s=1.0, heartbeat=SimpleNamespace(state="STANDING_BY"))
    facts = SimpleNamespace(learners={"iowa": heard}, syncer=None, standbys={"syncer-1": stands})
    monkeypatch.setattr(jobs, "boxed", lambda opened, box: SimpleNamespace(facts=lambda: facts))

    def resumed(at: str, queue: dict[str, list[str]], region: str | None = None) -> list[str]:
        """The units that are submitted there."""
        slurm._there.cache_clear()
        played.controller, played.queue, before = at, queue, len(played.submitted())
        units, run = units_of(RUN, URL, region), opened(store=store)
        before_it = jobs_before(run, RunState(), units)
        submit_missing(run, units, tmp_path, before_it, by_region=region is not None)
        return played.submitted()[before:]

    assert resumed("a", {}) == SUBMITTED
    queued = dict(played.queue)
    assert resumed("b", {}) == []
    said = capsys.readouterr().err
    assert f"iowa: {os.uname().nodename} has given it to Slurm cluster lab@a, where it works: it is left alone" in said
    assert "rhine: " in said and "cluster lab@a: it is left alone" in said and "resume nano --region REGION" not in said
    assert just_typed("us") == "us"
    with monkeypatch.context() as successor:
        successor.setenv(TOKEN_VARIABLE, "of a supervisor in the background")
        assert just_typed("us") is None, "it repeats what was typed on another day"
    assert resumed("b", {}, "us") == ["syncer-0"], "which neither serves nor stands by"
    facts.learners, facts.standbys = {}, {}
    assert (
        resumed("b", dict(played.queue)) == []
        and "to submit them here all the same: diloco resume nano" in capsys.readouterr().err
    )
    assert resumed("b", {}, "eu") == ["rhine"] and "rhine: " in capsys.readouterr().err
    del queued["rhine"]
    assert resumed("a", queued) == [] and "rhine: " in capsys.readouterr().err, "now it is the other one's"
    assert resumed("a", {}) == ["iowa", "syncer-1"], "which stands by: the other one has the other syncer"


def test_who_may_not_write_where_a_job_waits_submits_it_all_the_same(
    played: PlayedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(self: MemoryStore, key: str, data: bytes) -> None:
        raise StoreError("forbidden")

    monkeypatch.setattr(MemoryStore, "put", forbidden)
    assert submit(tmp_path) == NAMES and played.submitted() == SUBMITTED
    assert "warning: a `resume` on another Slurm will not know of rhine: forbidden" in capsys.readouterr().err


@pytest.mark.parametrize("hint", [b"{", b'{"cluster": []}', None])
def test_no_hint_and_no_slow_scontrol_holds_up_a_submission(
    played: PlayedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hint: bytes | None
) -> None:
    """Hints are for other clusters: whoever has one Slurm submits whatever is said there, or cannot be read."""

    get = MemoryStore.get

    def said(self: MemoryStore, key: str, max_bytes: int | None = None) -> bytes | None:
        if not key.startswith("hint/job/"):
            return get(self, key, max_bytes)
        if hint is None:
            raise StoreError("forbidden")
        return hint

    def late(*words: object) -> str:
        raise TryAgainError("scontrol did not answer within 15 s")

    units, run = units_of(RUN, URL, None), opened()
    before = jobs_before(run, RunState(), units)
    monkeypatch.setattr(MemoryStore, "get", said)
    submit_missing(run, units, tmp_path, before)
    assert played.submitted() == SUBMITTED
    monkeypatch.setattr(slurm, "_there", late)
    submit_missing(run, units, tmp_path, before)


def test_a_syncer_that_the_engine_of_another_region_has_is_not_submitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def cluster(place: str, site: object) -> Any:
        held = {"us": ("syncer-0", JobState.RUNNING), "eu": ("syncer-1", JobState.QUEUED)}[place]
        return SimpleNamespace(name=f"other/{place}", jobs=lambda *of: [Job(held[0], f"other/{place}", "7", held[1])])

    monkeypatch.setitem(sites.KINDS, "other", cluster)
    monkeypatch.setattr(units, "ENGINES", frozenset({"other"}))
    run = replace(RUN, islands=tuple(replace(i, infra=f"other/{i.region}") for i in RUN.islands))
    planned = units_of(run, URL, "us")
    assert {unit.name: unit.infra for unit in planned}["syncer-1"] == "other/us"
    known = jobs_before(opened(run), RunState(), planned)
    assert [(job.unit, job.engine) for job in known.jobs] == [("syncer-0", "other/us"), ("syncer-1", "other/eu")]


def test_learners_without_a_job_are_gone(played: PlayedSlurm) -> None:
    played.queue = {"iowa": ["RUNNING", "None"], "syncer-1": ["PENDING", "Resources"]}
    found, trouble = asked(opened())
    assert [(job.unit, job.state) for job in found] == [("iowa", "RUNNING"), ("syncer-1", "QUEUED"), ("rhine", "GONE")]
    assert trouble == "" and asked(opened(NANO)) == ([], ""), "a run without jobs asks nobody"
    assert job_lines(found)[1:] == [
        "iowa      slurm   71   RUNNING",
        "syncer-1  slurm   74   QUEUED   Resources: waits for free nodes",
        "rhine     slurm   -    GONE     slurm has no job of it",
    ]


@pytest.mark.parametrize(("ends", "drain_s", "cancelled"), [(True, 60.0, ["rhine"]), (False, 0.0, ["iowa", "rhine"])])
def test_after_a_stop_what_waits_is_cancelled_and_what_runs_may_end(
    played: PlayedSlurm, ends: bool, drain_s: float, cancelled: list[str]
) -> None:
    played.queue = {"iowa": ["RUNNING", "None"], "rhine": ["PENDING", "None"], "syncer-0": ["COMPLETING", "None"]}
    played.ends = ends
    assert end_jobs(opened(), drain_s) == cancelled


def test_while_a_stop_stands_what_is_left_of_the_jobs_ends_before_others_follow(
    played: PlayedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "end_jobs", lambda opened: end_jobs(opened, 0.0))
    played.queue = {"iowa": ["RUNNING", "None"], "rhine": ["COMPLETING", "None"], "syncer-0": ["PENDING", "None"]}
    submit(tmp_path, stands=True)
    assert played.submitted() == SUBMITTED and played.cancelled() == [("71", "73")]
    assert played.calls[0][0] == "scancel"


def test_a_stop_of_a_run_that_waits_in_the_queue_takes_its_jobs_out(
    played: PlayedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    played.url = make_bucket(tmp_path / "nano", RUN)
    name_partitions(played.url, RUN, "us")
    with pytest.raises(TryAgainError, match="has not begun"):
        stop(played.url, 0.0, False)
    played.queue = {name: ["PENDING", "Resources"] for name in NAMES}
    stop(played.url, 0.0, False)
    assert played.cancelled() == [("71", "72", "73", "74")]
    assert "run nano STOPPED before its first commit; begin it with: diloco resume" in capsys.readouterr().out


def spec(run: RunFormat, name: str, **given: Any) -> Any:
    unit = next(unit for unit in units_of(run, URL) if unit.name == name)
    return job_spec(run, URL, unit, Path("/f"), **given)


def test_a_job_has_the_devices_of_its_island_and_works_with_the_bucket_of_its_region() -> None:
    gpus = replace(RUN.islands[1], accelerator="H100-SXM", num_accelerators=8, ranks=8)
    cores = replace(RUN.islands[0], num_accelerators=4)
    run = replace(RUN, islands=(cores, gpus), regions=(RegionStore("eu", "s3://eu/nano"),), home_url=URL)
    assert [(s.cores, s.gpus, s.place) for s in (spec(run, "iowa"), spec(run, "rhine"))] == [(4, 0, "us"), (8, 8, "eu")]
    threads = replace(run, settings=replace(run.settings, train=replace(run.settings.train, threads=3)))
    assert [spec(threads, name).cores for name in ("iowa", "rhine")] == [4, 24]
    wide = spec(replace(RUN, islands=(replace(gpus, nodes=4), cores)), "rhine")
    assert (wide.nodes, wide.cores, wide.gpus) == (4, 2, 2), "of each node"
    assert spec(run, "rhine").run == URL and "--run=s3://eu/nano" in spec(run, "rhine").command
    assert "--allow-code" not in spec(run, "rhine").command and "--allow-code" in spec(run, "syncer-0").command
    own = replace(RUN, settings=replace(RUN.settings, model=ModelSettings(entrypoint="a:b")))
    assert spec(own, "iowa").command[-2] == "--allow-code" and spec(own, "iowa").command[-1].startswith("blake3-")
    lab = {"slurm/us": Site(engine="slurm", directory="/shared/me")}
    at_lab = spec(RUN, "iowa", sites=lab)
    assert (at_lab.folder, at_lab.log) == (Path("/shared/me"), Path("/shared/me", FOLDER, "iowa.log"))
    assert spec(RUN, "iowa").log == Path("/f", FOLDER, "iowa.log") and spec(RUN, "iowa").key is None


def test_islands_of_one_host_by_ssh_have_devices_of_their_own() -> None:
    a, b, c = (
        replace(IOWA, name=name, accelerator="RTX-4090", ranks=n, num_accelerators=n)
        for name, n in zip("abc", (1, 2, 1), strict=True)
    )
    by_ssh = [replace(island, infra="ssh/box") for island in (a, b)]
    run = replace(RUN, islands=(*by_ssh, replace(c, infra="ssh/other")))
    assert spec(run, "a").command[:3] == ("env", "CUDA_VISIBLE_DEVICES=0", "diloco")
    assert spec(run, "b").command[:3] == ("env", "CUDA_VISIBLE_DEVICES=1,2", "diloco")
    assert spec(run, "c").command[0] == spec(run, "syncer-0").command[0] == "diloco"
    slurm = replace(run, islands=tuple(replace(island, infra="slurm/us") for island in (a, b)))
    assert spec(slurm, "b").command[0] != "env", "Slurm gives them"


def test_a_job_asks_for_the_memory_that_the_plan_says_it_needs() -> None:
    gpus = replace(RUN.islands[1], accelerator="H100-SXM", num_accelerators=16, ranks=16, nodes=2)
    run = replace(RUN, islands=(RUN.islands[0], gpus))
    on_learners = replace(run, settings=replace(run.settings, syncer=replace(run.settings.syncer, on_learners=True)))
    planned = [
        SimpleNamespace(name=name, ranks=ranks, nodes=nodes, host_memory_gb_needed=20.0, memory_gb_needed=100.0)
        for name, ranks, nodes in (("iowa", 1, 1), ("rhine", 16, 2))
    ]
    needs = SyncerNeeds(40.0, 1.0, 1.0, 1.0, 4.0, calls_s=1.0, bytes_s=1.0, processor_s=2.0, busy_percent=50.0)
    plan: Any = SimpleNamespace(islands=planned, syncer=needs)
    assert [spec(run, name, plan=plan).memory_gb for name in NAMES] == [183, 54, 66, 66], "on a CPU, the model too"
    assert spec(on_learners, "rhine", plan=plan).memory_gb == 114, "it may have to serve the run"
    assert [spec(run, name).busy_cores for name in NAMES] == [None, None, 0.0, 0.0], "Kubernetes keeps less for it"
    assert [spec(run, name, plan=plan).busy_cores for name in NAMES] == [None, None, 0.375, 0.375], "it waits for calls"
    assert (
        spec(run, "iowa").memory_gb == spec(run, "iowa", plan=SimpleNamespace(islands=(), syncer=None)).memory_gb == 0
    )


def test_a_job_of_a_signed_run_gets_a_key_of_its_own(
    played: PlayedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = Secret("o" * 32, "here")
    run = replace(RUN, signing=secret.signing())
    monkeypatch.setattr(jobs, "signing_secret", lambda: secret)
    submit(tmp_path, run)
    keys = sorted((tmp_path / FOLDER).glob("*.key"))
    assert [path.stem for path in keys] == NAMES and {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    texts = [path.read_text() for path in keys]
    assert len(set(texts)) == len(NAMES) and not any("o" * 32 in text for text in texts)
    assert Secret(texts[0], "there").operator == secret.operator and not Secret(texts[0], "there").is_operators
    monkeypatch.setattr(jobs, "signing_secret", lambda: None)
    played.queue.clear()
    with pytest.raises(UsageError, match="submit its jobs with the operator's key"):
        submit(tmp_path, run)


def test_what_changes_is_said_once_and_what_is_held_back_is_hastened(played: PlayedSlurm) -> None:
    job, said = Job("iowa", "slurm", "7", JobState.RUNNING, "", "n1"), list[str]()
    news = JobNews([job], said.append)
    news([job], "")
    queued = replace(job, state=JobState.QUEUED, why="BeginTime: later", node="")
    for _ in range(2):
        news([queued], "")
        news([], "jobs: not asked: squeue")
    assert said == ["iowa: job 7 QUEUED: BeginTime: later", "jobs: not asked: squeue", "jobs: not asked: squeue"]
    hasten(URL, [job, queued])
    assert played.calls == [("scontrol", "update", "jobid=7", "StartTime=now")]


def test_a_table_of_jobs() -> None:
    job = Job("iowa", "slurm", "7", JobState.RUNNING, "", "n1")
    assert job_lines([]) == [] and job_lines([job])[1] == "iowa  slurm   7    RUNNING  n1"
