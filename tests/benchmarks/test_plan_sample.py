"""A sample of the planning benchmark, with slack for a busy machine: planning stays far from quadratic."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import plan

SLACK = 3  # times the goal


@pytest.mark.parametrize("searched", [False, True])
def test_a_thousand_islands_are_planned_in_seconds(searched: bool) -> None:
    assert plan.seconds(plan.islands(1000), searched) < SLACK * 2.0


def test_ten_thousand_machines_are_planned_in_seconds() -> None:
    assert plan.seconds(plan.machines(10_000), searched=True) < SLACK * 2.0


def test_ten_thousand_hosts_listed_one_by_one_are_read_and_planned_in_seconds(tmp_path: Path) -> None:
    assert plan.of_command(plan.write_hosts(tmp_path / "hosts.yaml", 10_000)) < SLACK * 2.0


def test_the_templates_are_planned_in_no_time() -> None:
    assert min(plan.of_templates() for _ in range(3)) < SLACK * 0.5
