"""Which run a command means: two folders whose runs have one name, on one machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.cli import jobs
from diloco_cli.cli.runs import runs
from diloco_cli.engines.port import Job, JobState
from diloco_cli.protocol.log.records import RegionStore
from diloco_cli.runtime.registry import remember_run
from tests.cli.bucket import NANO, make_bucket, say
from tests.cli.conftest import copied, edit
from tests.forked import run_diloco

SMALL = ("--set", "model.preset=gpt-pico", "--set", "train.batch_tokens=256")
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders a and b with a created run `same` each, begun with different weights, and an empty folder c."""
    place = tmp_path_factory.mktemp("projects")
    for seed, name in enumerate("ab"):
        folder = copied("quickstart", place / name)
        edit(folder / "run.yaml", "name: quickstart", "name: same")
        words = ("launch", "--create-only", *SMALL, "--set", f"train.seed={seed}")
        done = run_diloco(*words, folder=folder, DILOCO_HOME=str(place / "home"))
        assert done.returncode == 0, done.stderr
    first, second = ({path.name for path in (place / name).glob("bucket/same/weights/*/*")} for name in "ab")
    assert first and not first & second, "by their digests"
    (place / "c").mkdir()
    return place


@pytest.fixture
def call(projects: Path) -> Call:
    """`call("a", "status")` -> the finished process, run in that folder."""

    def run(folder: str, *words: str) -> Any:
        return run_diloco(*words, folder=projects / folder, DILOCO_HOME=str(projects / "home"))

    return run


def url_of(projects: Path, folder: str) -> str:
    return f"file://{projects}/{folder}/bucket/same"


@pytest.mark.parametrize(
    ("folder", "named"), [("a", ()), ("b", ()), ("a", ("same",)), ("b", ("run.yaml",)), ("a", ("bucket/same",))]
)
def test_each_folder_acts_on_its_own_run(projects: Path, call: Call, folder: str, named: tuple[str, ...]) -> None:
    path, other = projects / folder / "out.safetensors", projects / "c" / "by-url.safetensors"
    done = call(folder, "export", *named, "-o", str(path), "-y")
    assert done.returncode == 0, done.stderr
    assert call("c", "export", url_of(projects, folder), "-o", str(other), "-y").returncode == 0
    assert path.read_bytes() == other.read_bytes()
    done = call(folder, "status", *named)
    assert done.returncode == 0 and url_of(projects, "b" if folder == "a" else "a") not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "words", [("status",), ("export",), ("stop",), ("resume",), ("rollback", "--to", "0"), ("gc",), ("chaos", "list")]
)
def test_elsewhere_nothing_is_guessed(projects: Path, call: Call, words: tuple[str, ...]) -> None:
    done = call("c", *words)
    assert done.returncode == 4 and "this folder has no run" in done.stderr
    assert url_of(projects, "a") in done.stderr and url_of(projects, "b") in done.stderr


def test_a_name_of_several_runs_is_refused_and_they_are_listed(projects: Path, call: Call) -> None:
    done = call("c", "status", "same")
    assert done.returncode == 2 and "2 runs of this machine are called same" in done.stderr
    assert url_of(projects, "a") in done.stderr and url_of(projects, "b") in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("learner", "--run", "nosuch", "--name", "a"), 4, "run 'nosuch' is not known to this machine; known: same\n"),
        (("syncer", "nosuch"), 4, "run 'nosuch' is not known to this machine"),
        (("syncer", "same"), 2, "2 runs of this machine are called same"),
        (("learner", "--run", "memory://x", "--name", "a"), 2, "memory://x lives in one process"),
        (("status", "memory://x"), 2, "memory://x lives in one process: no command can see a run there"),
    ],
)
def test_daemons_name_a_run_as_other_commands_do(
    projects: Path, call: Call, words: tuple[str, ...], status: int, said: str
) -> None:
    done = call("c", *words)
    assert done.returncode == status and said in done.stderr


def test_the_runs_of_this_folder_come_first(projects: Path, call: Call) -> None:
    for folder, other in ("ab", "ba"):
        rows = json.loads(call(folder, "runs", "--json").stdout)["data"]["runs"]
        assert [(row["url"], row["this_folder"]) for row in rows] == [
            (url_of(projects, folder), True),
            (url_of(projects, other), False),
        ]


