"""A sample: the benchmarks still fit the product. Their figures are measured by hand, each with one command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.learner.facts import Facts
from diloco_cli.protocol.log.commit_log import parse_format
from tests.benchmarks import exchange, inner_step, micro_batch, prefetch, recovery, simulate, startup, syncer_memory
from tests.benchmarks.measure import spread
from tests.unit.protocol.integer_ports import WrittenLog
from tests.unit.protocol.living import Living
from tests.unit.protocol.records import make_run


def test_the_exchange_benchmark_can_create_its_run(tmp_path: Path) -> None:
    exchange.prepare(exchange.SETUPS["cpu"], tmp_path, f"file://{tmp_path}/bucket/quickstart")
    found = parse_format((tmp_path / "bucket" / "quickstart" / "FORMAT.json").read_bytes(), "here")
    assert [island.name for island in found.islands] == ["alone"]


def test_the_recovery_benchmark_reads_first_steps_from_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As a learner writes it: one that dies before its first step, and its successor."""
    log = WrittenLog(make_run())
    for nonce in ("a", "b"):
        facts = Facts("alone")
        facts.began(Living(log, nonce=nonce).learner)
    facts.missed("version 0 of fragment 1 cannot be read")
    facts.stepped(0, 4)
    (tmp_path / "log").write_text("".join(capfd.readouterr()))
    assert list(recovery.first_steps(tmp_path / "log")) == [2]


def test_start_up_times_are_positive_and_spread_names_its_count(tmp_path: Path) -> None:
    assert startup.seconds(["true"], tmp_path) > 0
    assert spread([1.0, 2.0, 3.0]) == "2.000 (1.000 to 3.000, n=3)"


def test_the_step_benchmark_measures_positive_rates() -> None:
    (rates,) = inner_step.measure(("gpt-pico",), rounds=1).values()
    assert len(rates) == 1 and rates[0] > 0


def test_the_micro_batch_benchmark_measures_and_estimates() -> None:
    rate, peak = micro_batch.measured("gpt-pico", 64, batch_tokens=128)
    assert rate > 0 and peak > -micro_batch.GB
    assert micro_batch.estimated("gpt-pico", 128) == 2 * micro_batch.estimated("gpt-pico", 64) > 0


def test_the_prefetch_benchmark_measures_by_both_clocks() -> None:
    replica = inner_step.replica_of("gpt-pico")
    wall, cpu = prefetch.gains(replica, prefetch.Costly(replica.data, prefetch.asleep, 0.001), rounds=1)
    assert len(wall) == len(cpu) == 1 and wall[0] > 0 and cpu[0] > 0


def test_the_memory_benchmark_watches_a_syncer_merge() -> None:
    assert syncer_memory.measured(learners=1, megabytes=0.1) < syncer_memory.GOAL_MB


def test_the_simulation_benchmark_counts_what_it_times() -> None:
    rows = simulate.curve(days=0.05)
    assert [chips for chips, _, _ in rows] == list(simulate.CURVE_CHIPS)
    assert rows[-1][1] > 100 * rows[0][1] and all(seconds > 0 for _, _, seconds in rows)
    assert 80 < simulate.history(0, days=0.05) < 95


def test_the_simulation_benchmark_draws_what_it_counts() -> None:
    pytest.importorskip("matplotlib")
    rows = [(chips, 2000, 0.004) for chips in simulate.CURVE_CHIPS]
    assert simulate.plot(rows, rows).startswith("<svg")


def test_the_simulation_benchmark_says_which_goals_are_missed() -> None:
    level = [(chips, 2000, 0.004) for chips in simulate.CURVE_CHIPS]
    by_failures = [(chips, chips // 100, chips * 1e-8) for chips in simulate.CURVE_CHIPS]
    by_chips = [(chips, 2000, chips * 1e-8) for chips in simulate.CURVE_CHIPS]
    assert simulate.growth(by_failures, level) == []
    assert len(simulate.growth(by_chips, level)) == len(simulate.growth(by_failures, by_chips)) == 1
    assert simulate.show("from failure to failure", [0.2], [9.0]) == []
    assert simulate.show("from failure to failure", [1.2], [1.2]) != []


def test_a_process_s_rate_is_counted_with_and_without_tls() -> None:
    """In a process of its own, because trusted certificates are read when aiohttp is imported."""
    command = [sys.executable, "-m", "tests.benchmarks.one_process", "--rounds", "1", "--megabytes", "9"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert [line.split(":")[0] for line in printed.splitlines()[1:]] == [
        "https, up", "https, down", "http, up", "http, down",
    ]  # fmt: skip
