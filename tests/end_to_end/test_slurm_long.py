"""A run in two partitions of a real Slurm, from one launch, as a plain user: what a cluster does to jobs, one after the
other. At every look at most one job of a name runs (`Cluster.living`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.end_to_end.slurm import NAMES, WITHIN_S, Jobs, cluster, eventually, quickstart, why_not

pytestmark = [pytest.mark.long, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
WIDE = """\
version: 1
store: {url: bucket, region: us}
islands:
  - {name: big, region: us, infra: slurm/wide, nodes: 2, accelerators: cpu:1}
"""


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    with quickstart() as found:
        yield found


def test_a_run_outlives_what_a_cluster_does_to_its_jobs(jobs: Jobs) -> None:
    script = jobs.diloco("launch", "-n")
    assert script.count("#SBATCH --dependency=singleton") == len(NAMES) and not jobs.jobs()
    jobs.launch("--detach", "--set", "train.tokens=5M")
    assert sorted(jobs.jobs()) == NAMES

    jobs.trains("iowa", 1)
    jobs.kill_learner("iowa")  # its supervisor in the job starts it again
    jobs.trains("iowa", 2)

    served = jobs.status()["syncer"]
    number, _, node = jobs.jobs()[served["unit"]]
    learner = {"us0": "iowa", "eu0": "rhine"}[node]
    before = jobs.learner(learner)["incarnation"]
    urgent = jobs.place.ask(
        "sbatch", "--parsable", "-p", "urgent", "-w", node, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"
    )
    eventually(lambda: jobs.status()["syncer"]["epoch"] > served["epoch"], WITHIN_S)
    follows = jobs.status()["syncer"]["unit"]
    assert follows != served["unit"] and jobs.followed_within_s(served["unit"], follows) < 8.0
    assert jobs.jobs()[served["unit"]][:2] == (number, "PENDING"), "it comes back by itself"
    jobs.place.ask("scancel", urgent.strip())
    eventually(lambda: jobs.jobs()[learner][1] == "PENDING", WITHIN_S)  # it has left; Slurm holds it for 2 min
    jobs.diloco("resume", "--detach")
    jobs.run(*NAMES)
    jobs.comes_back(learner, before + 1)

    before = jobs.learner("rhine")["incarnation"]
    jobs.place.ask("scancel", jobs.jobs()["rhine"][0])
    eventually(lambda: "rhine" not in jobs.jobs(), WITHIN_S)
    eventually(lambda: jobs.status()["hint"].startswith("diloco resume "), WITHIN_S)
    jobs.diloco("resume", "--detach")
    jobs.diloco("resume", "--detach")
    jobs.comes_back("rhine", before + 1)

    before = jobs.learner("rhine")["incarnation"]
    jobs.place.ask("scancel", "--signal=KILL", "--batch", jobs.jobs()["rhine"][0])  # the supervisor in the job
    eventually(lambda: "rhine" not in jobs.jobs(), WITHIN_S)
    assert not jobs.learners("rhine"), "its learner dies with it"
    jobs.diloco("resume", "--detach")
    jobs.trains("rhine", before + 1)

    before, number = jobs.learner("iowa")["incarnation"], jobs.jobs()["iowa"][0]
    jobs.diloco("chaos", "preempt", "iowa")
    eventually(lambda: jobs.jobs()["iowa"][1] == "PENDING", WITHIN_S)
    jobs.comes_back("iowa", before + 1)  # nobody watches: those that serve the run hasten it
    assert jobs.jobs()["iowa"][0] == number

    jobs.finishes()
    assert json.loads(jobs.diloco("verify", "quickstart", "--json"))["data"]["ok"]


def test_a_run_outlives_a_dead_controller_a_lost_node_and_the_time_limit_of_a_job(jobs: Jobs) -> None:
    jobs.launch("--detach", "--set", "train.tokens=100M")
    for name in ("iowa", "rhine"):
        jobs.trains(name, 1)

    jobs.place.kill("slurmctld")
    silent = json.loads(jobs.diloco("status", "quickstart", "--json"))
    assert silent["warnings"] == ["jobs: not asked: squeue did not answer within 2 s"] and not silent["data"]["jobs"]
    assert silent["data"]["state"] not in ("STALLED", "SILENT")
    commit = silent["data"]["commit"]
    eventually(lambda: json.loads(jobs.diloco("status", "--json"))["data"]["commit"] > commit + 20, WITHIN_S)
    jobs.place.start("slurmctld", "-i")
    eventually(lambda: jobs.place.run("squeue").returncode == 0, WITHIN_S)
    jobs.run(*NAMES)

    zombies, before = jobs.learners("rhine"), {name: job[0] for name, job in jobs.jobs().items()}
    jobs.place.kill("slurmd-eu0")
    jobs.place.kill_steps(before["rhine"])
    eventually(lambda: jobs.jobs()["rhine"][1] == "PENDING", WITHIN_S)
    jobs.place.start("slurmd", "-N", "eu0")
    assert all(one.is_running() for one in zombies), "the script of the lost job survives, and trains on"
    jobs.trains("rhine", 2)
    eventually(lambda: not any(one.is_running() for one in zombies), WITHIN_S)
    assert jobs.jobs()["rhine"][:2] == (before["rhine"], "RUNNING"), "its successor has thrown it out"

    minutes = 1 + int(jobs.place.ask("squeue", "-h", "-j", before["iowa"], "-O", "TimeUsed").strip().split(":")[-2])
    jobs.place.ask("scontrol", "update", f"jobid={before['iowa']}", f"TimeLimit={minutes + 1}")
    eventually(lambda: "the time of this job is up" in jobs.log("iowa").read_text(), WITHIN_S)
    jobs.comes_back("iowa", 2)
    assert jobs.jobs()["iowa"][0] == before["iowa"]
    assert "STOPPED" in jobs.diloco("stop", "quickstart")
    eventually(lambda: not jobs.jobs(), WITHIN_S)
    assert json.loads(jobs.diloco("verify", "quickstart", "--json"))["data"]["ok"]


def test_an_island_of_two_nodes_is_one_job_whose_ranks_end_and_start_together(jobs: Jobs) -> None:
    (jobs.place.folder / "inventory.yaml").write_text(WIDE)
    jobs.launch("--detach", "--set", "train.tokens=100M")
    jobs.trains("big", 1)
    jobs.kill_learner("big", "--node-rank=1")
    jobs.trains("big", 2)
    jobs.place.ask("scancel", "--signal=USR2", "--batch", jobs.jobs()["big"][0])  # its time is up
    eventually(lambda: jobs.jobs()["big"][1] == "PENDING", WITHIN_S)
    jobs.diloco("resume", "--detach")
    jobs.comes_back("big", 3)
    assert "STOPPED" in jobs.diloco("stop", "quickstart")
    eventually(lambda: not jobs.jobs(), WITHIN_S)


def test_what_waits_on_one_cluster_is_submitted_on_another_by_the_users_word_alone(jobs: Jobs) -> None:
    first = jobs.place
    for node in ("us0", "eu0"):
        first.ask(
            "sbatch", "-p", "urgent", "-w", node, "--exclusive", "-J", node, "-o", "/dev/null", "--wrap=sleep 600"
        )
    jobs.launch("--detach", "--set", "train.tokens=100M")
    assert {state for _, state, _ in jobs.jobs().values()} == {"PENDING"}
    with cluster("other") as second:
        second.folder, other = first.folder, Jobs(second)  # the home of its user is another one
        bucket = f"file://{first.folder}/bucket/quickstart"
        resume = (sys.executable, "-P", "-m", "diloco_cli", "resume", bucket, "--detach")
        refused = second.run(*resume)
        assert refused.returncode == 8 and "the run's bucket alone names slurm/us, slurm/eu" in refused.stderr
        other.launch("--create-only", "--set", "train.tokens=100M")
        left = second.run(*resume)
        assert left.stderr.count("cluster diloco@") == len(NAMES) and not other.jobs(), left.stderr
        brought = second.run(*resume, "--region=eu")
        assert brought.returncode == 0 and "rhine: " in brought.stderr and sorted(other.jobs()) == ["rhine"]
        for place in (jobs, other):
            assert "STOPPED" in place.diloco("stop", bucket)
            eventually(lambda place=place: not place.jobs(), WITHIN_S)
