"""Shards as one stream: read at any place, never what the index does not say; the index; the block cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.corpus import shards as shards_module
from diloco_cli.corpus.index import Index, Shard, block_sum, check_sizes
from diloco_cli.corpus.shards import HELD_BLOCKS, TEMPORARY, BlockCache, TokenShards
from diloco_cli.errors import DataCheckError
from diloco_cli.store.memory import MemoryStore

BLOCK = 16  # bytes, here


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "BLOCK_BYTES", BLOCK)
        yield


class ReadCounter(MemoryStore):
    """Counts what is read of each object."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        self.ranges.append((key, start, end))
        return super().get_range(key, start, end)


def stream_of(lengths: list[int], dtype: str = "uint16", offset: int = 0) -> tuple[ReadCounter, Index]:
    """The tokens 0, 1, 2 ... in shards of these lengths."""
    store, shards, begin = ReadCounter(), [], 0
    for number, length in enumerate(lengths):
        data = np.arange(begin, begin + length, dtype=dtype).tobytes()
        sums = tuple(block_sum(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK))
        store.put(f"{number}.bin", bytes(offset) + data)
        shards.append(Shard(f"{number}.bin", length, sums, offset))
        begin += length
    return store, Index(dtype, begin, tuple(shards))


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    offset=st.integers(0, 5),
    dtype=st.sampled_from(["uint16", "uint32"]),
    data=st.data(),
)
def test_any_stretch_of_the_stream_is_read_over_blocks_and_shards(lengths, offset, dtype, data):
    store, index = stream_of(lengths, dtype, offset)
    stop = data.draw(st.integers(1, index.num_tokens))
    start = data.draw(st.integers(0, stop - 1))
    assert list(TokenShards(store, index).read(start, stop)) == list(range(start, stop))


def test_a_block_is_read_once_and_only_so_many_are_held():
    store, index = stream_of([8 * (HELD_BLOCKS + 10)])
    shards = TokenShards(store, index)
    for _ in range(2):
        for begin in range(0, 8 * HELD_BLOCKS, 4):
            shards.read(begin, begin + 4)
    assert len(store.ranges) == HELD_BLOCKS
    shards.read(0, shards.num_tokens)
    assert len(shards._held) == HELD_BLOCKS


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), data=st.data())
def test_what_was_loaded_is_all_that_a_reading_needs(lengths, data):
    store, index = stream_of(lengths)
    length = data.draw(st.integers(1, min(8, index.num_tokens)))
    starts = data.draw(st.lists(st.integers(0, index.num_tokens - length), min_size=1, max_size=4))
    shards = TokenShards(store, index)
    shards.load(shards.blocks_at(np.array(starts), length))
    before = len(store.ranges)
    assert before == len(set(store.ranges)), "each once"
    for start in starts:
        assert list(shards.read(start, start + length)) == list(range(start, start + length))
    if min((n - 1) % 8 + 1 for n in lengths) >= length:  # else it may reach over a short block: read when it is needed
        assert len(store.ranges) == before


def test_blocks_are_fetched_ahead_into_the_cache_once(tmp_path: Path) -> None:
    store, index = stream_of([64])
    shards = TokenShards(store, index, BlockCache(tmp_path, 1000))
    for _ in range(2):
        shards.keep_ahead([(0, 1), (0, 2)])
    assert store.ranges == [("0.bin", 16, 32), ("0.bin", 32, 48)]
    shards.read(8, 24)
    assert len(store.ranges) == 2


def test_a_damaged_file_of_the_cache_is_read_anew(tmp_path: Path) -> None:
    store, index = stream_of([8])
    cache = BlockCache(tmp_path, 1000)
    TokenShards(store, index, cache).read(0, 8)
    (tmp_path / index.shards[0].blocks[0]).write_bytes(b"damaged")
    assert list(TokenShards(store, index, cache).read(0, 8)) == list(range(8))


def test_a_changed_block_is_never_given_out():
    store, index = stream_of([64])
    store.put("0.bin", np.arange(1, 65, dtype="uint16").tobytes())
    shards = TokenShards(store, index)
    check_sizes(store, index)
    with pytest.raises(DataCheckError, match=r"shard 0\.bin block 0 .* changed since the index"):
        shards.read(0, 4)


def test_the_bound_holds_and_what_was_used_last_stays(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 300)
    for number in range(3):
        cache.put(f"b{number}", bytes([number]) * 100)
        os.utime(tmp_path / f"b{number}", (number, number))
    assert cache.get("b0") == bytes(100), "and now it is the newest"
    cache.put("b3", b"3" * 100)
    assert cache.num_bytes() == 300
    assert cache.get("b1") is None and cache.get("b0") and cache.get("b3") == b"3" * 100


def test_what_is_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "new", 10)
    cache.put("b", bytes(11))
    assert cache.get("b") is None and cache.num_bytes() == 0


def test_the_leftover_of_a_killed_process_goes(tmp_path: Path) -> None:
    (tmp_path / TEMPORARY).write_bytes(bytes(50))
    cache = BlockCache(tmp_path, 100)
    cache.put("b", bytes(10))
    assert cache.num_bytes() == 10


def test_a_place_that_cannot_be_written_is_no_cache_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = BlockCache(tmp_path / "file" / "below", 100)
    cache.put("b", b"1")
    assert cache.get("b") is None


WRITER = """
import sys
from pathlib import Path
from diloco_cli.corpus.shards import BlockCache
cache, me = BlockCache(Path(sys.argv[1]), 1000), sys.argv[2]
for number in range(60):
    cache.put(f"{me}-{number}", bytes(90))
    assert cache.num_bytes() <= 1000, cache.num_bytes()
"""


def test_processes_that_share_it_keep_the_bound_together(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), me]) for me in ("a", "b")]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert 900 <= BlockCache(tmp_path, 1000).num_bytes() <= 1000
