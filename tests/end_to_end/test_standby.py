"""Real processes: a standby takes over, a frozen syncer is fenced, learners host what no machine of its own does."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest

from tests.end_to_end.conftest import Playground
from tests.end_to_end.test_survival import commits, learner
from tests.waiting import wait_until

SOON = ["--set", "syncer.takeover=6 s"]


def hosted(place: Playground) -> list[psutil.Process]:
    """Living syncers that learners of this run host."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--hosted" in words and any(str(place.directory) in word for word in words):
            found.append(process)
    return found


def serves(status: dict[str, Any], unit: str, epoch: int) -> bool:
    syncer = status["syncer"]
    serving = syncer and syncer["state"] in ("SERVING", "MERGING")
    return bool(serving and syncer["unit"] == unit and syncer["epoch"] == epoch)


def test_a_frozen_syncer_exits_fenced_and_stands_by_and_stop_ends_what_runs_here_where_the_bucket_is_gone(
    playground: Playground,
) -> None:
    playground.islands("ann")
    playground.launch(100_000_000, "--set", "syncer.standbys=1", *SOON)
    status = playground.wait_for(lambda s: s["commit"] >= 4 and s["standbys"])
    assert [(item["name"], item["state"]) for item in status["standbys"]] == [("standby-1", "STANDING_BY")]
    frozen = playground.pids()["syncer"]
    os.kill(frozen, signal.SIGSTOP)
    status = playground.wait_for(lambda s: serves(s, "standby-1", 2))
    assert any("standby-1 takes over" in event["text"] for event in status["recent"])
    taken = commits(playground)
    os.kill(frozen, signal.SIGCONT)
    # The one that woke may still have said one last word over its successor's: the next heartbeat sets that right.
    playground.wait_for(lambda s: any(i["name"] == "syncer" for i in s["standbys"]) and serves(s, "standby-1", 2))
    assert "ended with status 9" in playground.log("supervisor")
    after = commits(playground)
    assert {name: after[name] for name in taken} == taken
    assert playground.json("verify", "quickstart")["ok"]
    assert playground.json("status", "quickstart")["syncer"]["epoch"] == 2
    bucket = playground.directory / "quickstart" / "bucket" / "quickstart"
    bucket.rename(bucket.with_name("away"))
    began_s = time.monotonic()
    stopped = playground.run("stop", "quickstart")
    assert time.monotonic() - began_s < 15
    assert stopped.returncode == 0 and "the bucket of run quickstart is gone" in stopped.stderr
    assert "ended here: supervisor, ann, standby-1, syncer" in stopped.stdout
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in playground.pids().values()))
    assert playground.run("stop", "quickstart").returncode == 6, "nothing is left here to end"
    bucket.with_name("away").rename(bucket)
    assert playground.json("status", "quickstart")["state"] != "STOPPED"


@pytest.mark.long
def test_a_run_that_its_learners_host_survives_the_host_that_serves_and_finishes(playground: Playground) -> None:
    playground.islands("ann", "bob")
    playground.launch(300_000, "--set", "syncer.on_learners=true", *SOON)
    status = playground.wait_for(lambda s: s["commit"] >= 6 and s["syncer"])
    assert "syncer" not in playground.pids()
    host = status["syncer"]["unit"].removeprefix("standby-")
    assert len(hosted(playground)) == 2
    playground.kill(host)
    status = playground.wait_for(lambda s: s["syncer"]["epoch"] >= 2 and s["syncer"]["state"] == "SERVING")
    assert status["syncer"]["unit"] != f"standby-{host}"
    status = playground.wait_for(lambda s: s["state"] == "FINISHED", timeout_s=240)
    assert status["tokens"] >= 300_000 and learner(status, host)["incarnation"] == 2
    assert playground.json("verify", "quickstart")["ok"]
    wait_until(lambda: not hosted(playground))
