"""The blocks that are kept on this machine's disk: never more than allowed, the newest stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from diloco_cli.corpus.cache import TEMPORARY, BlockCache


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
from diloco_cli.corpus.cache import BlockCache
cache, me = BlockCache(Path(sys.argv[1]), 1000), sys.argv[2]
for number in range(60):
    cache.put(f"{me}-{number}", bytes(90))
    assert cache.num_bytes() <= 1000, cache.num_bytes()
"""


def test_processes_that_share_it_keep_the_bound_together(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), me]) for me in ("a", "b")]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert 900 <= BlockCache(tmp_path, 1000).num_bytes() <= 1000
