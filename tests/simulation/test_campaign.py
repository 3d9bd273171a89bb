"""`python -m tests.histories` from outside: its object, its exit status, its interrupts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import psutil
import pytest

from tests.histories import __main__ as command
from tests.histories.campaign import Totals, Violation

FIELDS = {
    "seed", "next_seed", "interrupted", "histories", "commits", "commits_min", "commits_median", "crashes",
    "store_operations", "violations", "wall_s", "histories_per_s", "cpu_s",
}  # fmt: skip
WORDS = [sys.executable, "-m", "tests.histories"]


def test_several_processes_count_the_same_in_the_published_fields() -> None:
    results = []
    for jobs in ("1", "2"):
        done = subprocess.run([*WORDS, "--seed", "3", "--histories", "12", "--jobs", jobs, "--json"], check=True,
                              capture_output=True, text=True)  # fmt: skip
        data = json.loads(done.stdout)
        assert set(data) == FIELDS
        results.append({name: data[name] for name in FIELDS - {"wall_s", "histories_per_s", "cpu_s"}})
    alone, shared = results
    assert alone == shared
    assert (alone["seed"], alone["next_seed"], alone["violations"], alone["interrupted"]) == (3, 15, [], False)
    assert alone["commits_median"] >= alone["commits_min"] > 5 and alone["store_operations"] > 1000


def test_a_violation_ends_with_status_11_and_its_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    story = ("seed 7: 2 learners", "  l0.1, operation 3: dies", "invariant 2: merged twice")
    violation = Violation(7, "2", story, "python -m tests.histories --seed 7 --histories 1")

    def found(*arguments: Any) -> Totals:
        return Totals(3, 3, 40, 5, 900, [violation], Counter({13: 2, 14: 1}))

    monkeypatch.setattr(command, "campaign", found)
    monkeypatch.setattr(sys, "argv", ["histories", "--histories", "3"])
    assert command.main() == 11
    out = capsys.readouterr().out
    assert out.index("merged twice") < out.index(f"repeat it: {violation.command}") < out.index("40 commits (median 13")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_from_outside_leaves_no_process_and_a_seed_to_go_on_with(number: signal.Signals) -> None:
    words = [*WORDS, "--histories", "100000", "--jobs", "2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert re.match(r"[0-9]+0 histories \(of 100,000 seeds\), [0-9.]+/s, [0-9,]+ commits", process.stderr.readline())
    children = psutil.Process(process.pid).children()
    workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert len(workers) == 2 and not alive
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "Traceback" not in err, err
        done = re.search(r"seeds 0 to ([0-9]+) done", out)
        assert done is not None and f"go on with --seed {int(done[1]) + 1} " in out
