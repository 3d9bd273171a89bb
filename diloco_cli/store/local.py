"""A directory as a store: atomic, exclusive and durable by link, rename and fsync.

A check before a write ("is it there? no: write it") lets several writers win, and a writer killed half way
leaves a short file under the final name. So the bytes go to a temporary file in the same directory first,
are fsynced, and get their name by one `link`, which succeeds for one writer only; then the directory is
fsynced, and last the temporary name is removed. Directories are walked by descriptor with O_NOFOLLOW, so a
symbolic link below the root is never followed, also one that is planted during the walk.

`Paging`: listings page by page, where each page alone would need a scan of all keys. A walk over the keys is kept for
the call that asks for the next page, so that a listing of n keys in pages costs hardly more than one without pages. A
key created during a walk may be missing between the pages of that walk (a listing may lag), but not after its end, and
not in a new walk.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import os
import stat as stat_bits
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from shlex import quote

from diloco_cli import clock
from diloco_cli.errors import DilocoError, NoSpaceError
from diloco_cli.randomness import nonce
from diloco_cli.store.port import (
    BadKeyError,
    Created,
    Discarded,
    Exists,
    ObjectStat,
    StoreBrokenError,
    StoreForbiddenError,
    StoreGoneError,
    StoreUnavailableError,
    check_key,
    check_prefix,
    holder_bytes,
    is_between,
    is_key_part,
)
from diloco_cli.store.url import StoreUrl

YOUNG_S = 60.0  # a writer that has opened its temporary file may not have locked it yet
OLD_S = 86_400.0  # without a change, on a file system without locks
MAX_WALKS = 4
KEPT_S = 60.0

Walk = Callable[[str, str], Iterator[str]]
"""(prefix, after) -> keys in order."""
TEMPORARY_PREFIX = ".tmp~"
"""`~` is no key character: no key can collide with a temporary file, and no listing shows one. The file of a
killed writer only takes space, until it is discarded (`discard_leftovers_of`)."""
_NAMES_AT_ONCE = 1 << 16
"""Names of one directory that a listing holds in memory from one scan of it to the next."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a planted FIFO must not block us
_OPEN_LEFTOVER = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # over NFS only writers may lock
_OPEN_TEMPORARY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}
_NO_OBJECT = {errno.ENOENT, *_IN_THE_WAY}


class Paging:
    """The pages of one store's listings. Safe between threads."""

    def __init__(self, walk: Walk, monotonic: Callable[[], float] = clock.monotonic_s) -> None:
        self._walk, self._monotonic = walk, monotonic
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], tuple[float, Iterator[str]]] = {}

    def page(self, prefix: str, after: str, limit: int) -> list[str]:
        """At most `limit` keys beyond `after`."""
        began_s, walk = self._taken(prefix, after)
        found = list(islice(walk, limit))
        if len(found) < limit and began_s is not None:  # an old walk may end before new keys
            began_s, walk = None, self._walk(prefix, found[-1] if found else after)
            found += islice(walk, limit - len(found))
        if found and len(found) == limit:
            self._keep((prefix, found[-1]), self._monotonic() if began_s is None else began_s, walk)
        return found

    def _taken(self, prefix: str, after: str) -> tuple[float | None, Iterator[str]]:
        """The kept walk that has come to `after`, and when it began; or a new one."""
        with self._lock:
            kept = self._kept.pop((prefix, after), None)
        if kept is None or self._monotonic() - kept[0] > KEPT_S:
            return None, self._walk(prefix, after)
        return kept

    def _keep(self, came_to: tuple[str, str], began_s: float, walk: Iterator[str]) -> None:
        with self._lock:
            self._kept[came_to] = (began_s, walk)
            while len(self._kept) > MAX_WALKS:
                del self._kept[next(iter(self._kept))]


Names = list[str]


