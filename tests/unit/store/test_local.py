"""A directory as a store: crashes, links, permissions, a full disk; pages of listings; what killed writers left."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco_cli.clock import wall_s
from diloco_cli.errors import NoSpaceError
from diloco_cli.store.local import OLD_S, LocalStore
from diloco_cli.store.open import discard_leftovers_at, open_store
from diloco_cli.store.port import (
    BadKeyError,
    Created,
    Discarded,
    Exists,
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
)

RACERS = Path(__file__).parents[2] / "contract/racers.py"
SIZE_BYTES = 4 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no right to mount a small disk: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_writer_killed_at_any_moment_leaves_no_short_file_under_a_final_name(root: Path) -> None:
    chance = random.Random(7)
    torn_temporaries = 0
    for number in range(60):
        if number >= 12 and torn_temporaries:
            break
        writer = subprocess.Popen(
            [sys.executable, str(RACERS), str(root), str(SIZE_BYTES)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.15))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        store = LocalStore(root)
        for key in store.list(""):
            data = store.get(key)
            assert data is not None
            assert data == data[:1] * SIZE_BYTES, f"{key} has {len(data)} bytes"
        left = [*root.rglob(".tmp~*")]
        torn_temporaries += sum(path.stat().st_size < SIZE_BYTES for path in left)
        for path in (path for path in root.rglob("*") if path.is_file()):
            path.unlink()
    assert torn_temporaries > 0, "no kill came in the middle of a write: this test has shown nothing"


def test_no_temporary_file_is_left_by_a_living_writer(root: Path) -> None:
    store = LocalStore(root)
    store.create("a/k", b"x")
    store.create("a/k", b"y")
    store.put("a/h", b"z")
    assert sorted(os.listdir(root / "a")) == ["h", "k"]


def test_a_link_out_of_the_store_is_not_followed(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "directory").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "new")
    store = LocalStore(root)
    assert store.list("") == []
    for key in ("directory/secret", "file", "directory/new", "dangling"):
        assert store.get(key) is None and store.get_range(key, 0, 9) is None and store.stat(key) is None
        with pytest.raises(BadKeyError):
            store.create(key, b"x")
    with pytest.raises(BadKeyError):
        store.put("directory/secret", b"x")
    store.delete("directory/secret")
    store.put("file", b"replaces the link")
    store.delete("dangling")
    assert (outside / "secret").read_bytes() == b"secret"
    assert os.listdir(outside) == ["secret"]


def planted(root: Path, shape: str) -> None:
    """Something that is no object under the key "d/k"."""
    if shape == "file above":
        (root / "d").write_bytes(b"")
        return
    if shape == "link above":
        (root / "elsewhere").mkdir()
        (root / "d").symlink_to(root / "elsewhere")
        return
    (root / "d").mkdir()
    path = root / "d" / "k"
    plant: dict[str, Callable[[], None]] = {
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(root / "d"),
        "socket": lambda: os.mknod(path, stat.S_IFSOCK | 0o600),
    }
    plant[shape]()


@pytest.mark.parametrize("shape", ["directory", "pipe", "link", "socket", "file above", "link above"])
def test_what_is_no_regular_file_is_no_object_to_read_and_in_the_way_of_a_new_one(root: Path, shape: str) -> None:
    planted(root, shape)
    store = LocalStore(root)
    num_open = len(os.listdir("/proc/self/fd"))
    assert store.get("d/k") is None and store.get("d/k", 9) is None
    assert store.get_range("d/k", 0, 9) is None and store.stat("d/k") is None
    with pytest.raises(BadKeyError):
        store.create("d/k", b"x")
    assert len(os.listdir("/proc/self/fd")) == num_open
    store.delete("d/k")


def test_a_key_below_another_key_is_refused(root: Path) -> None:
    store = LocalStore(root)
    store.create("a", b"x")
    with pytest.raises(BadKeyError):
        store.create("a/b", b"x")
    store.create("d/e", b"x")
    with pytest.raises(BadKeyError):
        store.create("d", b"x")


def test_a_store_that_vanished_is_not_an_empty_store(root: Path) -> None:
    store = LocalStore(root)
    root.rmdir()
    for call in (lambda: store.get("k"), lambda: store.list(""), lambda: store.create("k", b"x")):
        with pytest.raises(StoreBrokenError):
            call()


def test_a_full_disk_is_said_and_harms_nothing(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    store.create("a/small", b"x" * 1000)
    with pytest.raises(NoSpaceError) as full:
        store.create("a/large", b"x" * (2 << 20))
    assert full.value.exit_status == 13
    with pytest.raises(NoSpaceError):
        store.put("a/small", b"y" * (2 << 20))
    assert store.list("") == ["a/small"]
    assert store.get("a/small") == b"x" * 1000
    assert store.create("a/other", b"fits") == Created()


def test_a_read_only_disk_can_be_read_and_forbids_the_rest(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    store.create("a/k", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert store.get("a/k") == b"x"
    assert store.create("a/k", b"y") == Exists(b"x")
    with pytest.raises(StoreForbiddenError):
        store.create("a/l", b"x")
    with pytest.raises(StoreForbiddenError):
        store.put("a/k", b"x")


@pytest.mark.parametrize(
    ("umask", "above", "folder", "file"),
    [(0o077, 0o755, 0o700, 0o600), (0o022, 0o777, 0o755, 0o644), (0o002, 0o755, 0o775, 0o664),
     (0o077, 0o2770, 0o2770, 0o660), (0o022, 0o2775, 0o2775, 0o664), (0o077, 0o2750, 0o2750, 0o640)],
)  # fmt: skip
def test_what_is_made_follows_the_umask_and_below_a_setgid_directory_its_group(
    tmp_path: Path, umask: int, above: int, folder: int, file: int
) -> None:
    tmp_path.chmod(above)
    before = os.umask(umask)
    try:
        store = open_store((tmp_path / "bucket/run").as_uri(), create=True)
        store.create("a/k", b"x")
        store.put("a/h", b"x")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / "bucket" / part).stat().st_mode) for part in ("", "run", "run/a", "run/a/k")]
    assert modes == [folder] * 3 + [file]
    assert stat.S_IMODE((tmp_path / "bucket/run/a/h").stat().st_mode) == file


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_forbids(root: Path) -> None:
    store = LocalStore(root)
    store.create("a/k", b"x")
    (root / "a").chmod(0o500)
    with pytest.raises(StoreForbiddenError):
        store.create("a/l", b"x")
    (root / "a").chmod(0o700)


def test_directories_sort_as_their_keys_do(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    keys = sorted(["a", "a-b", "a0", "b/1", "b/2", "b/3", "b/4", "b/5", "b-c", "c", "d/e/f", "d/e/g", "e", "f"])
    for key in keys:
        store.create(f"x/{key}", b"")
    assert store.list("x/") == sorted(f"x/{key}" for key in keys)
    assert store.list("x/b", "x/b/2") == ["x/b/3", "x/b/4", "x/b/5"]


LEFT = ".tmp~0123"


def discard_leftovers(root: Path) -> Discarded:
    return discard_leftovers_at(root.as_uri())


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
    paths = [left_behind(tmp_path / folder, 2 * OLD_S) for folder in (".", "a", "a/b")]
    assert discard_leftovers(tmp_path) == Discarded(3, 12)
    assert not any(path.exists() for path in paths)
    assert store.get("a/b/k") == b"x" and store.list("") == ["a/b/k"]
    assert discard_leftovers(tmp_path) == Discarded()


def test_a_file_that_a_writer_may_still_need_stays(tmp_path: Path) -> None:
    path = left_behind(tmp_path, OLD_S / 2)
    assert discard_leftovers(tmp_path) == Discarded()
    assert path.exists()


def test_a_living_writer_whose_file_was_discarded_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another clock is ahead, or an fsync takes long."""
    link = os.link

    def slow(source: str, *names: str, **options: int) -> None:
        os.utime(tmp_path / source, (0, 0))
        assert discard_leftovers(tmp_path) == Discarded(1, 1)
        link(source, *names, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", slow)
    with pytest.raises(StoreUnavailableError):
        LocalStore(tmp_path).create("k", b"x")
    assert LocalStore(tmp_path).list("") == []


def test_an_object_that_still_has_its_temporary_name_keeps_its_own(tmp_path: Path) -> None:
    path = left_behind(tmp_path, 2 * OLD_S)
    os.link(path, tmp_path / "k")
    assert discard_leftovers(tmp_path) == Discarded(1, 0)
    assert LocalStore(tmp_path).get("k") == b"torn" and (tmp_path / "k").stat().st_nlink == 1


def test_links_pipes_and_what_others_left_stay(tmp_path: Path) -> None:
    outside = left_behind(tmp_path / "outside", 2 * OLD_S)
    root = tmp_path / "store"
    left_behind(root, 2 * OLD_S, "not-ours~0123")
    (root / "directory").symlink_to(outside.parent)
    (root / f"{LEFT}a").symlink_to(outside)
    os.mkfifo(root / f"{LEFT}b")
    assert discard_leftovers(root) == Discarded()
    assert outside.exists() and (root / "not-ours~0123").exists()
