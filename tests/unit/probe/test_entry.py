"""The first run of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.inventory_file import inventory_to_text
from diloco_cli.config.run_file import load_run
from diloco_cli.launch.plan_files import read_plan
from diloco_cli.paths import templates_directory
from diloco_cli.plan.plan import Plan
from diloco_cli.probe.entry import first_inventory, first_run
from diloco_cli.probe.measure import MachineFacts, spread_of

TEMPLATE = (templates_directory() / "start" / "here.yaml").read_text()


def machine(accelerators: Accelerators, cores: int = 2, known: bool = True, memory_gb: float | None = None):
    device = "cpu" if accelerators.name == "cpu" else "cuda:0"
    return MachineFacts(accelerators, known, memory_gb, cores, 16.0, device)


def planned(found: MachineFacts, folder: Path, tokens_per_s: float | None = None, peak: float | None = None) -> Plan:
    entry = first_inventory(found, {"fp32": spread_of([peak])} if peak else {})
    (folder / "inventory.yaml").write_text(inventory_to_text(entry.inventory, entry.comments))
    (folder / "run.yaml").write_text(first_run(TEMPLATE, found, tokens_per_s))
    return read_plan(folder / "run.yaml", [])


@pytest.mark.parametrize(
    ("cores", "each"),
    [(1, 1), (2, 1), (8, 4), (64, 4)],
)
def test_without_an_accelerator_two_learners_share_the_cores(cores: int, each: int, tmp_path: Path) -> None:
    plan = planned(machine(Accelerators("cpu", 1), cores), tmp_path)
    assert {island.name: island.accelerators for island in plan.islands} == {
        "cpu-0": f"cpu:{each}",
        "cpu-1": f"cpu:{each}",
    }
    assert plan.run.model.preset == "gpt-nano" and plan.verdict == "feasible", plan.warnings
    assert plan.inventory.store.url == f"file://{tmp_path}/bucket"


@pytest.mark.parametrize("count", [1, 8])
def test_every_accelerator_is_an_island(count: int, tmp_path: Path) -> None:
    plan = planned(machine(Accelerators("H100-SXM", count), 64, memory_gb=80.0), tmp_path)
    assert [island.accelerators for island in plan.islands] == ["H100-SXM:1"] * count
    assert plan.run.model.preset == "gpt-small" and plan.run.sync.every == max(100, 50 * count)
    assert plan.verdict == "feasible", plan.warnings


def test_a_device_that_no_catalogue_knows_is_described_as_it_was_measured(tmp_path: Path) -> None:
    plan = planned(machine(Accelerators("Strange-9", 1), 8, known=False, memory_gb=16.0), tmp_path, peak=40.0)
    assert plan.inventory.devices["Strange-9"].fp32_tflops == 40.0 and plan.verdict.startswith("feasible")


def test_apples_get_one_learner(tmp_path: Path) -> None:
    plan = planned(machine(Accelerators("mps", 1), 8), tmp_path)
    assert len(plan.islands) == 1 and plan.run.model.preset == "gpt-micro"


@pytest.mark.parametrize("speed", [10.0, 52_000.0, 3_000_000.0])
def test_the_run_is_about_a_minute_long_as_planned(speed: float, tmp_path: Path) -> None:
    planned(machine(Accelerators("cpu", 1)), tmp_path, speed)
    tokens = load_run(tmp_path / "run.yaml").train.tokens
    assert tokens == 1_000_000 or 30 <= tokens / speed <= 60
    comments = [line.index("#") for line in TEMPLATE.splitlines() if line.startswith("  ") and "#" in line]
    written = (tmp_path / "run.yaml").read_text().splitlines()
    assert [line.index("#") for line in written if line.startswith("  ") and "#" in line] == comments
