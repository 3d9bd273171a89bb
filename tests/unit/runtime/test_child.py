"""Processes that answer by lines of JSON, and that end with the command that started them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from diloco_cli.runtime.child import Child, end_all

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
