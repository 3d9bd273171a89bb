"""`diloco report` on buckets without any process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from diloco_cli.cli import jobs
from diloco_cli.cli.run_data import FORMATS
from diloco_cli.engines.port import Job, JobState
from diloco_cli.launch.new_run import keep_plan
from diloco_cli.launch.plan_files import resolve
from diloco_cli.paths import install_hint
from diloco_cli.protocol.log.keys import PLAN_KEY, commit_key
from diloco_cli.store.local import LocalStore
from tests.benchmarks.report import build
from tests.cli.bucket import make_bucket
from tests.cli.conftest import Diloco, called
from tests.forked import ROOT

COMMITS = 120


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bucket") / "long"
    folder.mkdir()
    build(folder, COMMITS)
    return f"file://{folder}"


def test_a_page_a_picture_and_a_table_of_one_run(diloco: Diloco, url: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for form in FORMATS:
        done = diloco("report", url, "--format", form)
        assert done.returncode == 0 and f"long.{form}" in done.stdout, done.stderr
    again = diloco("report", url)  # brings its own page up to date, and overwrites no other file
    assert again.returncode == 0, again.stderr
    assert diloco("report", url, "--format", "csv").returncode == 2
    page, picture, table = ((tmp_path / f"long.{form}").read_text() for form in FORMATS)
    assert page.startswith("<!doctype html>") and page.count("<figure>") == 7
    assert '<span class="state' in page and "epoch 1 starts" in page
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert table.splitlines()[0].startswith("time_s,tokens,") and len(table.splitlines()) > 100


def test_without_matplotlib_the_command_that_installs_it_is_told_before_anything_is_read(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert called(monkeypatch, "report", url) == 2
    said = capsys.readouterr().err
    assert "matplotlib" in said and install_hint("report") in said


def test_the_numbers_as_json_are_those_of_the_log_and_need_no_matplotlib(diloco: Diloco, url: str) -> None:
    for heartbeat in Path(url.removeprefix("file://"), "heartbeat").rglob("*.json"):
        os.utime(heartbeat, (0, 0))  # so that both commands, whenever they look, find everybody silent
    done = diloco("report", url, "--json")
    data, state = json.loads(done.stdout)["data"], json.loads(diloco("status", url, "--json").stdout)["data"]
    assert data["file"] is None and data["commits"] == COMMITS == state["commit"] + 1
    assert (data["tokens"], data["loss"], data["state"]) == (state["tokens"], state["loss"], state["state"])
    assert len(data["learners"]) == 64 and sum(row["tokens"] for row in data["learners"]) <= data["tokens"]


def test_jobs_stand_beside_and_an_engine_that_is_silent_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = Job("iowa", "slurm", "7", JobState.QUEUED, "Resources")
    monkeypatch.setattr(jobs, "asked", lambda opened: ([queued], "jobs: not asked: ssh box"))
    assert called(monkeypatch, "report", make_bucket(tmp_path / "nano"), "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["data"]["jobs"][0]["why"] == "Resources" and "not asked: ssh box" in told.err


def test_a_run_that_has_just_been_created_is_reported(diloco: Diloco, tmp_path: Path) -> None:
    done = diloco("report", make_bucket(tmp_path / "nano"), "--json")
    assert json.loads(done.stdout)["data"]["merges"] == 0, done.stderr


def test_a_broken_chain_is_a_failed_data_check_with_the_command_that_looks_closer(
    diloco: Diloco, tmp_path: Path
) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    build(folder, COMMITS)
    (folder / commit_key(5)).write_bytes((folder / commit_key(6)).read_bytes())
    done = diloco("report", f"file://{folder}", "--json", DILOCO_HOME=str(tmp_path))
    assert done.returncode == 11 and "chain is broken" in done.stderr + done.stdout
    assert "diloco verify" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "report.pdf"], "unknown format 'pdf'; allowed: html, svg, csv"),
        (["--format", "png"], "unknown format 'png'"),
        (["-o", "report"], "no format is known for report"),
        (["-o", "nowhere/report.html"], "no directory nowhere"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_read(
    diloco: Diloco, url: str, words: list[str], message: str
) -> None:
    done = diloco("report", url, *words)
    assert done.returncode == 2 and message in done.stderr and "hint:" in done.stderr


def test_launch_keeps_its_plan_once_with_the_names_of_the_users_files_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    found = resolve(ROOT / "examples" / "quickstart" / "run.yaml", ["train.tokens=1M"])
    keep_plan(store, found.plan, found.origins)
    before = store.get(PLAN_KEY, 1 << 20)
    keep_plan(store, found.plan, {})
    kept = json.loads(before)
    assert store.get(PLAN_KEY, 1 << 20) == before
    assert kept["prediction"]["tokens_per_s"] > 0 and kept["islands"][0]["name"] == "iowa"
    assert kept["origins"]["sync.every"] == "run.yaml:12" and kept["origins"]["train.tokens"] == "--set"
    assert str(ROOT) not in before.decode()
