"""A run on disk: whole, doubted, and never two supervisors; its logs are shown from their end. And the
causes that units tell."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from diloco_cli.config.settings import Site
from diloco_cli.environment import environment_with
from diloco_cli.errors import (
    DataCheckError,
    FencedError,
    NotFoundError,
    RefusedError,
    StoreError,
    TakenError,
    TerminatedError,
    UsageError,
)
from diloco_cli.events.bucket import EventReader
from diloco_cli.runtime.processes import Identity
from diloco_cli.runtime.registry import (
    CAUSE_VARIABLE,
    Ignored,
    Line,
    UnitRecord,
    by_time,
    cause_path,
    follow,
    forget_run,
    hint_of,
    hold,
    is_held,
    known_at,
    known_runs,
    list_units,
    living_supervisor,
    log_files,
    log_path,
    note_line,
    note_sites,
    noted_at,
    printable,
    read_cause,
    read_unit,
    refuse_supervised,
    release,
    remember_run,
    run_directory,
    run_of_name,
    sites_of,
    supervisor_lock,
    tail,
    tell,
    telling_why,
    write_unit,
)
from diloco_cli.store.open import open_store

pytestmark = pytest.mark.usefixtures("home")
RECORD = UnitRecord("iowa", "learner", Identity(500, "boot:7", "secret"), 12.5)
LOCKER = """
import sys, time
from diloco_cli.runtime.registry import supervisor_lock
with supervisor_lock("nano"):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_record_is_read_back_and_private(home):
    write_unit("nano", RECORD)
    assert read_unit("nano", "iowa") == RECORD
    path = run_directory("nano") / "units/iowa.json"
    assert path.stat().st_mode & 0o077 == 0
    assert [entry.name for entry in path.parent.iterdir()] == ["iowa.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSON"),
        ('{"name": "io', "JSON"),
        ("[]", "object"),
        ("{}", "is missing"),
        ('{"name": "iowa", "kind": "learner", "identity": {"pid": true, "start_time": "x"}, "started_s": 1}', "pid"),
        ('{"name": "ohio", "kind": "learner", "identity": {"pid": 5, "start_time": "x"}, "started_s": 1}', "iowa"),
        ("[" * 60_000, "JSON"),
        ("x" * 70_000, "longer"),
    ],
)
def test_a_torn_or_foreign_record_is_ignored_with_its_reason(home, text, reason):
    write_unit("nano", RECORD)
    (run_directory("nano") / "units/iowa.json").write_text(text)
    entry = read_unit("nano", "iowa")
    assert isinstance(entry, Ignored)
    assert reason in entry.reason
    assert list_units("nano") == []


@pytest.mark.parametrize("name", ["../iowa", "", "Iowa", "-x", "a/b", "x" * 64])
def test_a_units_name_cannot_leave_the_directory_of_the_run(name):
    with pytest.raises(UsageError, match="must match"):
        read_unit("nano", name)


def test_a_hold_stays_until_it_is_released():
    assert not is_held("nano", "iowa")
    hold("nano", "iowa")
    hold("nano", "iowa")
    assert is_held("nano", "iowa")
    assert release("nano", "iowa")
    assert not release("nano", "iowa")
    assert not is_held("nano", "iowa")


