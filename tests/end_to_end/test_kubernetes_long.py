"""Runs in a cluster of ours, by the real kubectl: what a cluster does to pods, one after the other, and a run that
ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.kubernetes import KubernetesCluster, cluster, eventually, why_not

pytestmark = [pytest.mark.long, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
INVENTORY = """\
version: 1
store: {{url: bucket, region: us}}
islands:
{islands}
sites:
  lab:
    engine: kubernetes
    context: fake
    image: diloco:1
    options:
      pod: {{volumes: [{{name: shared, hostPath: {{path: {folder}}}}}]}}
      container: {{volumeMounts: [{{name: shared, mountPath: {folder}}}]}}
"""
TWO = """\
  - {name: iowa, region: us, infra: kubernetes/lab, accelerators: cpu:1}
  - {name: rhine, region: eu, infra: kubernetes/lab, accelerators: cpu:1}
"""
WIDE = "  - {name: big, region: us, infra: kubernetes/lab, nodes: 2, accelerators: cpu:1}"
SETTINGS = (
    "model.preset=gpt-pico", "train.batch_tokens=256", "sync.every=16", "train.inner.save_every=2",
    "evaluation.every=1000",
)  # fmt: skip
NAMES = ["iowa", "rhine", "syncer-0", "syncer-1"]
WITHIN_S = 300.0


class Run:
    """`folder`: where it is launched from, and mounted into its pods."""

    def __init__(self, place: KubernetesCluster, folder: Path) -> None:
        self.place, self.folder = place, folder

    def diloco(self, *words: str) -> str:
        command = (sys.executable, "-P", "-m", "diloco_cli", *words)
        whole = {**os.environ, **self.place.environment}
        done = subprocess.run(command, cwd=self.folder, env=whole, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def launch(self, islands: str, *settings: str) -> None:
        shutil.copy(EXAMPLE / "run.yaml", self.folder)
        (self.folder / "inventory.yaml").write_text(INVENTORY.format(islands=islands, folder=self.folder))
        self.diloco("launch", "--detach", *(word for setting in (*SETTINGS, *settings) for word in ("--set", setting)))

    def status(self) -> dict[str, Any]:
        return json.loads(self.diloco("status", "quickstart", "--json"))["data"]

    def jobs(self) -> dict[str, str]:
        """None if kubectl took longer than `status` waits for it, as on a busy machine."""
        return {job["unit"]: job["state"] for job in self.status()["jobs"]}

    def learner(self, name: str) -> dict[str, Any]:
        return next(one for one in self.status()["learners"] if one["name"] == name)

    def trains(self, name: str, incarnation: int) -> None:
        """It steps again."""
        eventually(
            lambda: self.learner(name)["incarnation"] >= incarnation and self.learner(name)["step"] > 0, WITHIN_S
        )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    for name in ("cluster", "here"):
        (tmp_path / name).mkdir()
    with cluster(tmp_path / "cluster", 8) as place:
        yield Run(place, tmp_path / "here")


def test_a_run_outlives_what_a_cluster_does_to_its_pods(run: Run) -> None:
    run.launch(TWO, "train.tokens=100M")
    run.trains("iowa", 1)
    eventually(lambda: run.jobs() == dict.fromkeys(NAMES, "RUNNING"), WITHIN_S)
    assert "iowa: started" in run.diloco("logs", "iowa", "--lines", "1000")

    run.diloco("chaos", "kill", "iowa")  # its supervisor in the pod starts it again
    run.trains("iowa", 2)

    served = run.status()["syncer"]
    run.diloco("chaos", "preempt", served["unit"])
    eventually(lambda: run.status()["syncer"]["epoch"] > served["epoch"], WITHIN_S)
    assert run.status()["syncer"]["unit"] != served["unit"], "the other one follows"
    eventually(lambda: run.jobs() == dict.fromkeys(NAMES, "RUNNING"), WITHIN_S)

    (pod,) = run.place.pods("rhine")
    run.place.kubectl("delete", "pod", pod, "--wait=false")
    run.trains("rhine", 2)

    run.place.kubectl("delete", "job", "--selector=diloco/unit=iowa")
    eventually(lambda: run.jobs().get("iowa") == "GONE", WITHIN_S)
    run.diloco("resume", "--detach")
    run.trains("iowa", 3)

    assert "STOPPED" in run.diloco("stop", "quickstart")
    eventually(lambda: not any(run.place.pods(name) for name in NAMES), WITHIN_S)
    run.diloco("resume", "--detach")
    run.trains("iowa", 4)
    assert "STOPPED" in run.diloco("stop", "quickstart")
    assert json.loads(run.diloco("verify", "quickstart", "--json"))["data"]["ok"]


def test_a_run_ends_and_its_jobs_with_it(run: Run) -> None:
    run.launch(TWO, "train.tokens=200k")
    eventually(lambda: run.status()["state"] == "FINISHED", WITHIN_S)
    jobs = "{.items[*].status.conditions[*].type}"
    eventually(lambda: run.place.kubectl("get", "jobs", "-o", f"jsonpath={jobs}").split() == ["Complete"] * 4, WITHIN_S)
    assert json.loads(run.diloco("verify", "quickstart", "--json"))["data"]["ok"]


def test_an_island_of_two_nodes_is_one_job_whose_ranks_end_and_start_together(run: Run) -> None:
    run.launch(WIDE, "train.tokens=100M")
    run.trains("big", 1)
    second = next(pod for pod in run.place.pods("big") if "-1-" in pod)
    run.place.kubectl("delete", "pod", second, "--wait=false", "--grace-period=0", "--force")
    run.trains("big", 2)
    assert "STOPPED" in run.diloco("stop", "quickstart")