def test_a_folder_that_was_moved_still_lists_its_run(projects: Path, call: Call) -> None:
    shutil.copytree(projects / "a", projects / "moved")
    done = call("moved", "runs", "--json")
    shutil.rmtree(projects / "moved")
    urls = [row["url"] for row in json.loads(done.stdout)["data"]["runs"]]
    assert urls == [url_of(projects, name) for name in ("moved", "b", "a")]


def test_the_runs_of_a_bucket_are_listed(projects: Path, call: Call, tmp_path: Path) -> None:
    for name in ("same", "same-2", "other"):
        shutil.copytree(projects / "a" / "bucket" / "same", tmp_path / name)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "shard").write_bytes(b"1")
    rows = json.loads(call("c", "runs", str(tmp_path), "--json").stdout)["data"]["runs"]
    assert [row["url"].rpartition("/")[2] for row in rows] == ["other", "same-2", "same"]
    assert call("c", "runs", "1", "2").returncode == 2


@pytest.fixture
def diloco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return partial(run_diloco, folder=tmp_path)


def test_jobs_are_listed_and_an_engine_that_is_silent_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        make_bucket(tmp_path / "bucket" / name)
    found = [Job(name, "slurm", "7", JobState.RUNNING) for name in ("iowa", "rhine")]
    answers = [(found, ""), ([], "jobs: not asked: squeue"), ([], "jobs: not asked: squeue")]
    monkeypatch.setattr(jobs, "asked", lambda opened: answers.pop(0))
    runs([f"file://{tmp_path}/bucket"], False, False)
    table = capsys.readouterr()
    assert "JOBS" in table.out and "2 RUNNING" in table.out and "warning: jobs: not asked: squeue" in table.err
    runs([f"file://{tmp_path}/bucket"], False, True)
    told = json.loads(capsys.readouterr().out)
    assert told["warnings"] == ["jobs: not asked: squeue"] and not answers


def test_a_removed_run_leaves_nothing_and_its_neighbour_all(diloco: Call, tmp_path: Path) -> None:
    urls = [make_bucket(tmp_path / "bucket" / name) for name in ("gone", "kept")]
    for url in urls:
        remember_run(url)
    kept = sorted((tmp_path / "bucket" / "kept").rglob("*"))
    asked = diloco("runs", "rm", "gone")
    assert asked.returncode == 8 and "nobody is there to ask" in asked.stderr and (tmp_path / "bucket/gone").exists()
    done = diloco("runs", "rm", "gone", "-y")
    assert done.returncode == 0 and "run gone is removed" in done.stdout, done.stderr
    assert not (tmp_path / "bucket" / "gone").exists()
    assert sorted((tmp_path / "bucket" / "kept").rglob("*")) == kept
    assert [row["name"] for row in json.loads(diloco("runs", "--json").stdout)["data"]["runs"]] == ["kept"]