def test_a_second_living_supervisor_is_refused_and_a_killed_one_leaves_the_place(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", LOCKER], stdout=subprocess.PIPE, env=environment_with())
    try:
        assert child.stdout.readline() == b"locked\n"
        assert living_supervisor("nano").pid == child.pid
        with pytest.raises(RefusedError, match=f"process {child.pid}") as refused, supervisor_lock("nano"):
            pass
        assert "diloco stop" in refused.value.hint
        with pytest.raises(RefusedError):
            refuse_supervised("nano")
        monkeypatch.setattr("diloco_cli.runtime.registry.sleep_s", lambda _: (child.kill(), child.wait()))
        refuse_supervised("nano", patience_s=600.0)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert living_supervisor("nano") is None
    with supervisor_lock("nano") as own:
        assert own.pid == os.getpid()
        assert living_supervisor("nano") == own


def test_a_torn_supervisor_file_keeps_nobody_out(home):
    run_directory("nano").mkdir(parents=True)
    (run_directory("nano") / "supervisor.json").write_text('{"format"')
    with supervisor_lock("nano"):
        assert living_supervisor("nano") is not None


def test_a_run_is_its_url_and_a_name_may_be_used_in_many_folders(home, tmp_path, monkeypatch):
    with pytest.raises(NotFoundError, match="known: none") as nothing:
        run_of_name("nano")
    assert "diloco launch" in nothing.value.hint and nothing.value.exit_status == 4
    first, second, other = (f"file://{tmp_path}/{place}" for place in ("a/nano", "b/nano", "b/other"))
    for url, folder in ((first, "a"), (second, "b"), (other, "b")):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        remember_run(url)
    assert [run.url for run in known_runs()] == [other, second, first]
    monkeypatch.chdir(tmp_path / "a")
    assert [run.url for run in known_runs()] == [first, other, second] and known_at(first).is_of_this_folder
    assert run_of_name("other").url == other
    with pytest.raises(UsageError, match="2 runs of this machine are called nano") as several:
        run_of_name("nano")
    assert first in str(several.value) and second in str(several.value)
    hold(first, "iowa")
    assert is_held(first + "/", "iowa") and not is_held(second, "iowa")
    forget_run(first)
    assert run_of_name("nano").url == second and not is_held(first, "iowa")


def test_the_notes_of_a_run_are_found_by_each_of_its_urls():
    remember_run("file:///home/nano", ("file:///eu/nano", "file:///home/nano"))
    assert known_at("file:///home/nano").also == ("file:///eu/nano",)
    assert noted_at("file:///eu/nano") == noted_at("file:///home/nano") == "file:///home/nano"
    assert noted_at("file:///other/nano") == "file:///other/nano"


def test_sites_are_those_of_the_last_launch_here():
    lab = Site("slurm", "ssh login", "/x", options={"partition": "gpu", "exclusive": True})
    remember_run("file:///home/nano", ("file:///eu/nano",))
    note_sites("file:///home/nano", {"slurm/lab": lab, "ssh/box": None})
    assert sites_of("file:///home/nano") == sites_of("file:///eu/nano") == {"slurm/lab": lab, "ssh/box": None}
    assert sites_of("file:///other/nano") == {}
    (run_directory("file:///home/nano") / "sites.json").write_text('{"slurm/lab": {"engine": "pbs"}')
    assert sites_of("file:///home/nano") == {}


def test_one_folder_has_one_place_whatever_leads_there(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert run_directory(f"{tmp_path}/link/nano") == run_directory(f"file://{tmp_path}/real/./nano")


def test_a_torn_or_foreign_note_is_no_run():
    first = remember_run("file:///bucket/nano")
    for name, text in (("torn", '{"name": "torn", "url"'), ("other", '{"name": "x", "url": "file:///bucket/nano"}')):
        path = run_directory(f"file:///bucket/{name}") / "run.json"
        path.parent.mkdir()
        path.write_text(text)
    (run_directory("x").parent / "junk").mkdir()
    assert known_runs() == [first]


@pytest.fixture
def log(home):
    path = log_path("nano", "iowa")
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain \xc3\xa9\ttab", "plain é\ttab"),
        (b"\x1b[2Jcleared", "\\x1b[2Jcleared"),
        (b"carriage\r", "carriage"),
        (b"a\rb", "a\\rb"),
        (b"\xff", "\\xff"),
        ("turned\u202e".encode(), "turned\\u202e"),
    ],
)
def test_control_characters_are_escaped(line, shown):
    assert printable(line) == shown


def test_the_last_lines_come_also_without_a_last_newline(log):
    log.write_text("one\ntwo\nthree")
    assert tail(log, 2) == ["two", "three"]
    assert tail(log, 0) == []
    log.write_text("one\n")
    assert tail(log, 5) == ["one"]


def test_what_is_added_is_followed_across_a_rotation(log):
    log.write_text("old\n")
    steps = iter([("a", "half"), ("a", " and half\nnext\n"), ("w", "rotated\n")])

    def step() -> bool:
        mode, text = next(steps, ("", ""))
        if mode == "w":
            log.rename(log.with_name("iowa.log.1"))
        if mode:
            with log.open(mode) as file:
                file.write(text)
        return not mode

    assert [line.text for line in follow({"iowa": log}, step)] == ["half and half", "next", "rotated"]


def test_a_missing_log_names_those_there_are(log):
    log.write_text("")
    assert list(log_files("nano")) == ["iowa"]
    with pytest.raises(NotFoundError, match=r"no log of syncer.*stays where its unit runs; logs here: iowa"):
        log_files("nano", "syncer")


def test_a_log_that_is_gone_with_its_jobs_folder_is_missed_by_its_path(log, tmp_path):
    log.symlink_to(tmp_path / "gone" / "iowa.log")
    for unit in (None, "iowa"):
        with pytest.raises(NotFoundError, match=f"{tmp_path}/gone/iowa.log: a log was here") as error:
            log_files("nano", unit)
        assert error.value.hint.endswith("diloco resume nano")
    log.with_name("syncer.log").write_text("")
    assert list(log_files("nano")) == ["syncer"]


