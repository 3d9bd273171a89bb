"""Commands and processes of units."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from diloco_cli.config.settings import SyncerSettings
from diloco_cli.runtime.restart import FENCED_STATUS, Exit, RestartPolicy, decide
from diloco_cli.runtime.units import Child, UnitSpec, end_all, restarted, syncer_units
from tests.unit.runtime.test_supervisor import Supervision, kill, pid_of, unit

ECHO = """
import json, os, sys
for line in sys.stdin:
    print(json.dumps([json.loads(line), os.getsid(0)]), flush=True)
"""
STAYS = "import signal, time\nprint('1', flush=True)\nwhile True:\n    time.sleep(60)"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the given lines can be started."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path / "told.py"


@pytest.mark.parametrize("apart", [False, True])
def test_what_it_is_told_it_answers_until_it_ends_with_its_stdin(module: Path, apart: bool) -> None:
    module.write_text(ECHO)
    child = Child("told", apart=apart)
    child.tell({"n": 1})
    said, session = child.answer(60.0)
    assert said == {"n": 1} and (session == child.process.pid) is apart
    end_all([child], 60.0)
    assert child.process.returncode == 0


def test_one_that_has_ended_by_itself_gives_no_answer(module: Path) -> None:
    module.write_text("")
    child = Child("told")
    child.process.wait()
    child.tell({"n": 1})
    assert child.answer(60.0) is None
    end_all([child], 60.0)


def test_one_that_says_nothing_is_not_waited_for_and_one_that_stays_is_killed(module: Path) -> None:
    module.write_text(STAYS)
    child = Child("told")
    assert child.answer(60.0) == 1
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        child.answer(0.01)
    end_all([child], 0.01)
    assert child.process.returncode == -9
    assert child.process.stdout is not None and child.process.stdout.closed


URL = "file:///b"
FAST = RestartPolicy(first_delay_s=0.01, second_delay_s=0.01)


def names(**settings: object) -> list[str]:
    return [spec.name for spec in syncer_units(URL, SyncerSettings(**settings), threads=1)]  # type: ignore[arg-type]


def test_the_settings_say_which_syncers_are_units() -> None:
    assert names() == ["syncer"]
    assert names(standbys=2) == ["syncer", "standby-1", "standby-2"]
    assert names(on_learners=True) == []
    assert names(on_learners=True, standbys=1) == ["standby-1"]


def test_a_syncer_takes_over_at_once_and_comes_back_as_a_standby_in_place_of_its_dead_self() -> None:
    syncer, standby = syncer_units(URL, SyncerSettings(standbys=1), threads=1)
    assert "--standby" not in syncer.command and "--standby" in standby.command
    again = restarted(syncer, 4711).command
    assert again[-3:] == ("--standby", "--name=syncer", "--instead-of=4711")
    assert restarted(standby, 4712).command[-2:] == ("--name=standby-1", "--instead-of=4712")
    assert restarted(syncer, None) == syncer


def test_without_standbys_a_syncer_comes_back_as_it_was() -> None:
    (syncer,) = syncer_units(URL, SyncerSettings(), threads=1)
    assert restarted(syncer, 4711) == syncer


def test_a_fenced_one_is_done_unless_it_can_stand_by() -> None:
    fenced = [Exit(1.0, FENCED_STATUS, 100.0)]
    assert decide(fenced, 1.0, RestartPolicy()).action == "done"
    decision = decide(fenced, 1.0, RestartPolicy(), stands_by=True)
    assert decision.action == "restart" and "fenced" in decision.reason
    assert decide([Exit(1.0, 0, 100.0)], 1.0, RestartPolicy(), stands_by=True).action == "done"


def standby(name: str, code: str, later: str) -> UnitSpec:
    first = unit(name, code, "syncer")
    return replace(first, later=(sys.executable, "-S", "-c", later))


@pytest.mark.usefixtures("home")
class TestUnderASupervisor:
    def test_a_killed_syncer_is_started_anew_with_the_pid_of_its_dead_self(self, eventually) -> None:  # type: ignore[no-untyped-def]
        wait = "import time; time.sleep(60)"
        with Supervision(standby("syncer", wait, wait), restart=FAST) as run:
            eventually(lambda: pid_of("syncer") is not None)
            first = pid_of("syncer")
            kill("syncer")
            eventually(lambda: pid_of("syncer") not in (None, first))
            words = psutil.Process(pid_of("syncer")).cmdline()
            assert words[-1] == f"--instead-of={first}"
            eventually(lambda: run.kinds("syncer") == ["started", "ended", "started"])

    def test_a_fenced_syncer_stands_by_from_then_on(self, eventually) -> None:  # type: ignore[no-untyped-def]
        fenced = standby("syncer", "raise SystemExit(9)", "import time; time.sleep(60)")
        with Supervision(unit("a"), fenced, restart=FAST) as run:
            eventually(lambda: run.kinds("syncer") == ["started", "ended", "fenced", "started"])
            assert any("stands by from now on" in event.text for event in run.events)

    def test_one_of_two_syncers_may_fail_for_good(self, eventually) -> None:  # type: ignore[no-untyped-def]
        broken = unit("standby-1", "raise SystemExit(2)", "syncer")
        with Supervision(unit("a"), unit("syncer", kind="syncer"), broken, restart=FAST) as run:
            eventually(lambda: "failed" in run.kinds("standby-1"))
            assert run.outcome is None and pid_of("syncer") is not None and run.kinds(None) == []
