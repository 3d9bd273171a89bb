"""Temporary files of killed writers go; those of living ones, and everything else, stay."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.clock import wall_s
from diloco_cli.store import leftovers
from diloco_cli.store.leftovers import EVERY_S, OLD_S, YOUNG_S, Discarded, discard_leftovers, discard_until
from diloco_cli.store.local import LocalStore
from diloco_cli.store.port import Created

LEFT = ".tmp~0123"
WRITER = """
import sys, time
from diloco_cli.store import local
with local._temporary(local.os.open(sys.argv[1], local.os.O_RDONLY), b"12345") as name:
    print(name, flush=True)
    time.sleep(60)
"""


def left_behind(directory: Path, age_s: float, name: str = LEFT) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_bytes(b"torn")
    changed_s = wall_s() - age_s
    os.utime(path, (changed_s, changed_s))
    return path


def test_what_a_dead_writer_left_goes_wherever_it_lies(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("a/b/k", b"x")
    paths = [left_behind(tmp_path / folder, 2 * YOUNG_S) for folder in (".", "a", "a/b")]
    assert discard_leftovers(tmp_path) == Discarded(3, 12)
    assert not any(path.exists() for path in paths)
    assert store.get("a/b/k") == b"x" and store.list("") == ["a/b/k"]
    assert discard_leftovers(tmp_path) == Discarded()


def test_a_file_that_has_just_been_made_stays(tmp_path: Path) -> None:
    """Its writer may be about to lock it."""
    path = left_behind(tmp_path, YOUNG_S / 2)
    assert discard_leftovers(tmp_path) == Discarded()
    assert path.exists()


def test_a_living_writers_file_stays_until_the_kernel_takes_its_lock_back(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        path = tmp_path / writer.stdout.readline().strip()
        os.utime(path, (0, 0))
        assert discard_leftovers(tmp_path) == Discarded()
        assert path.exists()
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert discard_leftovers(tmp_path) == Discarded(1, 5)
    assert not path.exists()


@pytest.mark.parametrize(("age_s", "goes"), [(OLD_S / 2, False), (2 * OLD_S, True)])
def test_where_nobody_can_lock_age_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, goes: bool
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = left_behind(tmp_path, age_s)
    assert discard_leftovers(tmp_path).num_files == goes
    assert path.exists() != goes
    assert LocalStore(tmp_path).create("k", b"x") == Created()


def test_age_is_told_by_the_file_systems_own_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_time_of", lambda directory: wall_s() - OLD_S)  # this machine's is a day ahead
    left_behind(tmp_path, OLD_S / 2)
    assert discard_leftovers(tmp_path) == Discarded()


def test_an_object_that_still_has_its_temporary_name_keeps_its_own(tmp_path: Path) -> None:
    path = left_behind(tmp_path, 2 * YOUNG_S)
    os.link(path, tmp_path / "k")
    assert discard_leftovers(tmp_path) == Discarded(1, 0)
    assert LocalStore(tmp_path).get("k") == b"torn" and (tmp_path / "k").stat().st_nlink == 1


def test_links_pipes_and_what_others_left_stay(tmp_path: Path) -> None:
    outside = left_behind(tmp_path / "outside", 2 * YOUNG_S)
    root = tmp_path / "store"
    left_behind(root, 2 * YOUNG_S, "not-ours~0123")
    (root / "directory").symlink_to(outside.parent)
    (root / f"{LEFT}a").symlink_to(outside)
    os.mkfifo(root / f"{LEFT}b")
    assert discard_leftovers(root) == Discarded()
    assert outside.exists() and (root / "not-ours~0123").exists()


def test_a_root_that_is_gone_or_no_directory_has_nothing_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert discard_leftovers(tmp_path / "gone") == discard_leftovers(tmp_path / "file") == Discarded()


def test_the_root_may_itself_be_reached_by_a_link(tmp_path: Path) -> None:
    left_behind(tmp_path / "store", 2 * YOUNG_S)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    assert discard_leftovers(tmp_path / "link") == Discarded(1, 4)


def test_a_disk_without_room_for_a_file_still_gets_rid_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_behind(tmp_path, 2 * YOUNG_S)
    original = os.open

    def without_inodes(name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "no inodes")
        return original(name, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", without_inodes)
    assert discard_leftovers(tmp_path) == Discarded(1, 4)


def test_an_object_that_gets_its_name_at_the_last_moment_is_durable_before_it_loses_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer links it between our first look and our lock, and dies."""
    path = left_behind(tmp_path, 2 * YOUNG_S)
    calls: list[str] = []

    def lock(descriptor: int, operation: int) -> None:
        os.link(path, tmp_path / "k")
        calls.append("link")

    monkeypatch.setattr(fcntl, "flock", lock)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    assert discard_leftovers(tmp_path) == Discarded(1, 0)
    assert calls == ["link", "fsync"]


def test_the_first_walk_waits_for_what_is_young_and_others_follow_until_the_end(tmp_path: Path) -> None:
    pauses_s: list[float] = []
    places = [tmp_path / "home", tmp_path / "region"]

    def leaves_within(seconds: float) -> bool:
        pauses_s.append(seconds)
        assert not any((place / LEFT).exists() for place in places)
        for place in places:
            left_behind(place, 2 * YOUNG_S)
        return len(pauses_s) == 3

    discard_until(leaves_within, [place.as_uri() for place in places])
    assert pauses_s[0] > YOUNG_S and pauses_s[1:] == [EVERY_S, EVERY_S]
