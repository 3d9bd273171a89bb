"""`diloco inventory probe`, and `init` on a cluster, as a user meets them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from diloco_cli.cli.init import FirstPlace, init
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.probe import measure
from tests.cli.conftest import Diloco, called

ROOT = Path(__file__).resolve().parents[2]


def test_a_machine_is_measured_into_a_new_inventory_that_can_be_read(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By matrices that are multiplied soon."""
    monkeypatch.setitem(measure.SIDES, "cpu", 128)
    monkeypatch.chdir(tmp_path)
    words = ("inventory", "probe", "--seconds", "0.01", "--store", "shelf", "--name", "my-box", "-o", "new.yaml")
    assert called(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "new.yaml").read_text() == said and "matrix product, fp32" in said
    inventory = load_inventory(tmp_path / "new.yaml")
    assert inventory.islands[0].name == "my-box" and inventory.islands[0].link.up_bps
    assert inventory.store.url == f"file://{tmp_path}/shelf" and not any((tmp_path / "shelf").rglob("*probe*"))
    for place, told in (("new.yaml", "new.yaml exists already"), ("missing/new.yaml", "no directory missing")):
        again = diloco("inventory", "probe", "-o", place)
        assert again.returncode == 2 and told in again.stderr and "hint:" in again.stderr


@pytest.mark.parametrize(
    ("said", "islands"),
    [
        (
            "a|up|idle|2|(null)\na|up|down*|1|(null)\nb*|up|mixed|1|(null)\nc|up|idle|1|(null)",
            "slurm/b cpu, slurm/a cpu",
        ),
        ("a*|up|down*|2|(null)\nb|up|drained|1|(null)\nc|up|idle~|1|(null)", "slurm/c cpu, slurm/c cpu"),
        ("a|inact|idle|2|(null)\nb*|up|allocated|1|(null)", "slurm/b cpu, slurm/a cpu"),
        ("a*|up|idle|2|(null)\nb|up|mixed|1|gpu:h100:8(S:0-1)", "slurm/b H100-SXM, slurm/b H100-SXM"),
        ("a*|up|idle|2|(null)\nb|up|down|1|gpu:h100:8\nb|up|idle|1|(null)", "slurm/a cpu, slurm/b cpu"),
        ("a*|up|idle|2|gpu:4\nb|up|idle|1|gpu:nvidia_h100_80gb_hbm3:8", "slurm/b H100-SXM, slurm/b H100-SXM"),
        ("welcome\na|up|idle|2|gpu:h1000:8", "slurm/a cpu, slurm/a cpu"),
        ("", "slurm/first cpu, slurm/second cpu"),
    ],
)
def test_a_first_run_on_slurm_has_the_partitions_where_it_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, islands: str
) -> None:
    plays(tmp_path / "sinfo", f"echo '{said}' | sed 's/$/|8|n1/'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert called(monkeypatch, "init", str(tmp_path / "new"), "--for", "slurm") == 0
    found = load_inventory(tmp_path / "new" / "inventory.yaml")
    assert ", ".join(f"{island.infra} {island.accelerators.name}" for island in found.islands) == islands


@pytest.mark.parametrize("place", list(FirstPlace))
@pytest.mark.parametrize("name", ["mine", "a-folder-whose-name-is-longer-than-the-column-of-the-comments"])
def test_a_run_is_named_after_its_folder(tmp_path: Path, place: FirstPlace, name: str) -> None:
    init(tmp_path / name, place, yes=False)
    written = (tmp_path / name / "run.yaml").read_text()
    assert yaml.safe_load(written)["name"] == name
    assert not re.search(" $", written, re.MULTILINE)


@pytest.mark.long
def test_the_quickstarts_inventory_is_measured_with_its_own_model(diloco: Diloco) -> None:
    run = str(ROOT / "examples" / "quickstart" / "run.yaml")
    done = diloco("inventory", "probe", "-f", run, "--seconds", "0.2", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)["data"]
    assert data["tokens_per_s"]["median"] > 1000
    assert data["inventory"].count("tokens_per_s: ") == 3


def test_a_clusters_nodes_become_an_inventory_and_an_empty_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    plays(tmp_path / "sinfo", "echo 'a*|up|idle|2|gpu:h100:8|96|n[1-2]'; echo 'b|up|down|1|(null)|4|n3'")
    plays(tmp_path / "kubectl", 'case "$*" in *contexts*) echo gke;; *) echo "{\\"items\\": []}";; esac')
    assert called(monkeypatch, "inventory", "from", "slurm", "--region", "us", "-o", "new.yaml") == 0
    said = capsys.readouterr()
    assert said.out == (tmp_path / "new.yaml").read_text() and "left out: b: 1 down" in said.err
    machine = load_inventory(tmp_path / "new.yaml").machines[0]
    assert (machine.infra, machine.nodes, machine.region) == ("slurm/a", 2, "us")
    for words, told in (
        (("slurm", "c"), "there is no partition 'c'; there are: a, b"),
        (("slurm", "b"), "slurm has no node that takes a job now"),
        (("kubernetes", "gke"), "kubernetes has no node that takes a job now"),
        (("ssh",), "which hosts?"),
        (("slurm", "-o", "new.yaml"), "new.yaml exists already"),
    ):
        assert called(monkeypatch, "inventory", "from", *words) != 0
        assert told in capsys.readouterr().err


def plays(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
