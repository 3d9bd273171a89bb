"""`python -m tests.histories` from outside: its counts, its exit status, its end."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from typing import Any

import psutil
import pytest

from tests.histories import __main__ as command
from tests.histories.campaign import Totals, Violation

WORDS = [sys.executable, "-m", "tests.histories"]


def test_several_processes_count_the_same() -> None:
    words = [*WORDS, "--seed", "3", "--histories", "4", "--jobs"]
    alone, shared = (subprocess.run([*words, jobs], check=True, capture_output=True, text=True) for jobs in ("1", "2"))
    assert alone.stdout.partition(";")[0] == shared.stdout.partition(";")[0]
    assert alone.stdout.startswith("4 histories, ") and ", 0 violations" in alone.stdout


def test_a_violation_ends_with_status_11_and_its_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    story = ("seed 7: 2 learners", "  l0.1, operation 3: dies", "invariant 2: merged twice")
    violation = Violation(7, "2", story, "python -m tests.histories --seed 7 --histories 1")

    def found(*arguments: Any) -> Totals:
        return Totals(5, 900, [13, 13, 14], [violation])

    monkeypatch.setattr(command, "campaign", found)
    monkeypatch.setattr(sys, "argv", ["histories", "--histories", "3"])
    assert command.main() == 11
    out = capsys.readouterr().out
    assert out.index("merged twice") < out.index(f"repeat it: {violation.command}") < out.index("40 commits (median 13")


def test_a_campaign_that_is_killed_leaves_no_process() -> None:
    process = psutil.Popen([*WORDS, "--histories", "100000", "--jobs", "2"], stdout=subprocess.DEVNULL)
    workers = next(filter(None, iter(partial(workers_of, process), None)))
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    time.sleep(0.05)
    found = [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]
    return found if len(found) == 2 else []
