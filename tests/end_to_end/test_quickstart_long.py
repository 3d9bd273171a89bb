"""The whole quickstart, undisturbed and under kills of every role: `pytest -m long tests/end_to_end -s`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Playground

LEARNER_MEMORY_BYTES = 1.2e9
SYNCER_MEMORY_BYTES = 0.9e9


def peak_memory_bytes(pid: int) -> int:
    """The kernel's high-water mark of a process's resident memory; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM")), 0)


def train(place: Playground, disturb: Callable[[Playground], None]) -> dict[str, Any]:
    """Launch, disturb, resume if there is need to; the summary of the finished run, with peak memory per unit."""
    began = time.monotonic()
    assert place.run("launch", "quickstart/run.yaml", "--detach").returncode == 0
    disturb(place)
    peaks: dict[str, int] = {}
    while place.json("status", "quickstart")["state"] != "FINISHED":
        for unit, pid in place.pids().items():
            peaks[unit] = max(peaks.get(unit, 0), peak_memory_bytes(pid))
        assert time.monotonic() - began < 900
        time.sleep(1)
    summary = place.json("resume", "quickstart")
    summary["took_s"], summary["peak_bytes"] = time.monotonic() - began, peaks
    return summary


def kill_every_role(place: Playground) -> None:
    """kill -9 of one learner, then of the syncer, then of the supervisor, followed by `resume`."""
    place.wait_for(lambda s: s["tokens"] >= 500_000)
    place.kill("iowa")
    place.wait_for(lambda s: s["tokens"] >= 1_000_000)
    place.kill("syncer")
    place.wait_for(lambda s: s["tokens"] >= 1_500_000)
    place.kill("supervisor")
    time.sleep(2)
    assert place.run("resume", "quickstart", "--detach").returncode == 0


@pytest.mark.long
def test_kills_of_every_role_cost_at_most_three_percent_of_the_loss(tmp_path: Path) -> None:
    results = {}
    for name, disturb in (("undisturbed", lambda place: None), ("killed", kill_every_role)):
        folder = tmp_path / name
        folder.mkdir()
        place = Playground(folder)
        place.forking = False  # their memory is measured
        results[name] = train(place, disturb)
        found = place.json("verify", "quickstart")
        assert found["ok"], found
        results[name]["verify"] = found
    print(json.dumps(results, indent=1))
    calm, killed = results["undisturbed"], results["killed"]
    assert calm["loss"] <= 2.1
    assert abs(killed["loss"] / calm["loss"] - 1) <= 0.03
    assert killed["syncer"]["epochs"] >= 2
    assert next(item for item in killed["learners"] if item["name"] == "iowa")["incarnations"] >= 2
    for result in results.values():
        for unit, peak in result["peak_bytes"].items():
            assert peak <= (SYNCER_MEMORY_BYTES if unit == "syncer" else LEARNER_MEMORY_BYTES), (unit, peak)
