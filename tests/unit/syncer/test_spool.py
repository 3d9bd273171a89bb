"""Payloads that wait for their merge lie on disk: the same bytes, and no memory of their own."""

from __future__ import annotations

import gc
import stat
from pathlib import Path

import pytest
import torch

from diloco_cli.syncer.arithmetic import TorchArithmetic
from diloco_cli.syncer.spool import SMALLEST_BYTES, Spool
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


def test_a_spooled_merge_gives_the_same_bytes(tmp_path: Path) -> None:
    arithmetic, payloads = durable.prepared(FEW, 2)
    spooled, same = durable.prepared(FEW, 2)
    spooled.spool = Spool(tmp_path)
    assert payloads == same
    assert durable.merged(arithmetic, payloads) == durable.merged(spooled, payloads)


def test_memory_does_not_grow_with_the_number_of_learners(tmp_path: Path) -> None:
    """Twenty more payloads of 1.1 MB, of which nothing stays: less than two of them."""
    arithmetic, payloads = durable.prepared(SIZE, 1)
    arithmetic.spool = Spool(tmp_path)

    def opened(count: int) -> float:
        sources = []
        for _ in range(count):
            fetched = bytes(bytearray(payloads[0]))  # a copy, as a store would hand out
            sources.append(arithmetic.read_delta(durable.offer(fetched), fetched, None))
        gc.collect()
        assert len(sources) == count and torch.is_tensor(arithmetic.parameters(0))
        return anonymous_mb()

    opened(2)
    assert opened(24) - opened(4) < 2.2


def test_without_a_spool_payloads_are_held() -> None:
    """What the test above would see."""
    arithmetic, payloads = durable.prepared(SIZE, 1)
    assert isinstance(arithmetic, TorchArithmetic) and arithmetic.spool is None
    before_mb = anonymous_mb()
    copies = [bytes(bytearray(payloads[0])) for _ in range(20)]
    held = [arithmetic.read_delta(durable.offer(copy), copy, None) for copy in copies]
    del copies
    assert len(held) == 20 and anonymous_mb() - before_mb > 18
