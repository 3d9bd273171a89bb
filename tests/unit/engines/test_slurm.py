"""Batch scripts byte by byte, and what squeue's lines mean."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco_cli import __version__
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import Site
from diloco_cli.engines import slurm, ssh
from diloco_cli.engines.port import Job, JobSpec, JobState, job_names
from diloco_cli.engines.sites import engine_of
from diloco_cli.engines.slurm import STATES, WAITS_FOR_STEP, Slurm, read_queue, render, step
from diloco_cli.errors import UsageError

ME = "1000"
GOLDEN = Path(__file__).parent / "golden"
RUN = "gs://b/runs/nano"
IOWA = JobSpec(
    run=RUN,
    run_name="nano",
    unit="iowa",
    infra="slurm/h100",
    command=("/env/bin/python", "-P", "-m", "diloco_cli", "unit", "iowa", f"--run={RUN}"),
    folder=Path("/shared/my run"),
    log=Path("/shared/my run/nano-jobs/100%.log"),
    nodes=2,
    cores=8,
    gpus=8,
    memory_gb=96,
    key=Path("/shared/my run/nano-jobs/iowa.key"),
)
SYNCER = replace(
    IOWA,
    unit="syncer-0",
    infra="slurm/cpu",
    folder=Path("/s"),
    log=Path("/s/l"),
    nodes=1,
    cores=2,
    gpus=0,
    memory_gb=0,
    key=None,
)


LAB = Site(
    engine="slurm",
    via="ssh login",
    directory="/shared/me",
    setup="module load python; . venv/bin/activate",
    account="physics",
    options={
        "partition": "gpu",
        "constraint": "a100|h100",
        "exclusive": True,
        "overcommit": False,
        "reservation": None,
        "requeue": "no",
        "gpus-per-node": "a100:8",
    },
)
AT_LAB = replace(IOWA, unit="at-a-site", infra="slurm/lab", site=LAB, command=("diloco", "unit", "iowa"))


@pytest.mark.parametrize("spec", [IOWA, SYNCER, AT_LAB], ids=lambda spec: spec.unit)
def test_a_script_is_the_same_bytes_each_time(spec: JobSpec) -> None:
    """After a change of `render`: look at the new text, and write it there."""
    assert render(spec, "/opt/slurm/bin") == (GOLDEN / f"{spec.unit}.sbatch").read_text()


@pytest.mark.parametrize(
    "harm",
    [
        {"infra": "slurm/h100\nrm -rf ~"},
        {"infra": "slurm/h100 --uid=root"},
        {"run": "gs://b/runs/nano\nrm -rf ~"},
        {"command": ("true", "a\nrm -rf ~")},
        {"folder": Path("/a\r#SBATCH --x")},
        {"unit": "a\n"},
    ],
)
def test_nothing_that_a_bucket_says_becomes_a_line_of_a_script(harm: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"no partition|control characters"):
        render(replace(IOWA, **harm), "/usr/bin")


def test_a_shell_takes_every_word_as_it_is() -> None:
    script = render(replace(SYNCER, command=("true", "$(rm -rf ~)", "a'b")), "/opt/slurm's/bin")
    assert script.endswith("""exec true '$(rm -rf ~)' 'a'"'"'b'\n""") and """PATH='/opt/slurm'"'"'s/bin':""" in script


@pytest.mark.parametrize(("said", "asks"), [("1\n", False), ("1000+\n", True), ("1\n515000\n", True), ("", False)])
def test_memory_is_asked_for_where_slurm_knows_of_it(monkeypatch: pytest.MonkeyPatch, said: str, asks: bool) -> None:
    """Where nodes have told none, it refuses every job that asks for some."""
    monkeypatch.setattr(slurm, "run_tool", lambda words, **others: said)
    monkeypatch.setattr(slurm, "tool_directory", lambda name: Path("/opt/slurm/bin"))
    slurm.counts_memory.cache_clear()
    assert ("#SBATCH --mem=96G" in Slurm().render(IOWA)) is asks
    assert not any(name.startswith("mem") for name in slurm.options_of(IOWA)), "SBATCH_MEM_PER_NODE counts more"
    slurm.counts_memory.cache_clear()


@pytest.mark.parametrize(
    ("states", "is_taken"),
    [
        ("drained\n", True),
        ("down*\ndraining\n", True),
        ("drained\nidle\n", False),  # one node is left, and it, too, has less than what is asked for
        ("idle\nmixed\nallocated\n", False),
        ("", False),
    ],
)
def test_what_waits_for_a_partition_that_is_out_is_taken(
    monkeypatch: pytest.MonkeyPatch, states: str, is_taken: bool
) -> None:
    """sbatch takes it, and `--test-only` says that the partition has no such nodes."""

    def played(words: Sequence[str], given: str = "", *, refusal: type[Exception], **others: object) -> str:
        if "--test-only" in words:
            raise refusal("sbatch: allocation failure: Requested node configuration is not available")
        assert words[-2:] == ("-p", "h100")
        return states if "%T" in words else "64000\n"

    monkeypatch.setattr(slurm, "run_tool", played)
    monkeypatch.setattr(slurm, "tool_directory", lambda name: Path("/opt/slurm/bin"))
    slurm.counts_memory.cache_clear()
    if is_taken:
        Slurm().check(IOWA)
    else:
        with pytest.raises(UsageError, match="node configuration is not available") as error:
            Slurm().check(IOWA)
        assert f"{IOWA.memory_gb} GB); what nodes have: sinfo" in error.value.hint
        assert error.value.hint.endswith("for all the memory that a node has: SBATCH_MEM_PER_NODE=0")
    slurm.counts_memory.cache_clear()


ASKS = "it asks for 2 x (8 cores, 8 GPUs, 96 GB)"


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("Invalid account or account/partition combination specified", "yours: sacctmgr show assoc"),
        (
            "QOSMaxSubmitJobPerUserLimit; Job violates accounting/QOS policy (job submit limit)",
            ASKS + "; yours: sacctmgr",
        ),
        (
            "Job violates accounting/QOS policy (user's size and/or time limits)",
            "it asks for 2 x (8 cores, 8 GPUs, 96 GB)",
        ),
        ("Requested partition configuration not available now", ASKS + "; what nodes have"),
        ("User's group not permitted to use this partition", "infra: slurm/PARTITION, or `options"),
        ("invalid partition specified: us", "infra: slurm/PARTITION, or `options"),
        ("Unable to contact slurm controller (connect failure)", "whether it is up: scontrol ping"),
        ("Memory specification can not be satisfied", ASKS + "; what nodes have"),
    ],
)
def test_the_hint_of_a_refusal_is_about_what_was_refused(monkeypatch: pytest.MonkeyPatch, said: str, hint: str) -> None:
    def played(words: tuple[str, ...], given: str = "", *, refusal: type[Exception], **_: object) -> str:
        raise refusal(f"sbatch: error: {said}")

    monkeypatch.setattr(slurm, "run_tool", played)
    with pytest.raises(UsageError) as error:
        Slurm().check(replace(IOWA, text="#!/bin/bash\n"))
    assert error.value.hint.startswith(hint)


def line(state: str, reason: str = "None", number: str = "7", name: str = "iowa", node: str = "n1") -> str:
    return f"{number}|{job_names('nano', RUN)}{name}|{state}|{reason}|{node}|{ME}|diloco {RUN}"


@pytest.mark.parametrize(
    ("state", "reason", "means", "why"),
    [
        ("PENDING", "Resources", "QUEUED", "Resources: waits for free nodes"),
        ("PENDING", "None", "QUEUED", ""),
        ("PENDING", "BeginTime", "QUEUED", "BeginTime: Slurm holds a job back for two minutes after a requeue"),
        ("PENDING", "QOSMaxJobsPerUserLimit", "QUEUED", "QOSMaxJobsPerUserLimit"),
        (
            "PENDING",
            "PartitionConfig",
            "QUEUED",
            "PartitionConfig: asks for more than the partition has: it would wait",
        ),
        (
            "PENDING",
            "ReqNodeNotAvail, UnavailableNodes:n1",
            "QUEUED",
            "ReqNodeNotAvail, UnavailableNodes:n1: its nodes",
        ),
        ("PENDING", "JobHeldUser", "HELD", "JobHeldUser: held: scontrol release"),
        (
            "PENDING",
            "launch failed requeued held",
            "HELD",
            "launch failed requeued held: Slurm could not start it: scontrol release",
        ),
        ("CONFIGURING", "None", "STARTING", "CONFIGURING"),
        ("RUNNING", "None", "RUNNING", ""),
        ("COMPLETING", "None", "LEAVING", "COMPLETING"),
        ("COMPLETED", "None", "ENDED", ""),
        ("CANCELLED", "None", "ENDED", "CANCELLED"),
        ("CANCELLED", "Priority", "ENDED", "CANCELLED"),
        ("FAILED", "NonZeroExitCode", "FAILED", "NonZeroExitCode: its log says why"),
        ("TIMEOUT", "TimeLimit", "FAILED", "TIMEOUT TimeLimit"),
        ("A_WORD_OF_LATER", "None", "STARTING", "A_WORD_OF_LATER"),
    ],
)
def test_what_a_line_of_the_queue_means(state: str, reason: str, means: str, why: str) -> None:
    (job,) = read_queue(line(state, reason), RUN, "nano", ME)
    assert (job.unit, job.id, job.node, job.state) == ("iowa", "7", "n1", means)
    assert job.why == why or (len(why) > 40 and job.why.startswith(why))
    assert job.lives == (STATES.get(state, JobState.STARTING) not in (JobState.ENDED, JobState.FAILED))


def test_only_the_runs_own_jobs_count_whatever_else_is_printed() -> None:
    text = "\n".join(
        [
            "squeue: warning: maintenance tonight|at ten",
            line("RUNNING", number="8"),
            line("RUNNING", name="ohio").replace(RUN, "gs://other/runs/nano"),
            line("RUNNING", name="x").replace("-nano-", "-other-"),
            f"9|{job_names('nano', RUN)}rhine|PENDING",
            "",
        ]
    )
    assert [job.id for job in read_queue(text, RUN, "nano", ME)] == ["8"]


def test_of_several_jobs_of_a_unit_the_one_that_runs_counts_then_the_newest() -> None:
    both = [line("RUNNING", number="7"), line("PENDING", "Dependency", number="8")]
    for lines in (both, both[::-1]):
        assert [job.id for job in read_queue("\n".join(lines), RUN, "nano", ME)] == ["7"]
    over = [line("FAILED", number="10"), line("CANCELLED", number="9"), line("COMPLETED", number="8")]
    assert [job.id for job in read_queue("\n".join(over), RUN, "nano", ME)] == ["10"]
    assert [job.id for job in read_queue("\n".join([*over, line("PENDING", number="6")]), RUN, "nano", ME)] == ["6"]


def test_an_island_of_several_nodes_is_one_step_that_meets_on_the_first_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "30017")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    words = step(("diloco", "learner", "--name=big"), 2, "n1")
    assert words[4:10] == ("srun", "--overlap", "--kill-on-bad-exit=1", "--export=ALL", "--nodes=2", "--ntasks=2")
    assert "--cpus-per-task=4" in words and words[-2:] == ("--nodes=2", "--rendezvous=n1:20017")
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(UsageError, match="no job of Slurm"):
        step(("diloco",), 2, "n1")


def test_the_shell_before_a_step_tells_its_tasks_to_end_and_ends_as_it_does(tmp_path: Path) -> None:
    """srun itself would kill them. A tool that stands for scancel lets the step end."""
    told = tmp_path / "told"
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" > {told}\n')
    (tmp_path / "scancel").chmod(0o755)
    runs = f"touch {tmp_path}/runs; while [ ! -e {told} ]; do sleep 0.05; done; exit 7"
    shell = subprocess.Popen(
        ("/bin/bash", "-c", WAITS_FOR_STEP, "bash", "/bin/bash", "-c", runs),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
    )
    while not (tmp_path / "runs").exists():
        time.sleep(0.01)
    shell.terminate()
    assert shell.wait(60.0) == 7 and told.read_text() == "--signal=TERM 7\n"


def test_the_key_of_a_cancelled_job_goes_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "my runs" / (job_names("nano", RUN) + "jobs")
    mine = [logs / "iowa.log", logs / "iowa.key", logs / "ohio.key", tmp_path / "other.log", tmp_path / "other.key"]
    logs.mkdir(parents=True)
    for path in mine:
        path.touch()
    (tmp_path / "scancel").write_text("#!/bin/sh\n")
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nprintf '%-200s\\n' '{mine[0]}' '{mine[3]}'\n")
    for tool in ("scancel", "squeue"):
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    Slurm().cancel([Job("iowa", "slurm", "7", JobState.RUNNING)])
    assert [path for path in mine if not path.exists()] == [mine[1]]


def test_a_login_node_is_asked_for_diloco_and_for_the_job_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question takes a login of its own there. Who has no diloco hears of that first."""
    asked = threading.Event()

    def there(words: Sequence[str], given: str = "", *, refusal: type[Exception], **others: Any) -> str:
        if "--test-only" in words:
            asked.set()
            raise refusal("sbatch: no such partition")
        if words == ("bash", "-s"):
            assert asked.wait(60.0)
            raise refusal("bash: diloco: command not found")
        return "/opt/slurm/bin/sbatch\n"

    for module in (slurm, ssh):
        monkeypatch.setattr(module, "run_tool", there)
    slurm._there.cache_clear()
    slurm.counts_memory.cache_clear()
    with pytest.raises(UsageError, match="diloco: command not found"):
        Slurm("slurm/far", "far", "/shared/me").check(AT_LAB)
    slurm._there.cache_clear()
    slurm.counts_memory.cache_clear()