def test_lines_of_several_logs_come_in_the_order_of_their_times_and_a_traceback_stays_with_its_line():
    iowa = ["2026-01-01T00:00:01Z a", "Traceback", "  in f", "2026-01-01T00:00:03.5Z d"]
    syncer = ["2026-01-01T00:00:02Z b", "2026-01-01T00:00:03.2Z c"]
    last: dict[str, str] = {}
    lines = by_time([*(Line("iowa", text) for text in iowa), *(Line("syncer", text) for text in syncer)], last)
    assert [line.text[-1] for line in lines] == ["a", "k", "f", "b", "c", "d"]
    assert by_time([Line("syncer", "2026-01-01T00:00:04Z f"), Line("iowa", "more")], last)[0].text == "more"


def test_a_line_of_the_supervisor_has_its_time(home):
    path = log_path("nano", "supervisor")
    note_line(path, "iowa: started: process 7 \ud800")
    (line,) = tail(path, 5)
    assert line[:2] == "20" and line.endswith("Z iowa: started: process 7 \\ud800")
    assert path.stat().st_mode & 0o777 == 0o600


URL = "memory://causes"


def end(error: BaseException, unit: str = "iowa", url: str = URL) -> None:
    with pytest.raises(type(error)), telling_why(url, unit):
        raise error


def told(url: str = URL) -> list[tuple[str, str]]:
    return [(event.unit, event.kind) for event in EventReader().read(open_store(url))]


def test_without_a_supervisor_the_bucket_is_told_once_in_a_while() -> None:
    url = f"{URL}/alone"
    for _ in range(3):
        end(ValueError("x"), url=url)
    end(ValueError("y"), "rhine", url)
    end(TakenError("it takes part already"), "ohio", url)  # its person was told, and the living one is well
    end(RefusedError("no consent to its code"), "delta", url)  # only there does the operator see why it is not heard
    assert sorted(told(url)) == [("delta", "error"), ("iowa", "error"), ("rhine", "error")]


def test_of_a_name_that_is_taken_the_bucket_hears_nothing_through_a_rank_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a rank told is read by its parent, which a person has started."""
    url = f"{URL}/ranks"
    with monkeypatch.context() as in_a_rank:
        in_a_rank.setenv(CAUSE_VARIABLE, f"{os.getppid()}:{cause_path('nano', 'iowa')}")
        end(TakenError("it takes part already"), url=url)
    cause = read_cause(cause_path("nano", "iowa"), os.getpid())
    assert cause is not None
    tell(url, "iowa", replace(cause, text=f"rank 0 of 2: {cause.text}"))
    assert told(url) == []


def test_a_supervisor_reads_it_from_a_file_and_tells_the_bucket_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAUSE_VARIABLE, f"{os.getppid()}:{cause_path('nano', 'iowa')}")
    url = f"{URL}/supervised"
    end(StoreError("not found"), url=url)
    cause = read_cause(cause_path("nano", "iowa"), os.getpid())
    assert cause is not None and cause.text.endswith("StoreError: not found") and told(url) == []
    assert read_cause(cause_path("nano", "iowa"), os.getpid() + 1) is None, "that of an earlier process"
    end(ValueError("of a child of the unit"), "evaluator", url)
    assert told(url) == [("evaluator", "error")]


def test_a_unit_whose_supervisor_has_died_tells_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAUSE_VARIABLE, f"1234567:{cause_path('nano', 'iowa')}")
    url = f"{URL}/orphaned"
    end(ValueError("x"), url=url)
    assert read_cause(cause_path("nano", "iowa"), os.getpid()) is not None and told(url) == [("iowa", "error")]


def test_a_supervisor_ends_with_the_hint_of_the_error_that_ended_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a lost state that is where to go back to."""
    monkeypatch.setenv(CAUSE_VARIABLE, f"{os.getppid()}:{cause_path('nano', 'syncer')}")
    end(DataCheckError("lost", hint="diloco rollback nano --to 7; then: diloco resume nano"), "syncer", f"{URL}/lost")
    cause = read_cause(cause_path("nano", "syncer"), os.getpid())
    assert cause is not None and cause.hint == "diloco rollback nano --to 7; then: diloco resume nano"
    assert hint_of("nano", "syncer", cause) == cause.hint
    assert "diloco logs syncer" in hint_of("nano", "syncer", None)


@pytest.mark.parametrize("error", [TerminatedError("asked"), FencedError("another"), SystemExit(0)])
def test_a_clean_end_is_no_error(error: BaseException) -> None:
    end(error, url=f"{URL}/clean")
    assert told(f"{URL}/clean") == []


def test_a_bucket_that_cannot_be_told_hides_no_error() -> None:
    end(ValueError("the error itself"), url="nonsense://")
