"""A sample of the benchmarks of merging and codecs: they compute what they time, on small vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.benchmarks import all_cores, codecs, durable, merge

pytestmark = pytest.mark.usefixtures("one_thread")  # as in the benchmarks
SIZE = 1 << 17


def test_all_ways_to_merge_that_are_timed_give_the_same(tmp_path: Path) -> None:
    of = merge.bench("int8", SIZE, learners=3)
    of.merge("avg", check=True)
    ours = [vector.clone() for vector in of.after]
    files = [tmp_path / f"{i}" for i in range(3)]
    for file, payload in zip(files, of.payloads, strict=True):
        file.write_bytes(payload)
    merge.stack_and_mean(of, files)
    for found, expected in zip(of.after, ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    fused = merge.fused_kernel(of, tmp_path)
    if fused is None:
        pytest.skip("no gcc here: the merge benchmark leaves the fused kernel out too")
    of.after[0].zero_()
    fused()
    torch.testing.assert_close(of.after[0], ours[0], rtol=1e-5, atol=1e-6)


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


def test_merging_on_all_cores_is_timed_beside_add_() -> None:
    lines = all_cores.scaling({"int8": merge.bench("int8", SIZE)}, threads=2, rounds=1)
    assert len(lines) == 4 and lines[2].endswith(("yes", "NO"))
