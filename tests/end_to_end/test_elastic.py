"""A machine that the launch did not know joins a running run by one command, and leaves in order on SIGTERM; then the
bucket's disk fills up while the run goes on, and is freed again."""

from __future__ import annotations

import errno
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Playground
from tests.end_to_end.test_survival import learner
from tests.waiting import wait_until

SIZE_MB = 160


@pytest.fixture
def small_disk(playground: Playground) -> Iterator[Path | None]:
    """A small file system where the quickstart's bucket lies; to mount one needs root."""
    bucket = playground.directory / "quickstart" / "bucket"
    bucket.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m,mode=0700", "tmpfs", str(bucket)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        yield None
        return
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


def test_an_island_joins_trains_and_leaves_and_a_full_disk_loses_nothing(
    playground: Playground, small_disk: Path | None
) -> None:
    playground.islands("iowa", "ohio")
    playground.launch(10_000_000, "--set", "data.shards=3", "--set", "train.inner.save_every=1000")
    url = playground.wait_for(lambda s: s["commit"] >= 4)["store"]["url"]
    words = ["learner", "--run", url, "--name"]
    spot = playground.start(*words, "spot", "--join", "--drain", "20s", "--batch-tokens", "512")
    playground.wait_for(lambda s: any(item["name"] == "spot" and item["tokens"] > 0 for item in s["learners"]))
    spot.send_signal(signal.SIGTERM)
    said, complaints = spot.communicate(timeout=40)
    assert spot.returncode == 143 and "asks to join" in said, complaints
    gone = learner(playground.json("status", "quickstart"), "spot")
    assert (gone["state"], gone["note"]) == ("LEFT", "told to leave by SIGTERM") and gone["tokens"] > 0
    full = playground.run(*words, "second", "--join")
    assert full.returncode == 2 and "the data has 3 shards" in full.stderr, full.stderr
    unknown = playground.run(*words, "third")
    assert unknown.returncode == 2 and "has no island 'third'" in unknown.stderr and "--join" in unknown.stderr
    if small_disk is not None:
        fills_and_is_freed(playground, small_disk / "ballast")
    assert playground.run("stop", "quickstart").returncode == 0
    assert playground.json("verify", "quickstart")["ok"]


def fills_and_is_freed(playground: Playground, ballast: Path) -> None:
    fill(ballast)
    wait_until(lambda: all("fails for" in playground.log(unit) for unit in ("iowa", "ohio")))
    full = playground.json("status", "quickstart")
    assert playground.run("verify", "quickstart").returncode == 0, "something torn lies in the bucket"
    units = playground.pids()
    ballast.unlink()
    playground.wait_for(lambda s: s["commit"] >= full["commit"] + 5, timeout_s=60)
    assert playground.pids() == units, "units waited for the disk; nobody had to be restarted"