def test_a_run_that_is_nowhere_is_not_said_to_be_removed(diloco: Call, tmp_path: Path) -> None:
    done = diloco("runs", "rm", f"file://{tmp_path}/typo/nano", "-y")
    assert done.returncode == 6 and "removed" not in done.stdout + done.stderr
    remember_run(f"file://{tmp_path}/bucket/nano")
    done = diloco("runs", "rm", "nano", "-y", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["data"]["objects"] == 0
    assert json.loads(diloco("runs", "--json").stdout)["data"]["runs"] == []


def test_what_is_not_the_runs_stays(diloco: Call, tmp_path: Path) -> None:
    url = make_bucket(tmp_path / "bucket" / "nano")
    mine = tmp_path / "bucket" / "nano" / "model.safetensors"
    mine.write_bytes(b"mine")
    make_bucket(tmp_path / "bucket" / "nano" / "copy")
    assert diloco("runs", "rm", url, "-y").returncode == 0
    assert mine.read_bytes() == b"mine" and (tmp_path / "bucket/nano/copy/FORMAT.json").exists()
    assert not (tmp_path / "bucket/nano/FORMAT.json").exists()


def test_a_regions_bucket_is_removed_with_home_where_it_is_this_runs(diloco: Call, tmp_path: Path) -> None:
    home, region, victim = (f"file://{tmp_path}/{place}/nano" for place in ("home", "home/eu", "evil/victim"))
    (tmp_path / "evil/victim/nano").mkdir(parents=True)
    (tmp_path / "evil/victim/nano/FORMAT.json").write_text("{}")
    for name, store in (("home", region), ("evil", victim), ("far", home)):
        run = replace(NANO, home_url=f"file://{tmp_path}/{name}/nano", regions=(RegionStore("eu", store),))
        make_bucket(tmp_path / name / "nano", run)
    make_bucket(tmp_path / "home/eu/nano", replace(NANO, home_url=home, regions=(RegionStore("eu", region),)))
    for name, named in (("evil", victim), ("far", home)):
        refused = diloco("runs", "rm", f"file://{tmp_path}/{name}/nano", "-y")
        assert refused.returncode == 8 and named in refused.stderr
    assert (tmp_path / "evil/victim/nano/FORMAT.json").exists() and (tmp_path / "home/nano/FORMAT.json").exists()
    refused = diloco("runs", "rm", region, "-y")
    assert refused.returncode == 8 and home in refused.stderr
    done = diloco("runs", "rm", home, "-y")
    assert done.returncode == 0 and home in done.stdout and region in done.stdout, done.stderr
    assert not (tmp_path / "home/nano").exists() and not (tmp_path / "home/eu/nano").exists()


def test_a_name_never_leads_out_of_the_folder_that_has_it(projects: Path, call: Call) -> None:
    folder = copied("quickstart", projects / "d")
    edit(folder / "run.yaml", "name: quickstart", "name: other")
    make_bucket(projects / "elsewhere" / "other")
    remember_run_of(projects, f"file://{projects}/elsewhere/other")
    for words in (["status"], ["export", "other"], ["stop", "other"], ["runs", "rm", "other", "-y"]):
        done = call("d", *words)
        assert done.returncode == 4 and "was not launched yet" in done.stderr, done.stderr
    (folder / "run.yaml").write_text("version: 1\nname: other\n")
    for words in (["stop"], ["gc", "other"]):
        done = call("d", *words)
        assert done.returncode in (2, 4) and "elsewhere" not in done.stdout + done.stderr


@pytest.mark.parametrize("file", ["run.yaml", "inventory.yaml"])
def test_a_file_in_mid_edit_keeps_nobody_from_the_run(projects: Path, call: Call, file: str) -> None:
    path, url = projects / "a" / file, url_of(projects, "a")
    before = path.read_text()
    path.write_text(before + "islands: [{name: \n")
    try:
        for words in (["status"], ["status", "same"], ["stop", "run.yaml"]):
            refused = call("a", *words)
            assert refused.returncode == 2 and f"; or name the run by its URL: {url}\n" in refused.stderr
        assert call("a", "status", url).returncode == 0
        refused = call("b", "status", f"../a/{path.name}" if file == "run.yaml" else "../a/run.yaml")
        assert url in refused.stderr and url_of(projects, "b") not in refused.stderr
    finally:
        path.write_text(before)


def remember_run_of(projects: Path, url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DILOCO_HOME", str(projects / "home"))
        patch.chdir(projects / "elsewhere")
        remember_run(url)


def test_the_bucket_of_a_run_that_was_launched_here_is_missed_not_made_anew(diloco: Call, tmp_path: Path) -> None:
    folder = copied("quickstart", tmp_path / "q")
    remember_run(f"file://{folder}/bucket/quickstart")
    done = run_diloco("status", folder=folder)
    assert done.returncode == 6 and "is gone" in done.stderr and "launch" not in done.stderr


@pytest.mark.parametrize("run", ["x" * 300, "a\0b".replace("\0", "\t")])
def test_what_is_no_name_is_not_found(diloco: Call, run: str) -> None:
    done = diloco("status", run)
    assert done.returncode == 4 and "bug" not in done.stderr


def test_a_run_that_was_heard_a_moment_ago_is_not_removed(diloco: Call, tmp_path: Path) -> None:
    url = make_bucket(tmp_path / "bucket" / "nano")
    say(tmp_path / "bucket" / "nano", "iowa", -600)  # by a store whose clock is ahead: however long the command takes
    done = diloco("runs", "rm", url, "-y")
    assert done.returncode == 8 and "iowa worked a moment ago" in done.stderr
    assert (tmp_path / "bucket" / "nano" / "FORMAT.json").exists()
