"""A sample of the report benchmark: points are counted, and nothing is timed but what a cloud's calls take together."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.report.history import MAX_POINTS
from diloco_cli.store.wrapper import MeteredStore
from tests.benchmarks import report

COMMITS = 1_500


def test_a_log_as_the_benchmark_builds_it_is_reported(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    run = report.build(tmp_path / "log", COMMITS)
    calls = MeteredStore(report.cloud(tmp_path / "log"))
    looked_s = report.look_s(calls, run)
    assert looked_s < calls.counts.num_requests * report.CLOUD_RTT_S / 4, "not one call after the other"
    words = ["report", f"file://{tmp_path / 'log'}", "--format", "csv", "-o", str(tmp_path / "long.csv")]
    seconds, cpu_s, memory = report.timed(words, tmp_path / "home")
    assert seconds > 0 and cpu_s > 0 and 0 < memory < 500
    assert 1_000 < report.points(tmp_path / "long.csv") <= MAX_POINTS
    pytest.importorskip("matplotlib")
    page = tmp_path / "long.html"
    report.timed([*words[:2], "-o", str(page)], tmp_path / "home")
    assert page.stat().st_size < 3 * report.MB