def test_a_site_behind_ssh_gets_all_by_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[str, ...], str]] = []

    def there(words: Sequence[str], given: str = "", *, via: str, **others: Any) -> str:
        assert via == "login"
        calls.append((tuple(words), given))
        queue = "71\n" + line("RUNNING").replace(ME, "71")
        shell = {"command -v": "/opt/slurm/bin/sbatch\n", "id -u; exe": queue}
        scontrol = "ClusterName             = lab\nSlurmctldHost[0]        = n0(10.0.0.1)\n"
        answers = {
            "scontrol": scontrol,
            "bash": shell.get(words[-1][:10], f"{__version__}\n"),
            "sbatch": "8;lab\n",
            "sinfo": "256000+\n",
        }
        return answers.get(words[0], "")

    monkeypatch.setattr(slurm, "run_tool", there)
    monkeypatch.setattr(ssh, "run_tool", there)
    engine = engine_of("slurm/lab", LAB)
    logs = Path("/shared/me/nano-jobs")
    spec = replace(AT_LAB, unit="iowa", folder=logs.parent, log=logs / "100%.log", key=logs / "iowa.key")
    engine.check(spec)
    assert engine.submit(spec, "the 'key'").id == "8" and not engine.sees_files
    (job,) = engine.jobs(RUN, "nano")
    assert (job.engine, job.owner) == ("slurm/lab", "")
    engine.cancel([job])
    made = [given for words, given in calls if words == ("bash", "-s")][-2]
    assert f"""printf %s {shlex.quote("the 'key'")} > /shared/me/nano-jobs/iowa.key""" in made
    given = next(words for words, _ in calls if words[:2] == ("sbatch", "--parsable"))
    assert {"--chdir=/shared/me", "--output=/shared/me/nano-jobs/100%%.log", "--partition=gpu"} < {*given}
    assert (
        calls[-2][0] == ("scancel", "7")
        and calls[-1][0] == ("bash", "-s")
        and "'key'" not in str([words for words, _ in calls])
    )
    ((of, printing),) = engine.log_words(RUN, "nano", ["iowa", "rhine"], 20, follow=False).items()
    assert of == ("iowa", "rhine") and f"/shared/me/{job_names('nano', RUN)}jobs" in printing[-1]
    assert engine.cluster == "lab@n0"
