"""A directory as a store: atomic, exclusive and durable by link, rename and fsync.

A check before a write ("is it there? no: write it") lets several writers win, and a writer killed half way
leaves a short file under the final name. So the bytes go to a temporary file in the same directory first,
are fsynced, and get their name by one `link`, which succeeds for one writer only; then the directory is
fsynced, and last the temporary name is removed. Directories are walked by descriptor with O_NOFOLLOW, so a
symbolic link below the root is never followed, also one that is planted during the walk.
"""

from __future__ import annotations

import errno
import os
import stat as stat_bits
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

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

OLD_S = 600.0  # without a change: its writer was killed

TEMPORARY_PREFIX = ".tmp~"
"""`~` is no key character: no key can collide with a temporary file, and no listing shows one. The file of a
killed writer only takes space, until it is discarded (`discard_leftovers_of`)."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a planted FIFO must not block us
_OPEN_TEMPORARY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_ALLOWED = (
    "its owner opens it to a group: chgrp -R GROUP and chmod -R g+rwX the bucket's folder, and chmod g+s its folders, "
    "so that what is made there is the group's"
)
_IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}
_NO_OBJECT = {errno.ENOENT, *_IN_THE_WAY}


Names = list[str]  # inside the class, `list` is the verb


class LocalStore:
    """Files below an existing directory. Safe between threads and between processes of one machine."""

    def __init__(self, root: Path | str, prefix: str = "") -> None:
        """`prefix`: a folder below it."""
        self.root = Path(root).resolve() / prefix
        self.url = self.root.as_uri()
        self._durable_directories: set[str] = set()

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
        folder = check_prefix(prefix).rpartition("/")[0]
        return list(islice(self._keys_below(folder, prefix, after), max(0, limit)))

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
                above, descriptor = descriptor, os.open(part, _OPEN_DIRECTORY, dir_fd=descriptor)
                os.close(above)
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
        for name in self._names_in(start, prefix, after):
            if name.endswith("/"):
                yield from self._keys_below(start + name[:-1], prefix, after)
            else:
                yield start + name

    def _names_in(self, start: str, prefix: str, after: str) -> Names:
        """The names in a directory that a listing of (prefix, after) comes to, sorted; a directory's ends in a
        slash."""

        def is_on_the_way(path: str) -> bool:
            if not path.endswith("/"):
                return is_between(path, prefix, after)
            return (path.startswith(prefix) or prefix.startswith(path)) and (after < path or after.startswith(path))

        with self._declared_errors(start):
            try:
                with self._parent(f"{start}x") as (descriptor, _), os.scandir(descriptor) as entries:
                    return sorted(name for name in _listed(entries) if is_on_the_way(start + name))
            except (FileNotFoundError, NotADirectoryError):
                return []

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
        "no such directory",
        where=str(root),
        hint="mount the disk that holds it, or correct the path; `diloco launch` makes a new run's folder itself",
    )


def declared_error(error: OSError, where: str) -> DilocoError:
    """The error of this package for the system's error, with a hint."""
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    if error.errno in _NO_SPACE:
        return NoSpaceError(reason, where=where, hint="free some space, or move the store to another disk")
    if error.errno in _FORBIDDEN:
        return StoreForbiddenError(reason, where=where, hint=_ALLOWED)
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
            hint=_ALLOWED,
        )


def make_durable_root(root: Path) -> None:
    """Make the directory and its parents, and fsync each entry, so that the store outlives a power cut. Existing
    entries are fsynced too, because the process that made them may have died before it did so."""
    for path in [*reversed(root.parents), root][1:]:
        try:
            parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _make_durable_directory(parent, path.name)
            finally:
                os.close(parent)
        except OSError:
            if not path.is_dir():
                raise  # an existing directory may be one that we must not open


def _make_durable_directory(parent: int, name: str) -> None:
    """Make a directory and fsync its parent, also if the directory is there: its maker may have died before it did."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o777, dir_fd=parent)
        made = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
        try:
            _share(made, parent, 0o070)
        finally:
            os.close(made)
    os.fsync(parent)


def _share(made: int, parent: int, bits: int) -> None:
    """What is made follows the umask; below a setgid directory, which the members of a group share, the group may do
    with it what it may do with the directory."""
    shared = os.fstat(parent).st_mode
    if shared & stat_bits.S_ISGID:
        os.fchmod(made, stat_bits.S_IMODE(os.fstat(made).st_mode) | shared & bits)


@contextmanager
def _temporary(directory: int, data: bytes) -> Iterator[str]:
    """Name of a new, fsynced file with these bytes; it is gone afterwards, unless it was renamed."""
    name = f"{TEMPORARY_PREFIX}{nonce()}"
    descriptor = os.open(name, _OPEN_TEMPORARY, 0o666, dir_fd=directory)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        try:
            _share(descriptor, directory, 0o060)
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
    """Unlink the temporary files below the directory that have not changed for OLD_S, in one walk. A mistake does no
    harm: a writer whose file is gone cannot name it, fails as if the store had not answered, and tries again."""
    sizes: list[int] = []
    with suppress(OSError):  # of the root itself
        for _, _, files, directory in os.fwalk(Path(url.place).resolve()):
            for name in files:
                if name.startswith(TEMPORARY_PREFIX):
                    with suppress(OSError):  # what cannot be read or removed stays
                        sizes += _discarded(directory, name)
    return Discarded(len(sizes), sum(sizes))


def _discarded(directory: int, name: str) -> list[int]:
    """The file's size, if it is discarded."""
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat_bits.S_ISREG(found.st_mode) or clock.wall_s() - found.st_mtime < OLD_S:
        return []
    os.unlink(name, dir_fd=directory)
    os.fsync(directory)  # it may have an object's name, too, that is not on the disk yet: see _read
    return [found.st_size if found.st_nlink == 1 else 0]
