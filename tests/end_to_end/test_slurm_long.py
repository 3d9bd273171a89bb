"""A run in two partitions of a real Slurm, from one launch, as a plain user: what a cluster does to jobs, one after the
other. At every look at most one job of a name runs (`Cluster.living`)."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.slurm import Cluster, cluster, eventually, why_not

pytestmark = [pytest.mark.long, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
INVENTORY = """\
version: 1
store: {url: bucket, region: us}
islands:
  - {name: iowa, region: us, infra: slurm/us, accelerators: cpu:1, emulate: {slowdown: 3}}
  - {name: rhine, region: eu, infra: slurm/eu, accelerators: cpu:1, emulate: {slowdown: 3}}
"""
WIDE = """\
version: 1
store: {url: bucket, region: us}
islands:
  - {name: big, region: us, infra: slurm/wide, nodes: 2, accelerators: cpu:1}
"""
SETTINGS = (
    "model.preset=gpt-pico", "train.batch_tokens=256", "train.tokens=2M", "sync.every=16", "train.inner.save_every=2",
    "evaluation.every=1000",
)  # fmt: skip
NAMES = ["iowa", "rhine", "syncer-0", "syncer-1"]
WORDS = {"PENDING": "QUEUED", "COMPLETING": "LEAVING", "CONFIGURING": "STARTING"}
OVER = ("ENDED", "GONE")
WITHIN_S = 300.0


class Jobs:
    def __init__(self, place: Cluster) -> None:
        self.place = place

    def diloco(self, *words: str) -> str:
        return self.place.ask(sys.executable, "-P", "-m", "diloco_cli", *words)

    def status(self) -> dict[str, Any]:
        """`status`; what it says of jobs is what the cluster said before or after."""
        for _ in range(10):
            before = self.jobs()
            data: dict[str, Any] = json.loads(self.diloco("status", "quickstart", "--json"))["data"]
            if data["state"] == "FINISHED":  # then nobody is asked
                return data
            told = {job["unit"]: (job["id"], job["state"]) for job in data["jobs"] if job["state"] not in OVER}
            for now in (before, self.jobs()):
                if told == {unit: (number, WORDS.get(state, state)) for unit, (number, state, _) in now.items()}:
                    return data
        raise AssertionError(f"status says {told}, the cluster {now}")

    def jobs(self) -> dict[str, tuple[str, str, str]]:
        living = self.place.living().items()
        return {found[1]: job for name, job in living if (found := re.match(r"diloco-quickstart-\w{6}-(.+)", name))}

    def run(self, *names: str) -> None:
        eventually(lambda: [self.jobs().get(name, "  ")[1] for name in names] == ["RUNNING"] * len(names), WITHIN_S)

    def learner(self, name: str) -> dict[str, Any]:
        return next(one for one in self.status()["learners"] if one["name"] == name)

    def trains(self, name: str, incarnation: int) -> None:
        """It steps again."""
        eventually(
            lambda: self.learner(name)["incarnation"] >= incarnation and self.learner(name)["step"] > 0, WITHIN_S
        )

    def learners(self, name: str, *words: str) -> list[psutil.Process]:
        """The processes of this learner that have these words, too."""
        wanted = {"learner", f"--name={name}", f"--run=file://{self.place.folder}/bucket/quickstart", *words}
        found = [one for one in psutil.process_iter(["cmdline"]) if wanted <= {*(one.info["cmdline"] or [])}]
        return [process for process in found if process.info["cmdline"][0] == sys.executable]

    def kill_learner(self, name: str, *words: str) -> None:
        found = self.learners(name, *words)
        assert found
        for process in found:
            process.kill()

    def launch(self, *settings: str) -> None:
        self.diloco("launch", "--detach", *(word for setting in (*SETTINGS, *settings) for word in ("--set", setting)))


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    with cluster() as place:
        shutil.copy(EXAMPLE / "run.yaml", place.folder)
        (place.folder / "inventory.yaml").write_text(INVENTORY)
        place.own(place.folder)
        yield Jobs(place)


def test_a_run_outlives_what_a_cluster_does_to_its_jobs(jobs: Jobs) -> None:
    script = jobs.diloco("launch", "-n")
    assert script.count("#SBATCH --dependency=singleton") == len(NAMES) and not jobs.jobs()
    jobs.launch()
    assert sorted(jobs.jobs()) == NAMES

    jobs.trains("iowa", 1)
    jobs.kill_learner("iowa")  # its supervisor in the job starts it again
    jobs.trains("iowa", 2)

    served = jobs.status()["syncer"]
    number, _, node = jobs.jobs()[served["unit"]]
    learner = {"us0": "iowa", "eu0": "rhine"}[node]
    urgent = jobs.place.ask(
        "sbatch", "--parsable", "-p", "urgent", "-w", node, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"
    )
    eventually(lambda: jobs.status()["syncer"]["epoch"] > served["epoch"], WITHIN_S)
    assert jobs.status()["syncer"]["unit"] != served["unit"], "the other one follows"
    assert jobs.jobs()[served["unit"]][:2] == (number, "PENDING"), "it comes back by itself"
    jobs.place.ask("scancel", urgent.strip())
    eventually(lambda: jobs.jobs()[learner][1] == "PENDING", WITHIN_S)  # it has left; Slurm holds it for 2 min
    jobs.diloco("resume", "--detach")
    jobs.run(*NAMES)
    jobs.trains(learner, 2)

    before = jobs.learner("rhine")["incarnation"]
    jobs.place.ask("scancel", jobs.jobs()["rhine"][0])
    eventually(lambda: "rhine" not in jobs.jobs(), WITHIN_S)
    eventually(lambda: jobs.status()["hint"].startswith("diloco resume "), WITHIN_S)
    jobs.diloco("resume", "--detach")
    jobs.diloco("resume", "--detach")
    jobs.trains("rhine", before + 1)

    before = jobs.learner("rhine")["incarnation"]
    jobs.place.ask("scancel", "--signal=KILL", "--batch", jobs.jobs()["rhine"][0])  # the supervisor in the job
    eventually(lambda: "rhine" not in jobs.jobs(), WITHIN_S)
    assert not jobs.learners("rhine"), "its learner dies with it"
    jobs.diloco("resume", "--detach")
    jobs.trains("rhine", before + 1)

    before = jobs.learner("iowa")["incarnation"]
    jobs.place.ask("scontrol", "requeue", jobs.jobs()["iowa"][0])
    eventually(lambda: jobs.jobs()["iowa"][1] == "PENDING", WITHIN_S)
    jobs.diloco("resume", "--detach")
    jobs.trains("iowa", before + 1)

    eventually(lambda: jobs.status()["state"] == "FINISHED", WITHIN_S)
    eventually(lambda: not jobs.jobs(), WITHIN_S)
    assert json.loads(jobs.diloco("verify", "quickstart", "--json"))["data"]["ok"]


def test_an_island_of_two_nodes_is_one_job_whose_ranks_end_and_start_together(jobs: Jobs) -> None:
    (jobs.place.folder / "inventory.yaml").write_text(WIDE)
    jobs.launch("train.tokens=100M")
    jobs.trains("big", 1)
    jobs.kill_learner("big", "--node-rank=1")
    jobs.trains("big", 2)
    jobs.place.ask("scancel", "--signal=USR2", "--batch", jobs.jobs()["big"][0])  # its time is up
    eventually(lambda: jobs.jobs()["big"][1] == "PENDING", WITHIN_S)
    jobs.diloco("resume", "--detach")
    jobs.trains("big", 3)
    assert "inner moments restored" in (jobs.place.folder / "quickstart-jobs" / "big.log").read_text()
    assert "STOPPED" in jobs.diloco("stop", "quickstart")
    eventually(lambda: not jobs.jobs(), WITHIN_S)
