"""One run over four engines, from one launch: a Slurm behind a login node, a Kubernetes (of ours, by the real kubectl),
a host that ssh reaches, and this machine. Each loses its learner by its own means."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end import kubernetes, slurm, ssh
from tests.end_to_end.conftest import SMALL, Playground, playing
from tests.waiting import wait_until

MISSING = next(filter(None, (engine.why_not() for engine in (slurm, kubernetes, ssh))), None)
pytestmark = [pytest.mark.long, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
INVENTORY = """\
version: 1
store: {{url: bucket, region: here}}
islands:
  - {{name: desk, region: here, accelerators: cpu:1, emulate: {{slowdown: 4}}}}
  - {{name: garage, region: home, infra: ssh/box, accelerators: cpu:1, emulate: {{slowdown: 4}}}}
  - {{name: iowa, region: us, infra: slurm/us, accelerators: cpu:1, emulate: {{slowdown: 4}}}}
  - {{name: rhine, region: eu, infra: kubernetes/lab, accelerators: cpu:1, emulate: {{slowdown: 4}}}}
sites:
  us: {{engine: slurm, via: ssh login, directory: {folder}, setup: "PATH={tools}", options: {{partition: us}}}}
  lab:
    engine: kubernetes
    context: fake
    image: diloco:1
    options:
      pod: {{volumes: [{{name: shared, hostPath: {{path: {folder}}}}}]}}
      container: {{volumeMounts: [{{name: shared, mountPath: {folder}}}]}}
"""
ENGINES = {"garage": "ssh/box", "iowa": "slurm/us", "rhine": "kubernetes/lab"}
WITHIN_S = 300.0


class FourEngines:
    def __init__(
        self, place: Playground, partitions: slurm.Cluster, pods: kubernetes.KubernetesCluster, hosts: ssh.Hosts
    ):
        self.place, self.partitions, self.pods, self.hosts = place, partitions, pods, hosts
        place.environment |= {
            **pods.environment, "SLURM_CONF": partitions.environment["SLURM_CONF"], "XDG_RUNTIME_DIR": str(hosts.base),
            "PATH": f"{hosts.path}:{kubernetes.TOOLS}",
        }  # fmt: skip
        with (hosts.base / "login" / ".bash_profile").open("a") as profile:
            profile.write(f"export SLURM_CONF={partitions.environment['SLURM_CONF']}\n")
        folder = place.directory / "quickstart"
        (folder / "inventory.yaml").write_text(INVENTORY.format(folder=folder, tools=kubernetes.TOOLS))

    def diloco(self, *words: str) -> str:
        done = self.place.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        return self.place.json("status", "quickstart")

    def job(self, unit: str) -> dict[str, Any]:
        return next((job for job in self.status()["jobs"] if job["unit"] == unit), {})

    def incarnation(self, name: str) -> int:
        found = next(one for one in self.status()["learners"] if one["name"] == name)
        return int(found["incarnation"]) if found["step"] > 0 else 0

    def trains(self, name: str, incarnation: int) -> None:
        wait_until(lambda: self.incarnation(name) >= incarnation, WITHIN_S)

    def runs(self) -> None:
        """One `status` tells all of them, and no unit twice."""

        def all_run() -> bool:
            jobs = self.status()["jobs"]
            assert len(jobs) == len({job["unit"] for job in jobs}), jobs
            return {job["unit"]: job["engine"] for job in jobs if job["state"] == "RUNNING"}.items() >= ENGINES.items()

        wait_until(all_run, WITHIN_S)

    def lost(self, name: str) -> None:
        """Its engine has no job of it, until it is submitted again."""
        wait_until(lambda: self.job(name).get("state") in ("GONE", "ENDED"), WITHIN_S)
        before = self.incarnation(name)
        self.diloco("resume", "quickstart", "--detach")
        self.trains(name, before + 1)
        self.runs()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FourEngines]:
    (tmp_path / "pods").mkdir()
    with (
        slurm.cluster() as partitions,
        kubernetes.cluster(tmp_path / "pods", 8) as pods,
        ssh.ssh_hosts("box", "login") as hosts,
        playing(tmp_path) as place,
    ):
        yield FourEngines(place, partitions, pods, hosts)


def test_one_run_over_four_engines_outlives_what_each_does(world: FourEngines) -> None:
    place = world.place
    done = place.run("launch", "quickstart/run.yaml", "--detach", "--set", "train.tokens=100M", *SMALL)
    assert done.returncode == 0, done.stderr
    for name in ("desk", *ENGINES):
        world.trains(name, 1)
    world.runs()
    logs = world.diloco("logs", "--lines", "1000", "--run", "quickstart")
    assert all(f"{name:<10} | " in logs and f"{name}: made its first step" in logs for name in ("desk", *ENGINES))

    place.kill("desk")
    world.trains("desk", 2)
    subprocess.run(("scancel", world.job("iowa")["id"]), env=place.environment, check=True)
    world.lost("iowa")
    world.pods.kubectl("delete", "job", "--selector=diloco/unit=rhine")
    world.lost("rhine")
    os.killpg(int(world.job("garage")["id"]), signal.SIGKILL)
    world.lost("garage")

    for name in ENGINES:  # its supervisor, wherever that is, starts it again
        before = world.incarnation(name)
        assert "injected, verified" in world.diloco("chaos", "kill", name, "--run", "quickstart")
        world.trains(name, before + 1)

    served = world.status()["syncer"]  # one is on the host, one in Slurm
    if world.job(served["unit"])["engine"] == "ssh/box":
        os.killpg(int(world.job(served["unit"])["id"]), signal.SIGKILL)
    else:
        world.diloco("chaos", "preempt", served["unit"], "--run", "quickstart")
    wait_until(lambda: world.status()["syncer"]["epoch"] > served["epoch"], WITHIN_S)
    wait_until(lambda: world.status()["hint"].startswith("diloco resume"), WITHIN_S)  # one of two is left
    world.diloco("resume", "quickstart", "--detach")
    wait_until(lambda: world.job(served["unit"])["state"] == "RUNNING", WITHIN_S)

    assert "STOPPED" in world.diloco("stop", "quickstart")
    wait_until(lambda: not (world.hosts.units() or world.partitions.living() or world.pods.pods("rhine")), WITHIN_S)
    assert place.json("verify", "quickstart")["ok"]
