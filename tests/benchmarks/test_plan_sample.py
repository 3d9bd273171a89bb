"""A sample of the planning benchmark, in CPU seconds and with slack: planning stays far from quadratic."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks import plan

SLACK = 3  # times the goal


def cpu_s(work: Callable[[], object]) -> float:
    """What it took of processors, here and in processes that have ended, whoever else wanted them."""
    before = os.times()
    work()
    return sum(os.times()[:4]) - sum(before[:4])


@pytest.mark.parametrize("searched", [False, True])
def test_a_thousand_islands_are_planned_in_seconds(searched: bool) -> None:
    assert cpu_s(lambda: plan.seconds(plan.islands(1000), searched)) < SLACK * 2.0


def test_ten_thousand_machines_are_planned_in_seconds() -> None:
    assert cpu_s(lambda: plan.seconds(plan.machines(10_000), searched=True)) < SLACK * 2.0


def test_ten_thousand_hosts_listed_one_by_one_are_read_and_planned_in_seconds(tmp_path: Path) -> None:
    hosts = plan.write_hosts(tmp_path / "hosts.yaml", 10_000)
    assert cpu_s(lambda: plan.of_command(hosts)) < SLACK * 2.0


def test_the_templates_are_planned_in_no_time() -> None:
    assert min(cpu_s(plan.of_templates) for _ in range(3)) < SLACK * 0.5
