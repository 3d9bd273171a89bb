"""The bucket's disk fills up while a run goes on, and is freed again."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Playground
from tests.waiting import wait_until

SIZE_MB = 160


@pytest.fixture
def small_disk(playground: Playground) -> Iterator[Path]:
    """A small file system where the quickstart's bucket lies."""
    bucket = playground.directory / "quickstart" / "bucket"
    bucket.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m,mode=0700", "tmpfs", str(bucket)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield bucket
    subprocess.run(["umount", "-l", str(bucket)], check=True)


def fill(path: Path) -> None:
    """Write zeros until the disk is full. Unbuffered: closing a buffered file would write, and fail, once more."""
    with path.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(b"\0" * 65_536)
        except OSError as error:
            assert error.errno == errno.ENOSPC


def test_a_full_disk_loses_nothing_and_the_run_goes_on_when_it_is_freed(
    playground: Playground, small_disk: Path
) -> None:
    playground.islands("iowa", "ohio")
    playground.launch(10_000_000, "--set", "train.inner.save_every=1000", "--set", "sync.every=64")
    playground.wait_for(lambda s: s["commit"] >= 4)
    ballast = small_disk / "ballast"
    fill(ballast)
    wait_until(lambda: all("fails for" in playground.log(unit) for unit in ("iowa", "ohio")))
    full = playground.json("status", "quickstart")
    assert playground.run("verify", "quickstart").returncode == 0, "something torn lies in the bucket"
    units = playground.pids()
    ballast.unlink()
    playground.wait_for(lambda s: s["commit"] >= full["commit"] + 5, timeout_s=60)
    assert playground.pids() == units, "units waited for the disk; nobody had to be restarted"
    assert playground.run("stop", "quickstart").returncode == 0
    assert playground.json("verify", "quickstart")["ok"]
