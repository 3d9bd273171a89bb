"""A run loses units, its supervisor, everything at once; it never loses what is committed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.end_to_end.conftest import SMALL, SURVIVED_TOKENS, Playground
from tests.waiting import wait_until


def commits(place: Playground) -> dict[str, bytes]:
    """The log as it lies in the bucket, without what is being written (no key begins with a dot)."""
    folder = place.directory / "quickstart" / "bucket" / "quickstart" / "commit"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[!.]*"))}


def learner(status: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in status["learners"] if item["name"] == name)
    return found


def test_a_run_survives_learner_syncer_and_supervisor_and_verifies(survived: Playground) -> None:
    """Later the same launch finds it finished, and one with other settings is refused."""
    status = survived.json("status", "quickstart")
    assert status["state"] == "FINISHED" and status["tokens"] >= SURVIVED_TOKENS
    assert status["syncer"]["epoch"] >= 2 and learner(status, "iowa")["incarnation"] >= 2
    assert status["loss"] < 4.0
    heartbeat = survived.directory / "quickstart" / "bucket" / "quickstart" / "heartbeat" / "syncer.json"
    assert json.loads(heartbeat.read_bytes())["reads_back"] is False  # a directory has what fsync confirms
    found = survived.json("verify", "quickstart")
    assert found["ok"] and found["duplicates"] == 0 and found["missing"] == 0 and found["mismatches"] == []
    other, again = (
        survived.run("launch", "quickstart/run.yaml", "--set", f"train.tokens={tokens}", *SMALL)
        for tokens in (300_000, SURVIVED_TOKENS)
    )
    assert other.returncode == 2 and "train.tokens" in other.stderr and "hint:" in other.stderr
    assert again.returncode == 0 and "FINISHED" in again.stdout + again.stderr


def test_a_run_resumes_without_this_machines_own_files(playground: Playground, tmp_path: Path) -> None:
    """Another machine has the bucket and nothing else; Ctrl-C ends what runs there, and the run waits in its bucket;
    `stop` needs no syncer."""
    playground.islands("iowa", "ohio")
    playground.launch(tokens=10_000_000)
    playground.wait_for(lambda s: s["commit"] >= 4)
    stopped = playground.run("stop", "quickstart")
    assert stopped.returncode == 0 and "STOPPED" in stopped.stdout, stopped.stderr
    url = playground.json("status", "quickstart")["store"]["url"]
    playground.wait_for(lambda s: s["state"] == "STOPPED")
    at = playground.json("status", "quickstart")["commit"]
    playground.environment["DILOCO_HOME"] = str(tmp_path / "elsewhere")
    supervisor = playground.start("resume", url)
    wait_until(lambda: supervisor.poll() is not None or playground.json("status", url)["commit"] >= at + 6, 90)
    assert supervisor.poll() is None
    os.kill(supervisor.pid, signal.SIGINT)
    began = time.monotonic()
    out, err = supervisor.communicate(timeout=30)
    assert time.monotonic() - began < 12
    assert supervisor.returncode == 130, err
    assert "Traceback" not in err + out
    assert "Ctrl-C stops a run only in the `launch` that has all of it" in err
    assert "no syncer is left here" in err
    assert playground.json("status", url)["state"] != "STOPPED"
    assert playground.run("stop", url, "--timeout", "1").returncode == 0
    assert playground.json("status", url)["state"] == "STOPPED"
    assert playground.json("verify", url)["ok"]
