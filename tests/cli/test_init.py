"""`diloco inventory probe`, and `init` on a cluster, as a user meets them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

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
    again = diloco("inventory", "probe", "-o", "new.yaml")
    assert again.returncode == 2 and "there is a file already" in again.stderr and "hint:" in again.stderr


@pytest.mark.parametrize(
    ("said", "islands"),
    [
        ("gpu\ngpu\nlong\nx", ["slurm/gpu", "slurm/long"]),
        ("all", ["slurm/all"] * 2),
        ("", ["slurm/first", "slurm/second"]),
    ],
)
def test_a_first_run_on_slurm_has_the_clusters_own_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, islands: list[str]
) -> None:
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert called(monkeypatch, "init", str(tmp_path / "new"), "--for", "slurm") == 0
    found = load_inventory(tmp_path / "new" / "inventory.yaml")
    assert [island.infra for island in found.islands] == islands


@pytest.mark.long
def test_the_quickstarts_inventory_is_measured_with_its_own_model(diloco: Diloco) -> None:
    run = str(ROOT / "examples" / "quickstart" / "run.yaml")
    done = diloco("inventory", "probe", "-f", run, "--seconds", "0.2", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)["data"]
    assert data["tokens_per_s"]["median"] > 1000
    assert data["inventory"].count("tokens_per_s: ") == 3
