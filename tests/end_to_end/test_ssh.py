"""A run on this machine and on hosts that ssh reaches, from one launch: what a link and a host do to it, one after the
other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import SMALL, Playground, playing
from tests.end_to_end.ssh import Hosts, in_namespace, ssh_hosts, why_not, why_not_namespaces
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
INVENTORY = """\
version: 1
store: {url: bucket, region: here}
islands:
  - {name: iowa, region: here, accelerators: cpu:1, emulate: {slowdown: 4}}
  - {name: garage, region: here, infra: ssh/box, accelerators: cpu:1, emulate: {slowdown: 4}}
"""
BROUGHT = """\
sites:
  box: {{engine: ssh, via: ssh box, install: wheel, setup: "export PIP_NO_DEPS=1 PYTHONPATH={lent}"}}
"""
SECOND = "  - {name: attic, region: here, infra: ssh/den, accelerators: cpu:1, emulate: {slowdown: 4}}\n"
JOBS = ["garage", "syncer-0", "syncer-1"]
WITHIN_S = 120.0


class Reach:
    """A playground from which the hosts are reached."""

    def __init__(self, place: Playground, hosts: Hosts) -> None:
        self.place, self.hosts = place, hosts
        place.environment |= {"PATH": f"{hosts.path}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(hosts.base)}
        (place.directory / "quickstart" / "inventory.yaml").write_text(INVENTORY)

    def diloco(self, *words: str) -> str:
        done = self.place.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def jobs(self) -> dict[str, tuple[str, str]]:
        """State and number of each."""
        return {job["unit"]: (job["state"], job["id"]) for job in self.place.json("status", "quickstart")["jobs"]}

    def learner(self, name: str) -> dict[str, Any]:
        return next(one for one in self.place.json("status", "quickstart")["learners"] if one["name"] == name)

    def trains(self, name: str, incarnation: int) -> None:
        wait_until(
            lambda: self.learner(name)["incarnation"] >= incarnation and self.learner(name)["step"] > 0, WITHIN_S
        )

    def runs(self, *others: str) -> None:
        """As soon as all hosts answer in time."""
        running = dict.fromkeys([*JOBS, *others], "RUNNING")
        wait_until(lambda: {unit: state for unit, (state, _) in self.jobs().items()} == running, WITHIN_S)


@pytest.fixture
def reach(tmp_path: Path) -> Iterator[Reach]:
    with ssh_hosts("box", "den") as hosts, playing(tmp_path) as place:
        yield Reach(place, hosts)


def test_a_host_of_ssh_takes_part_and_is_left_as_it_was(reach: Reach) -> None:
    reach.place.launch(100_000_000)
    reach.runs()
    reach.hosts.cut("box")
    assert "jobs: not asked: ssh box did not answer within 2 s" in reach.diloco("status", "quickstart")
    reach.hosts.cut("box", signal.SIGCONT)
    reach.place.wait_for(lambda s: s["commit"] >= 2, WITHIN_S)
    assert "garage: made its first step" in reach.diloco("logs", "garage", "--lines", "1000", "--run", "quickstart")
    assert "STOPPED" in reach.diloco("stop", "quickstart")
    wait_until(lambda: not reach.hosts.units(), WITHIN_S)


@pytest.mark.long
@pytest.mark.skipif(why_not_namespaces() is not None, reason=str(why_not_namespaces()))
def test_what_links_and_hosts_do(reach: Reach) -> None:
    hosts = reach.hosts
    with (reach.place.directory / "quickstart" / "inventory.yaml").open("a") as inventory:
        inventory.write(SECOND)
    with in_namespace(hosts, "box", 1), in_namespace(hosts, "den", 2):
        launching = reach.place.start("launch", "quickstart/run.yaml", "--set", "train.tokens=100M", *SMALL)
        wait_until(lambda: any(hosts.base.glob("box/.local/**/lease")), WITHIN_S)
        os.killpg(launching.pid, signal.SIGKILL)  # the client, with its connection
        launching.communicate()
        reach.diloco("resume", "quickstart", "--detach")
        reach.trains("garage", 1)
        reach.trains("attic", 1)
        reach.runs("attic")
        before = reach.jobs()

        subprocess.run(("ip", "link", "set", "dlbox", "down"), check=True)
        commit = reach.place.json("status", "quickstart")["commit"]
        reach.place.wait_for(lambda s: s["commit"] >= commit + 20, WITHIN_S)  # the bucket is still there for all
        assert "jobs: not asked: ssh box" in reach.diloco("status", "quickstart")
        wait_until(lambda: reach.jobs().get("attic") == before["attic"], WITHIN_S)  # the other host is asked
        subprocess.run(("ip", "link", "set", "dlbox", "up"), check=True)
        wait_until(lambda: reach.jobs() == before, WITHIN_S)

        os.killpg(int(before["garage"][1]), signal.SIGKILL)
        wait_until(lambda: reach.jobs().get("garage", ("", ""))[0] == "GONE", WITHIN_S)
        lease = next(hosts.base.glob("box/.local/**/diloco-quickstart-*-garage/lease"))
        pid, _, run = lease.read_text().split()
        lease.write_text(f"{pid} another-boot {run}\n")
        assert "the host was restarted" in reach.diloco("status", "quickstart")
        reach.diloco("resume", "quickstart", "--detach")
        reach.trains("garage", 2)
        reach.runs("attic")

        hosts.changes_key("box")
        subprocess.run((hosts.path / "ssh", "-O", "exit", "box"), env=reach.place.environment, check=False)
        said = reach.diloco("status", "quickstart")
        assert "jobs: not asked: ssh box: " in said and "Host key verification failed" in said
        hosts.knows("box")
        reach.runs("attic")

        assert "STOPPED" in reach.diloco("stop", "quickstart")
        wait_until(lambda: not hosts.units(), WITHIN_S)
        assert reach.place.json("verify", "quickstart")["ok"]


@pytest.mark.long
def test_a_run_ends_and_leaves_nothing_on_a_host_that_was_brought_diloco(reach: Reach) -> None:
    """A wheel of this one; what it depends on is lent, so that no index of packages is needed."""
    (reach.hosts.base / "box" / "bin" / "diloco").unlink()
    lent = ":".join(path for path in sys.path if path.endswith("site-packages"))
    (reach.place.directory / "quickstart" / "inventory.yaml").write_text(INVENTORY + BROUGHT.format(lent=lent))
    reach.place.launch(100_000)
    assert len(list(reach.hosts.base.glob("box/.diloco/*/ready"))) == 1
    reach.place.wait_for(lambda s: s["state"] == "FINISHED", 600.0)
    assert reach.place.json("verify", "quickstart")["ok"]
    wait_until(lambda: not reach.hosts.units(), WITHIN_S)
