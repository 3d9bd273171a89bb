"""What a run keeps on disk: whole, doubted, and never two supervisors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.environment import environment_with
from diloco_cli.errors import NotFoundError, RefusedError, UsageError
from diloco_cli.runtime.processes import Identity
from diloco_cli.runtime.registry import (
    Ignored,
    UnitRecord,
    hold,
    is_held,
    known_runs,
    list_units,
    living_supervisor,
    newest_run,
    read_unit,
    release,
    remember_run,
    resolve_run,
    supervisor_lock,
    write_unit,
)

pytestmark = pytest.mark.usefixtures("home")
RECORD = UnitRecord("iowa", "learner", Identity(500, "boot:7", "secret"), 12.5)
LOCKER = """
import sys, time
from diloco_cli.runtime.registry import supervisor_lock
with supervisor_lock("nano"):
    print("locked", flush=True)
    time.sleep(60)
"""


def silent(text: str) -> None:
    """Hears what is said aloud, and forgets it."""


def test_a_record_is_read_back_and_private(home):
    write_unit("nano", RECORD)
    assert read_unit("nano", "iowa") == RECORD
    path = home / "nano/units/iowa.json"
    assert path.stat().st_mode & 0o077 == 0
    assert [entry.name for entry in path.parent.iterdir()] == ["iowa.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSON"),
        ('{"name": "io', "JSON"),
        ("[]", "object"),
        ("{}", "format"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1, "name": "home", "kind": "learner"}', "not the record of unit iowa"),
        ("[" * 60_000, "JSON"),
        ("x" * 70_000, "longer"),
    ],
)
def test_a_torn_or_foreign_record_is_ignored_with_its_reason(home, text, reason):
    write_unit("nano", RECORD)
    (home / "nano/units/iowa.json").write_text(text)
    entry = read_unit("nano", "iowa")
    assert isinstance(entry, Ignored)
    assert reason in entry.reason
    assert list_units("nano") == []


@pytest.mark.parametrize("name", ["../iowa", "", "Iowa", "-x", "a/b", "x" * 64])
def test_a_name_cannot_leave_the_directory_of_the_run(name):
    with pytest.raises(UsageError, match="must match"):
        read_unit("nano", name)
    with pytest.raises(UsageError, match="must match"):
        hold(name, "iowa")


def test_a_hold_stays_until_it_is_released():
    assert not is_held("nano", "iowa")
    hold("nano", "iowa")
    hold("nano", "iowa")
    assert is_held("nano", "iowa")
    assert release("nano", "iowa")
    assert not release("nano", "iowa")
    assert not is_held("nano", "iowa")


def test_a_second_living_supervisor_is_refused_and_a_killed_one_leaves_the_place():
    child = subprocess.Popen([sys.executable, "-c", LOCKER], stdout=subprocess.PIPE, env=environment_with())
    try:
        assert child.stdout.readline() == b"locked\n"
        assert living_supervisor("nano").pid == child.pid
        with pytest.raises(RefusedError, match=f"process {child.pid}") as refused, supervisor_lock("nano"):
            pass
        assert "diloco stop nano" in refused.value.hint
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert living_supervisor("nano") is None
    with supervisor_lock("nano") as own:
        assert own.pid == os.getpid()
        assert living_supervisor("nano") == own


def test_a_torn_supervisor_file_keeps_nobody_out(home):
    (home / "nano").mkdir(parents=True)
    (home / "nano/supervisor.json").write_text('{"format"')
    with supervisor_lock("nano"):
        assert living_supervisor("nano") is not None


def write_run(home: Path, name: str, created_s: float) -> None:
    (home / name).mkdir(parents=True)
    body = {"name": name, "url": f"file:///bucket/{name}", "created_s": created_s}
    (home / name / "run.json").write_text(json.dumps(body))


def test_the_newest_run_is_chosen_aloud(home):
    write_run(home, "old", 1.0)
    write_run(home, "new", 2.0)
    said: list[str] = []
    assert resolve_run(None, said.append).name == "new"
    assert "new" in said[0]
    assert "newest" in said[0]


def test_a_run_is_found_by_name_url_and_run_file(home, tmp_path):
    write_run(home, "old", 1.0)
    write_run(home, "new", 2.0)
    file = tmp_path / "run.yaml"
    file.write_text("name: old")
    assert resolve_run("old", silent).name == "old"
    assert resolve_run("file:///bucket/old/", silent).name == "old"


def test_an_unknown_run_names_the_known_ones(home):
    write_run(home, "old", 1.0)
    with pytest.raises(NotFoundError, match="known: old") as error:
        resolve_run("../old", silent)
    assert error.value.exit_status == 4


def test_no_run_at_all_says_how_to_start_one():
    with pytest.raises(NotFoundError) as error:
        newest_run()
    assert "diloco launch" in error.value.hint


def test_a_remembered_run_keeps_its_time_of_creation_and_foreign_files_are_no_runs(home):
    first = remember_run("nano", "file:///bucket/nano")
    assert remember_run("nano", "file:///bucket/nano").created_s == first.created_s
    (home / "Junk").mkdir()
    (home / "torn").mkdir()
    (home / "torn/run.json").write_text('{"name": "torn", "url"')
    (home / "nan").mkdir()
    (home / "nan/run.json").write_text('{"name": "nan", "url": "x", "created_s": NaN}')
    assert known_runs() == [first]
