"""Discards what killed writers left, which only takes space: temporary files in a directory store, and parts of uploads
in a bucket at GCS. (Those at S3 are discarded by a rule of the bucket.)

In a directory, a writer holds a lock (flock) on its temporary file, which the kernel releases when the process ends for
any reason. So a file whose lock is free has no writer, on this machine or, over NFS, on another, where a pid could not
be checked. If a file system has no locks, the file's age decides, by that file system's clock. A mistake does no harm:
a writer whose file is gone cannot give it its final name, fails as if the store had not answered, and tries again. In a
bucket, age alone decides.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat as stat_bits
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from diloco_cli import clock
from diloco_cli.errors import DilocoError
from diloco_cli.randomness import nonce
from diloco_cli.store.gcs_upload import PART_NAME, PARTS
from diloco_cli.store.local import TEMPORARY_PREFIX
from diloco_cli.store.open import open_store, parse_url
from diloco_cli.store.port import Store

YOUNG_S = 60.0  # a writer that has opened its file may not have locked it yet
EVERY_S = 3600.0
OLD_S = 86_400.0  # without a change, on a file system without locks and in a bucket
_OPEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # over NFS only writers may lock


@dataclass(frozen=True)
class Discarded:
    num_files: int = 0
    num_bytes: int = 0


def discard_leftovers_at(url: str) -> Discarded:
    """Discard them at this URL, if its store has any."""
    place = parse_url(url)
    if place.scheme == "gs":
        return discard_parts(open_store(url))
    return discard_leftovers(place.place) if place.scheme == "file" else Discarded()


def discard_parts(store: Store) -> Discarded:
    """Delete the parts that no upload has used for a day (store/gcs_upload.py), as far as the store allows it."""
    sizes: list[int] = []
    with suppress(DilocoError):
        keys = store.list(f"{PARTS}/")
        while keys:
            for key in filter(PART_NAME.fullmatch, keys):
                with suppress(DilocoError):
                    sizes += _discarded_part(store, key)
            keys = store.list(f"{PARTS}/", after=keys[-1])
    return Discarded(len(sizes), sum(sizes))


def _discarded_part(store: Store, key: str) -> Iterator[int]:
    found = store.stat(key)
    if found is not None and clock.wall_s() - found.modified_s >= OLD_S:
        store.delete(key)
        yield found.size_bytes


@contextmanager
def discarding_leftovers(urls: Sequence[str]) -> Iterator[None]:
    """While the context lasts, a thread discards leftovers at these places from time to time."""
    leaving = threading.Event()
    thread = threading.Thread(target=discard_until, args=(leaving.wait, urls), name="leftovers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leaving.set()


def discard_until(leaves_within: Callable[[float], bool], urls: Sequence[str]) -> None:
    """Discard repeatedly. The first walk waits until the files of an earlier writer are older than YOUNG_S."""
    pause_s = 2 * YOUNG_S
    while not leaves_within(pause_s):
        for url in urls:
            with suppress(DilocoError):  # the process that works there reports the error
                discard_leftovers_at(url)
        pause_s = EVERY_S


def discard_leftovers(root: Path | str) -> Discarded:
    """Unlinks them below `root`, in one walk over its directories. Files that cannot be read or removed stay."""
    sizes: list[int] = []
    with suppress(OSError):  # of the root itself
        for _, _, files, directory in os.fwalk(Path(root).resolve()):
            names = [name for name in files if name.startswith(TEMPORARY_PREFIX)]
            if names:
                with suppress(OSError):
                    sizes += _discarded(directory, names, _time_of(directory))
    return Discarded(len(sizes), sum(sizes))


def _time_of(directory: int) -> float:
    """The present time by the file system's clock, because the clocks of machines that share it may differ. If the disk
    is full, and has no room for the file that this takes, by this machine's clock."""
    name = f"{TEMPORARY_PREFIX}{nonce()}"
    try:
        descriptor = os.open(name, _OPEN | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    except OSError:
        return clock.wall_s()
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=directory)


def _discarded(directory: int, names: list[str], now_s: float) -> Iterator[int]:
    """Sizes of the discarded files."""
    for name in names:
        with suppress(OSError):
            descriptor = os.open(name, _OPEN, dir_fd=directory)
            try:
                found = os.fstat(descriptor)
                if stat_bits.S_ISREG(found.st_mode) and _is_left(descriptor, now_s - found.st_mtime):
                    num_names = os.fstat(descriptor).st_nlink  # with the lock, so that no writer adds one any more
                    if num_names > 1:
                        os.fsync(directory)  # its object may not be on the disk yet: see local._read
                    os.unlink(name, dir_fd=directory)
                    yield found.st_size if num_names == 1 else 0
            finally:
                os.close(descriptor)


def _is_left(descriptor: int, age_s: float) -> bool:
    if age_s < YOUNG_S:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_held = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        return not is_held and age_s >= OLD_S
    return True
