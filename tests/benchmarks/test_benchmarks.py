"""A sample of each benchmark: it still fits the product and computes what it times. The figures are measured by hand,
each with one command (README.md); samples that take long, or much of the machine, run with `pytest -m long`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diloco_cli.learner.daemon import Facts
from diloco_cli.protocol.log.commit_log import parse_format
from diloco_cli.protocol.log.commits import Commit, Merge
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.records import Mixing
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import decode
from diloco_cli.report.history import MAX_POINTS
from diloco_cli.store.wrappers import MeteredStore
from tests.benchmarks import (
    bookkeeping,
    codecs,
    durable,
    exchange,
    idle,
    inner_step,
    learner_memory,
    merge,
    micro_batch,
    pace,
    participation,
    plan,
    rank_blocking,
    rank_memory,
    recovery,
    report,
    simulate,
    startup,
    syncer_memory,
)
from tests.benchmarks.measure import spread
from tests.benchmarks.participation import LEAST, LEAST_OF_SLOW, MAX_LATE, MIXINGS, Marked, linked, play
from tests.benchmarks.rank_blocking import percent
from tests.benchmarks.rank_memory import MemoryCase
from tests.unit.protocol.integer_ports import WrittenLog
from tests.unit.protocol.living import Living
from tests.unit.protocol.records import make_run

pytestmark = pytest.mark.usefixtures("one_thread")  # as in the benchmarks


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


@pytest.mark.long
def test_a_process_s_rate_is_counted_with_and_without_tls() -> None:
    """In a process of its own, because trusted certificates are read when aiohttp is imported."""
    command = [sys.executable, "-m", "tests.benchmarks.one_process", "--rounds", "1", "--megabytes", "9"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert [line.split(":")[0] for line in printed.splitlines()[1:]] == [
        "https, up", "https, down", "http, up", "http, down",
    ]  # fmt: skip


SIZE = 1 << 17


def test_all_ways_to_merge_that_are_timed_give_the_same(tmp_path: Path) -> None:
    of = merge.bench("int8", SIZE, learners=3)
    of.merge("avg", check=True)
    ours = [vector.clone() for vector in of.after.values()]
    files = [tmp_path / f"{i}" for i in range(3)]
    for file, payload in zip(files, of.payloads, strict=True):
        file.write_bytes(payload)
    merge.stack_and_mean(of, files)
    for found, expected in zip(of.after.values(), ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    fused = merge.fused_kernel(of, tmp_path)
    if fused is None:
        pytest.skip("no gcc here: the merge benchmark leaves the fused kernel out too")
    of.after["parameters"].zero_()
    fused()
    torch.testing.assert_close(of.after["parameters"], ours[0], rtol=1e-5, atol=1e-6)


def test_the_merge_benchmark_prints_a_verdict_for_every_row(tmp_path: Path) -> None:
    lines = merge.kernels(merge.bench("int8", SIZE), merge.bench("fp32", SIZE), tmp_path, rounds=1)
    lines += merge.from_files(SIZE, tmp_path, rounds=1) + durable.ingest(SIZE, 2, tmp_path, rounds=1)
    assert [line[0] for line in lines if line[0].isdigit() and line.endswith(("yes", "NO"))] == [
        "1",
        "1",
        "5",
        "2",
        "4",
    ]


def test_a_merge_needs_no_memory_beyond_what_is_resident() -> None:
    """At 4 Mi parameters one decoded delta would be 17 MB, a second copy of the new version 34 MB."""
    assert durable.megabytes_beyond(4, 1 << 22) < 8


def test_the_codec_benchmark_measures_real_deltas() -> None:
    delta = codecs.trained_delta(seed=0, steps=2)
    assert delta.numel() > 10_000 and float(delta.norm()) > 0
    lines = codecs.errors([delta]) + codecs.speed(1 << 16, rounds=1)
    assert sum(line.endswith(("yes", "NO")) for line in lines) == 3


def test_e3m0_rounds_to_powers_of_two_of_the_blocks_largest() -> None:
    values = torch.tensor([8.0, -5.9, 6.1, 0.13, 0.06, 0.0])
    assert codecs.e3m0(values).tolist() == [8.0, -4.0, 8.0, 0.125, 0.0, 0.0]


def test_every_learner_of_the_log_is_merged_and_its_next_offer_stays_pending() -> None:
    log = bookkeeping.made_log(6, merges=2)
    found = bookkeeping.times(log, 2)  # asserts that the inbox keeps every offer
    assert len(found.decode) == len(found.beyond_decoding) == 2
    assert found.read == found.written, "too short to be compressed"
    assert {name: known.merges for name, known in log.state.learners.items()} == dict.fromkeys(log.names, 4)
    assert len(log.names) == 6 and len(log.state.members) == 3


def test_a_long_commit_is_compressed() -> None:
    found = bookkeeping.times(bookkeeping.made_log(300, merges=1), 1)
    assert found.read[0] < found.written[0] / 2


def test_an_idle_syncer_turns_four_times_a_second_and_asks_less_often() -> None:
    """Four silent learners for 40 s at slots of 5 s: eight looks a slot into each mailbox of one that was never heard;
    once a slot each incarnation, the log and the requests; a heartbeat each 3 s."""
    clock = idle.idle(learners=4, seconds=40.0)
    assert clock.requests is not None
    assert 150 <= clock.turns <= 162
    assert clock.requests["get"] <= 4 * 8 * (8 + 1) + 9 * (4 + 2)
    assert clock.requests["put"] <= 14 and clock.requests["list"] == clock.requests["create"] == 0


MOST_PERCENT = 10.0  # of a model so small that each fragment's message weighs more than its bytes


@pytest.mark.long
def test_ranks_send_and_adopt_in_little_time_and_wait_for_no_copy() -> None:
    found = rank_blocking.measured(MemoryCase("small", 2, 2, fragments=4))
    assert found["waits"] == [0.0]
    for name in ("exchange", "slow exchange"):
        assert max(percent(found, name)) < MOST_PERCENT


WITHIN = 0.25  # of some hundred MB: what a process allocates beside its model weighs more than in the benchmark

CASES = [MemoryCase("small", 1, 8), MemoryCase("small", 2, 8, host=True)]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=["one rank", "two ranks"])
def test_a_ranks_memory_is_what_plan_says(case: MemoryCase) -> None:
    assert rank_memory.measured(case) == pytest.approx(case.planned(), rel=WITHIN)


MILLIONS, FRAGMENTS = 8, 2
REST_BYTES = 16e6  # what a process allocates for itself once it has built its model


@pytest.mark.long
def test_a_learner_offers_and_adopts_within_two_fragments() -> None:
    """Values that were sent are held until the offer is in the bucket. An adoption is short: a sample may miss it."""
    peaks = learner_memory.measured(learner_memory.cases(FRAGMENTS)[0], MILLIONS, commits=4)
    unit, rest = 4 * MILLIONS * 2**20 / FRAGMENTS, peaks.rest
    assert abs(rest) < REST_BYTES
    tops = {what.name: peaks.of(what) for what in learner_memory.ROWS if what.bound}
    beyond = {name: (top - rest) / unit for name, top in tops.items() if top is not None}
    assert set(beyond) == {"offering", "adopting"}
    assert all(most < learner_memory.GOAL for most in beyond.values()), beyond
    assert beyond["offering"] > 0.5, "sampled while it offered"


@pytest.mark.parametrize("mixing", MIXINGS)
def test_learners_of_unequal_speed_take_part_in_nearly_every_merge(mixing: Mixing) -> None:
    found = play(participation.spread_pacings(4, 0.03), 12, mixing, steps=240)
    assert found.participation >= LEAST and found.merges >= LEAST and found.late <= MAX_LATE
    assert found.uptime == pytest.approx(1.0, abs=0.05), "nobody waits"
    if mixing == "rebase":
        assert found.merged >= LEAST


def test_what_a_slow_island_trains_is_merged() -> None:
    assert play((linked(2.0), linked(2.0), linked(12.0)), 4, "rebase", steps=240).merged_by[-1] >= LEAST_OF_SLOW


def test_learners_that_fail_are_up_for_less_than_the_whole_time() -> None:
    (row,) = list(participation.failure_rows(Marked(), ("rebase",), (4,), (2,), seeds=1, steps=240))[2:]
    uptime = float(row.split(" | ")[3])
    assert 0.3 < uptime < 0.97


def test_the_time_of_stretches_that_overlap_counts_once() -> None:
    assert participation.covered_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0)]) == 4.0


def test_a_figure_beyond_its_bound_is_marked_and_counted() -> None:
    marked = Marked()
    assert [marked.least(0.96), marked.least(0.94), marked.least(0.5, None)] == ["0.960", "**0.940**", "0.500"]
    assert [marked.late(0.01), marked.late(0.06)] == ["1.0 %", "**6.0 %**"]
    assert marked.misses == 2


SLACK = 3  # times the goal


def cpu_s(work: Callable[[], object]) -> float:
    """What it took of processors, here and in processes that have ended, whoever else wanted them."""
    before = os.times()
    work()
    return sum(os.times()[:4]) - sum(before[:4])


@pytest.mark.parametrize("searched", [False, True])
def test_a_thousand_islands_are_planned_in_seconds(searched: bool) -> None:
    assert cpu_s(lambda: plan.seconds(plan.islands(1000), searched)) < SLACK * 2.0


@pytest.mark.long
def test_ten_thousand_machines_are_planned_in_seconds() -> None:
    assert cpu_s(lambda: plan.seconds(plan.machines(10_000), searched=True)) < SLACK * 2.0


@pytest.mark.long
def test_ten_thousand_hosts_listed_one_by_one_are_read_and_planned_in_seconds(tmp_path: Path) -> None:
    hosts = plan.write_hosts(tmp_path / "hosts.yaml", 10_000)
    assert cpu_s(lambda: plan.of_command(hosts)) < SLACK * 2.0


def test_the_templates_are_planned_in_no_time() -> None:
    assert min(cpu_s(plan.of_templates) for _ in range(3)) < SLACK * 0.5


COMMITS = 1_500


@pytest.mark.long
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


LEARNERS, MERGES = 6, 40


def merged_of(told: bool) -> tuple[RunState, dict[tuple[int, str], tuple[int, int, int]]]:
    """The last state; of each merged slot and learner the offer's number, how old its base was, and its tokens."""
    fleet, found = pace.fleet_of(LEARNERS, 1.0, told), dict[tuple[int, str], tuple[int, int, int]]()
    fleet.start()
    assert fleet.world.run(lambda: fleet.state.merges >= MERGES, 10 * MERGES)
    for n in range(fleet.state.n + 1):
        commit = decode(Commit, fleet.world.store.get(commit_key(n)) or b"", "log")
        assert not commit.outcomes
        for one in commit.inputs if isinstance(commit, Merge) else ():
            found[commit.slot, one.learner] = (one.seq, n - one.base, one.tokens)
    return fleet.state, found


def test_told_learners_offer_what_the_products_do() -> None:
    """In each slot, from the same bases; a learner that hears a little earlier or later sends a step apart."""
    (_, theirs), (_, ours) = merged_of(told=False), merged_of(told=True)
    assert len(ours) == LEARNERS * MERGES and ours.keys() == theirs.keys()
    steady = sorted(ours)[pace.FRAGMENTS * LEARNERS :]
    assert [ours[key][:2] for key in steady] == [theirs[key][:2] for key in steady]
    assert all(abs(ours[key][2] - theirs[key][2]) <= pace.BATCH_TOKENS for key in steady)


@pytest.mark.parametrize("told", [False, True])
def test_too_short_a_slot_misses_the_pace(told: bool) -> None:
    """Each slot takes several calls of the syncer in turn."""
    assert pace.play(4, 0.1, 150, told).slots > pace.MAX_SLOTS


def test_told_learners_keep_pace() -> None:
    found = pace.play(8, 1.0, 200, told=True)
    assert found.slots <= pace.MAX_SLOTS and found.inputs == 1.0
    assert found.holds, found.kept