class LocalStore:
    """Files below an existing directory. Safe between threads and between processes of one machine."""

    def __init__(self, root: Path | str, prefix: str = "") -> None:
        """`prefix`: a folder below it."""
        self.root = Path(root).resolve() / prefix
        self.url = self.root.as_uri()
        self._durable_directories: set[str] = set()
        self._paging = Paging(lambda prefix, after: self._keys_below(prefix.rpartition("/")[0], prefix, after))

    def create(self, key: str, data: bytes) -> Created | Exists:
        check_key(key)
        with self._declared_errors(key), self._parent(key, make=True) as (directory, name):
            holder_end = holder_bytes(data) + 1
            holder = _read(directory, name, 0, holder_end)  # if the key is taken, no bytes need be written
            if holder is None:
                with _temporary(directory, data) as temporary:
                    try:
                        os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
                    except FileExistsError:
                        holder = _read(directory, name, 0, holder_end)
                        if holder is None:
                            raise StoreUnavailableError("the object was deleted while it was created") from None
                    except OSError as error:
                        raise _without_links(error) from error
                    os.fsync(directory)  # while the object has two names, which tells readers to wait: see _read
            if holder is not None:
                os.fsync(directory)  # the object's writer may have died before its fsync, and our caller relies on it
        return Created(checked=True) if holder is None or holder == data else Exists(holder)

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        return self._found(key, 0, None if max_bytes is None else max_bytes + 1)

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self._found(key, max(0, start), max(0, end))

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        return self._paging.page(check_prefix(prefix), after, max(0, limit))

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        with (
            self._declared_errors(key),
            self._parent(key, make=True) as (directory, name),
            _temporary(directory, data) as temporary,
        ):
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._declared_errors(key), _nothing_if_no_object(), self._parent(key) as (directory, name):
            os.unlink(name, dir_fd=directory)
            os.fsync(directory)

    def stat(self, key: str) -> ObjectStat | None:
        check_key(key)
        with self._declared_errors(key), _nothing_if_no_object(), self._parent(key) as (directory, name):
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat_bits.S_ISREG(found.st_mode):
                return ObjectStat(key, found.st_size, found.st_mtime)
        return None

    def _found(self, key: str, start: int, end: int | None) -> bytes | None:
        """The bytes, or None. A directory or special file is no object: otherwise a process that may write could make
        every reader of a key fail, with an object below the key or in the place of its parent."""
        check_key(key)
        with self._declared_errors(key), _nothing_if_no_object(), self._parent(key) as (directory, name):
            return _read(directory, name, start, end)
        return None

    @contextmanager
    def _parent(self, key: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """Descriptor of the directory that holds the key, and the key's last part."""
        *parts, name = key.split("/")
        descriptor = self._open_root()
        try:
            walked = ""
            for part in parts:
                walked = f"{walked}/{part}"
                if make and walked not in self._durable_directories:
                    _make_durable_directory(descriptor, part)
                    self._durable_directories.add(walked)
                descriptor = _replace(descriptor, os.open(part, _OPEN_DIRECTORY, dir_fd=descriptor))
            yield descriptor, name
        finally:
            os.close(descriptor)

    def _open_root(self) -> int:
        try:
            return os.open(self.root, _OPEN_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._durable_directories.clear()  # if the root comes back, they may not
            raise missing_directory(self.root) from error

    def _keys_below(self, directory: str, prefix: str, after: str) -> Iterator[str]:
        """Keys in lexical order. A directory sorts as its name and a slash, which is how its keys compare with those
        of its siblings ('a-b' < 'a/b' < 'a0')."""
        start = f"{directory}/" if directory else ""
        last, there_are_more = "", True
        while there_are_more:
            names, there_are_more = self._names_in(start, last, prefix, after)
            for name in names:
                if name.endswith("/"):
                    yield from self._keys_below(start + name[:-1], prefix, after)
                else:
                    yield start + name
                last = name

    def _names_in(self, start: str, last: str, prefix: str, after: str) -> tuple[Names, bool]:
        """The next names beyond `last` that a listing of (prefix, after) comes to, sorted, and whether that is not
        all."""

        def is_on_the_way(path: str) -> bool:
            if not path.endswith("/"):
                return is_between(path, prefix, after)
            return (path.startswith(prefix) or prefix.startswith(path)) and (after < path or after.startswith(path))

        with self._declared_errors(start):
            try:
                with self._parent(f"{start}x") as (descriptor, _), os.scandir(descriptor) as entries:
                    wanted = (name for name in _listed(entries) if name > last and is_on_the_way(start + name))
                    names = heapq.nsmallest(_NAMES_AT_ONCE + 1, wanted)
            except (FileNotFoundError, NotADirectoryError):
                return [], False
        return names[:_NAMES_AT_ONCE], len(names) > _NAMES_AT_ONCE

    @contextmanager
    def _declared_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise declared_error(error, str(self.root / key)) from error


@contextmanager
def _nothing_if_no_object() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_OBJECT:
            raise


def missing_directory(root: Path) -> StoreGoneError:
    return StoreGoneError(
        "no such directory", where=str(root), hint=f"mkdir -p {quote(str(root))}, or mount the disk that holds it"
    )


def declared_error(error: OSError, where: str) -> DilocoError:
    """The error of this package for the system's error, with a hint."""
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    if error.errno in _NO_SPACE:
        return NoSpaceError(reason, where=where, hint="free some space, or move the store to another disk")
    if error.errno in _FORBIDDEN:
        return StoreForbiddenError(reason, where=where, hint="the store's directory must belong to this user")
    if error.errno in _IN_THE_WAY:
        hint = "diloco writes plain files alone: see what it is (ls -l) and remove it; the run then goes on by itself"
        return BadKeyError(f"a link, a directory or another object is in the way: {reason}", where=where, hint=hint)
    return StoreUnavailableError(reason, where=where)


def _without_links(error: OSError) -> Exception:
    if error.errno in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
        return StoreBrokenError(
            "this file system has no hard links, so no create can be exclusive",
            hint="use a directory on ext4, xfs, btrfs, zfs, apfs or tmpfs",
        )
    return error


def _replace(old: int, new: int) -> int:
    os.close(old)
    return new


def check_directory(root: Path, create: bool) -> None:
    """Raises StoreError unless there is such a directory that may be read; with `create` it is made, and must be
    writable."""
    try:
        if create:
            make_durable_root(root)
        if not root.is_dir():
            raise missing_directory(root)
    except OSError as error:
        raise declared_error(error, str(root)) from error
    if not os.access(root, os.R_OK | os.X_OK | (os.W_OK if create else 0)):
        wanted = "writable" if create else "readable"
        raise StoreForbiddenError(
            f"the directory is not {wanted}",
            where=str(root),
            hint="chown or chmod it, or name another directory",
        )


def make_durable_root(root: Path) -> None:
    """Make the directory and its parents, and fsync each entry, so that the store outlives a power cut. Existing
    entries are fsynced too, because the process that made them may have died before it did so."""
    for path in [*reversed(root.parents), root][1:]:
        made = not path.exists()
        if made:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            sync_path(path.parent)
        except OSError:
            if made:
                raise  # an existing directory may be one that we must not open


def sync_path(path: Path) -> None:
    """fsync a file's bytes, or a directory's names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_durable_directory(parent: int, name: str) -> None:
    """Make a directory and fsync its parent, also if the directory is there: its maker may have died before it did."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    os.fsync(parent)


@contextmanager
def _temporary(directory: int, data: bytes) -> Iterator[str]:
    """Name of a new, fsynced file with these bytes; it is gone afterwards, unless it was renamed. As long as it is
    there, its writer holds a lock on it, where the file system has locks."""
    name = f"{TEMPORARY_PREFIX}{nonce()}"
    descriptor = os.open(name, _OPEN_TEMPORARY, 0o600, dir_fd=directory)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(descriptor)
            yield name
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)


def _read(directory: int, name: str, start: int = 0, end: int | None = None) -> bytes | None:
    """Read an object, after making sure that it is durable, because commits may depend on it. An object that still has
    its temporary name may not be on the disk yet (and its writer may be dead), so the reader fsyncs it."""
    try:
        descriptor = os.open(name, _OPEN_TO_READ, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat_bits.S_ISREG(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "not a regular file")
        if found.st_nlink > 1:
            os.fsync(directory)
    except OSError:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        if end is None:
            return file.read()
        file.seek(start)
        return file.read(max(0, min(end, found.st_size) - start))


def _listed(entries: Iterator[os.DirEntry[str]]) -> Iterator[str]:
    """Names of keys, and names of directories with a slash; no links, temporary files or names that no key has."""
    for entry in entries:
        if is_key_part(entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield f"{entry.name}/"
            elif entry.is_file(follow_symlinks=False):
                yield entry.name


def discard_leftovers_of(url: StoreUrl) -> Discarded:
    """Unlink the temporary files of killed writers below the directory, in one walk. Files that cannot be read or
    removed stay.

    A writer holds a lock (flock) on its temporary file, which the kernel releases when the process ends for any reason.
    So a file whose lock is free has no writer, on this machine or, over NFS, on another, where a pid could not be
    checked. If a file system has no locks, the file's age decides, by that file system's clock. A mistake does no harm:
    a writer whose file is gone cannot give it its final name, fails as if the store had not answered, and tries again.
    """
    sizes: list[int] = []
    with suppress(OSError):  # of the root itself
        for _, _, files, directory in os.fwalk(Path(url.place).resolve()):
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
        descriptor = os.open(name, _OPEN_LEFTOVER | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
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
            descriptor = os.open(name, _OPEN_LEFTOVER, dir_fd=directory)
            try:
                found = os.fstat(descriptor)
                if stat_bits.S_ISREG(found.st_mode) and _is_left(descriptor, now_s - found.st_mtime):
                    num_names = os.fstat(descriptor).st_nlink  # with the lock, so that no writer adds one any more
                    if num_names > 1:
                        os.fsync(directory)  # its object may not be on the disk yet: see _read
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
