"""What killed writers left behind in a directory store: temporary files, which take space and do nothing else.

A writer holds a lock (flock) on its temporary file, which the kernel gives back with the process, however that ends. So
a file whose lock can be had has no writer, on this machine or, over NFS, on another: there no pid would tell. Where a
file system has no locks, age decides, by that file system's own clock. A mistake would be harmless: a writer whose file
is gone cannot give it its name, fails as if the store had not answered, and tries again.
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
from diloco_cli.store.local import TEMPORARY_PREFIX
from diloco_cli.store.open import parse_url

YOUNG_S = 60.0  # a writer that has opened its file may not have locked it yet
EVERY_S = 3600.0
OLD_S = 86_400.0  # without a change, where nobody can lock
_OPEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # over NFS only writers may lock


@dataclass(frozen=True)
class Discarded:
    num_files: int = 0
    num_bytes: int = 0


def discard_leftovers_at(url: str) -> Discarded:
    """In a directory; buckets know no such thing."""
    place = parse_url(url)
    return discard_leftovers(place.place) if place.scheme == "file" else Discarded()


@contextmanager
def discarding_leftovers(urls: Sequence[str]) -> Iterator[None]:
    """A thread discards what is left at these places, again and again until the end."""
    leaving = threading.Event()
    thread = threading.Thread(target=discard_until, args=(leaving.wait, urls), name="leftovers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leaving.set()


def discard_until(leaves_within: Callable[[float], bool], urls: Sequence[str]) -> None:
    """The first walk waits until what a writer before this one left is no longer young."""
    pause_s = 2 * YOUNG_S
    while not leaves_within(pause_s):
        for url in urls:
            with suppress(DilocoError):  # whoever works at that place tells of it
                discard_leftovers_at(url)
        pause_s = EVERY_S


def discard_leftovers(root: Path | str) -> Discarded:
    """Unlinks them below `root`, in one walk over its directories. What cannot be read or removed stays."""
    sizes: list[int] = []
    with suppress(OSError):  # of the root itself
        for _, _, files, directory in os.fwalk(Path(root).resolve()):
            names = [name for name in files if name.startswith(TEMPORARY_PREFIX)]
            if names:
                with suppress(OSError):
                    sizes += _discarded(directory, names, _time_of(directory))
    return Discarded(len(sizes), sum(sizes))


def _time_of(directory: int) -> float:
    """Now, as the file system says: clocks of machines that share it may differ. Where it has no room for a file, as
    this machine says: a full disk needs its leftovers gone most, and it is the locks that decide."""
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
    """Sizes of the files that are gone."""
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
