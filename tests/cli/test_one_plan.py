"""`plan`, `simulate run`, `launch` and the run itself have the same plan, digest for digest."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.cli.conftest import Diloco, edit
from tests.forked import ROOT

RUN_FILES = ("quickstart/run.yaml", "plan/machines-run.yaml", "own-loop/trainer.yaml", "vision/run.yaml")


def data_of(done: CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)["data"]
    return found


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-plan") / "examples"
    return shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("bucket", "*plan.json", "*.svg"))


@pytest.mark.parametrize("file", RUN_FILES)
def test_three_commands_have_one_plan(diloco: Diloco, examples: Path, file: str) -> None:
    run = str(examples / file)
    planned = data_of(diloco("plan", "-f", run, "--fast", "--json"))["digest"]
    assert data_of(diloco("simulate", "run", run, "--for", "1s", "--json"))["plan"] == planned
    dry = diloco("launch", run, "-n", "--json")
    at = r"(?:\d{4}-\d\d-\d\d )?\d\d:\d\d"  # with the day, if midnight has passed since
    said = re.search(rf"^plan ([0-9a-f]{{12}}), as planned {at}$", dry.stderr, re.M)
    assert said is not None and said[1] == str(planned).partition("-")[2][:12], dry.stderr
    if file.startswith("plan/"):  # of hardware that is nowhere
        assert dry.returncode and "Traceback" not in dry.stderr
    else:
        assert data_of(dry)["digest"] == planned


def test_a_run_that_was_created_names_the_plan_that_was_read(diloco: Diloco, quickstart: Path) -> None:
    home = str(quickstart.parent / "home")
    planned = data_of(diloco("plan", "-f", "q/run.yaml", "--fast", "--json"))["digest"]
    launched = diloco("launch", "q/run.yaml", "--create-only", DILOCO_HOME=home)
    assert launched.returncode == 0 and "as planned" in launched.stderr, launched.stderr
    assert data_of(diloco("status", "q/run.yaml", "--json", DILOCO_HOME=home))["plan"] == planned
    short = str(planned).partition("-")[2][:12]
    assert f"plan {short}; not signed" in diloco("status", "q/run.yaml", DILOCO_HOME=home).stdout


def test_what_a_site_is_stays_on_the_machine_that_launches(diloco: Diloco, quickstart: Path) -> None:
    site = "lab: {engine: slurm, via: ssh login.lab, directory: /shared/me}"
    edit(quickstart / "inventory.yaml", "version: 1", f"version: 1\nsites: {{{site}}}")
    home = quickstart.parent / "home"
    assert diloco("launch", "q/run.yaml", "--create-only", DILOCO_HOME=str(home)).returncode == 0
    names = [path for path in quickstart.parent.rglob("*") if path.is_file() and b"login.lab" in path.read_bytes()]
    assert quickstart / "inventory.yaml" in names and any(path.is_relative_to(home) for path in names)
    assert any((quickstart / "bucket").rglob("FORMAT.json"))
    assert not [path for path in names if path.is_relative_to(quickstart / "bucket")]


def test_a_run_goes_on_as_it_was_planned_although_another_search_finds_other_settings(
    diloco: Diloco, quickstart: Path
) -> None:
    """The inventory's words changed since; nobody gave the setting, so it is the run's."""
    home = str(quickstart.parent / "home")
    assert diloco("launch", "q/run.yaml", "--create-only", "--set", "sync.quorum=2", DILOCO_HOME=home).returncode == 0
    edit(quickstart / "inventory.yaml", "version: 1", "version: 1\ndevices: {Other: {bf16_tflops: 1, memory_gb: 1}}")
    again = diloco("launch", "q/run.yaml", "--create-only", DILOCO_HOME=home)
    assert again.returncode == 0, again.stderr
    assert "going on with it, as launched by plan " in again.stderr
    other = diloco("launch", "q/run.yaml", "--create-only", "--set", "sync.quorum=1", DILOCO_HOME=home)
    assert other.returncode == 2 and "sync.quorum (2 there, 1 here)" in other.stderr, other.stderr
