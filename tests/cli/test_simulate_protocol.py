"""`diloco simulate protocol` from outside: its object, its exit status, its words."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from diloco_cli.histories import campaign
from diloco_cli.histories.shrinking import Violation
from tests.cli.conftest import called
from tests.forked import run_diloco

FIELDS = {
    "seed", "next_seed", "interrupted", "histories", "commits", "commits_min", "commits_median", "crashes",
    "store_operations", "violations", "wall_s", "histories_per_s",
}  # fmt: skip
PROTOCOL = ("simulate", "protocol")
DILOCO = [sys.executable, "-m", "diloco_cli"]


def found(*arguments: Any, **options: Any) -> campaign.Totals:
    story = ("seed 7: 2 learners", "1 faults are enough:", "  l0.1, operation 3: dies", "invariant 2: merged twice")
    violation = Violation(7, "2", story, "diloco simulate protocol --seed 7 --histories 1")
    return campaign.Totals(3, 3, 40, 5, 900, [violation], Counter({13: 2, 14: 1}))


def test_its_object_has_the_published_fields() -> None:
    done = run_diloco("simulate", "protocol", "--seed", "3", "--histories", "2", "--json")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["command"] == "simulate protocol" and body["ok"] is True and set(body["data"]) == FIELDS
    data = body["data"]
    assert (data["seed"], data["histories"], data["violations"]) == (3, 2, [])
    assert (data["next_seed"], data["interrupted"]) == (5, False)
    assert data["commits"] >= 2 * data["commits_min"] > 10 and data["commits_median"] >= data["commits_min"]
    assert data["store_operations"] > 200 and data["histories_per_s"] > 0


def test_several_processes_count_the_same() -> None:
    words = ("simulate", "protocol", "--histories", "12", "--json")
    alone, shared = (json.loads(run_diloco(*words, *more).stdout)["data"] for more in ((), ("--jobs", "2")))
    for data in (alone, shared):
        del data["wall_s"], data["histories_per_s"]
    assert alone == shared


def test_a_violation_ends_with_status_11_and_its_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "campaign", found)
    assert called(monkeypatch, *PROTOCOL, "--histories", "3") == 11
    out, err = capsys.readouterr()
    assert out.index("seed 7") < out.index("merged twice") < out.index("repeat it: diloco simulate protocol --seed 7")
    assert "seeds 0 to 2 done, 3 histories: 40 commits (median 13 a history, least 13), 5 crashes, 900 store" in out
    assert "error: 1 violation in 3 histories" in err and "hint: diloco simulate protocol --seed 7" in err


def test_a_violation_is_in_the_object_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(campaign, "campaign", found)
    assert called(monkeypatch, *PROTOCOL, "--json") == 11
    body = json.loads(capsys.readouterr().out)
    assert body["ok"] is False and body["error"]["code"] == "data_check"
    (violation,) = body["data"]["violations"]
    assert set(violation) == {"seed", "invariant", "story", "command"} and violation["invariant"] == "2"


def long_campaign(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """One that is at work, and its first line."""
    words = [*DILOCO, "simulate", "protocol", "--histories", "100000", "--jobs", "2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, text=True)
    assert process.stderr is not None
    return process, process.stderr.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_with_what_was_done(tmp_path: Path, number: signal.Signals) -> None:
    process, first = long_campaign(tmp_path)
    assert re.match(r"[0-9]+0 of 100,000 histories, [0-9.]+/s, [0-9,]+ commits, .* 0 violations, .* left", first), first
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err
    done = re.search(r"seeds 0 to ([0-9]+) done, ", out)
    assert done is not None, out
    next_seed = int(done[1]) + 1
    assert f"ended early; go on with --seed {next_seed} --histories {100000 - next_seed}" in out


def test_killed_it_leaves_no_process_behind(tmp_path: Path) -> None:
    process, _ = long_campaign(tmp_path)
    workers = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert len(workers) == 2 and not alive


def test_on_a_terminal_one_line_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    assert called(monkeypatch, *PROTOCOL, "--histories", "25") == 0
    lines = shown.getvalue().split("\r\033[K")
    assert [line.split(",")[0] for line in lines if line] == [f"{n} of 25 histories" for n in (10, 20, 25)]


def test_a_violation_is_told_as_soon_as_it_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "swarm", lambda seeds, tell: found())
    assert called(monkeypatch, *PROTOCOL, "--histories", "100") == 11
    out, err = capsys.readouterr()
    assert err.count("seed 7: invariant 2: merged twice") == 5 and "go on with" not in err
    assert "error: 5 violations in 15 histories" in err and "ended early; go on with --seed 3 --histories 97" in out
