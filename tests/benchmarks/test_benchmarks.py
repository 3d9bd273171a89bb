"""A sample of each benchmark: it still fits the product and computes what it times. The figures are measured by hand,
each with one command (README.md); samples that take long, or much of the machine, run with `pytest -m long`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diloco_cli.protocol.log.records import Mixing
from tests.benchmarks import (
    bookkeeping,
    durable,
    learner_memory,
    merge,
    pace,
    participation,
    plan,
    rank_blocking,
    simulate,
    syncer_memory,
)
from tests.benchmarks.participation import LEAST, LEAST_OF_SLOW, MAX_LATE, MIXINGS, linked, play
from tests.benchmarks.rank_blocking import percent

pytestmark = pytest.mark.usefixtures("one_thread")  # as in the benchmarks


def test_the_memory_benchmark_watches_a_syncer_merge() -> None:
    assert syncer_memory.measured(learners=1, megabytes=0.1) < syncer_memory.GOAL_MB


def test_the_simulation_benchmark_counts_what_it_times() -> None:
    rows = simulate.curve(days=0.05)
    assert [chips for chips, _, _ in rows] == list(simulate.CURVE_CHIPS)
    assert rows[-1][1] > 100 * rows[0][1] and all(seconds > 0 for _, _, seconds in rows)
    assert 80 < simulate.history(0, days=0.05) < 95


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


def test_every_learner_of_the_log_is_merged_and_its_next_offer_stays_pending() -> None:
    log = bookkeeping.made_log(6, merges=2)
    found = bookkeeping.times(log, 2)  # asserts that the inbox keeps every offer
    assert len(found.decode) == len(found.beyond_decoding) == 2
    assert found.read == found.written, "too short to be compressed"
    assert {name: known.merges for name, known in log.state.learners.items()} == dict.fromkeys(log.names, 4)
    assert len(log.names) == 6 and len(log.state.members) == 3


MOST_PERCENT = 10.0  # of a model so small that each fragment's message weighs more than its bytes


@pytest.mark.long
def test_ranks_send_and_adopt_in_little_time_and_wait_for_no_copy() -> None:
    found = rank_blocking.measured("small", ranks=2, fragments=4)
    assert found["waits"] == [0.0]
    for name in ("exchange", "slow exchange"):
        assert max(percent(found, name)) < MOST_PERCENT


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
def test_ten_thousand_hosts_listed_one_by_one_are_read_and_planned_in_seconds(tmp_path: Path) -> None:
    hosts = plan.write_hosts(tmp_path / "hosts.yaml", 10_000)
    assert cpu_s(lambda: plan.of_command(hosts)) < SLACK * 2.0


def test_the_templates_are_planned_in_no_time() -> None:
    assert min(cpu_s(plan.of_templates) for _ in range(3)) < SLACK * 0.5


def test_the_benchmark_of_the_pace_counts_the_merges_of_a_fleet() -> None:
    found = pace.play(learners=2, slot_s=1.0, merges=60)
    assert 0.95 < found.slots <= pace.MAX_SLOTS and found.inputs >= pace.LEAST_INPUTS
    assert all(first > 0 for first, _ in found.kept.values())
