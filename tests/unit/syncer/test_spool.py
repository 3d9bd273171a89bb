"""Payloads that wait for their merge lie on disk: the same bytes, and no memory of their own."""

from __future__ import annotations

import gc
import resource
import stat
from multiprocessing import get_context
from pathlib import Path

import pytest

from diloco_cli.syncer.arithmetic import SMALLEST_BYTES, Spool
from tests.benchmarks import durable

SIZE = 1 << 20  # parameters: 1.1 MB of int8 payload each, with scales and norms
FEW = 1 << 18


def anonymous_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def test_what_is_kept_reads_as_it_was_and_leaves_no_file(tmp_path: Path) -> None:
    data = bytes(range(256)) * (SMALLEST_BYTES // 256)
    kept = Spool(tmp_path / "spool").keep(data)
    assert isinstance(kept, memoryview) and kept == data
    assert list((tmp_path / "spool").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700
    with pytest.raises(TypeError):
        kept[0] = 1


def test_small_payloads_and_those_that_the_disk_refuses_stay_in_memory(tmp_path: Path) -> None:
    small, large = b"x" * (SMALLEST_BYTES - 1), b"x" * SMALLEST_BYTES
    (tmp_path / "file").write_text("")
    assert Spool(tmp_path / "spool").keep(small) is small
    assert Spool(tmp_path / "file" / "spool").keep(large) is large


def kept_on_disk(count: int, spool: Path) -> int:
    """How many of so many payloads lie on disk, where the usual limit of open files is 64."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    keeper, data = Spool(spool), bytes(SMALLEST_BYTES)
    kept = [keeper.keep(data) for _ in range(count)]
    return sum(isinstance(one, memoryview) for one in kept)


def test_more_payloads_than_a_process_may_usually_hold_files_lie_on_disk(tmp_path: Path) -> None:
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        assert pool.apply(kept_on_disk, (200, tmp_path)) == 200


def test_a_spooled_merge_gives_the_same_bytes(tmp_path: Path) -> None:
    arithmetic, payloads = durable.prepared(FEW, 2)
    spooled, same = durable.prepared(FEW, 2)
    spooled.spool = Spool(tmp_path)
    assert payloads == same
    assert durable.merged(arithmetic, payloads) == durable.merged(spooled, payloads)


def opened_mb(count: int, spool: Path | None) -> float:
    """What so many fetched and opened payloads of 1.1 MB add to this process."""
    arithmetic, payloads = durable.prepared(SIZE, 1)
    arithmetic.spool = None if spool is None else Spool(spool)

    def opened(num: int) -> list[object]:
        copies = (bytes(bytearray(payloads[0])) for _ in range(num))  # as a store would hand them out
        return [arithmetic.read_delta(durable.offer(copy), copy, None) for copy in copies]

    opened(2)
    gc.collect()
    before_mb = anonymous_mb()
    held = opened(count)
    gc.collect()
    assert len(held) == count
    return anonymous_mb() - before_mb


def test_memory_does_not_grow_with_the_number_of_learners(tmp_path: Path) -> None:
    """Of 24 payloads of 1.1 MB less than two stay with a spool, and all without. In a new process each: one that has
    freed much before grows by nothing."""
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        spooled_mb = pool.apply(opened_mb, (24, tmp_path))
        held_mb = pool.apply(opened_mb, (24, None))
    assert spooled_mb < 2.2 and held_mb > 20
