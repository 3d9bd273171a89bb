"""A directory as a store: atomic, exclusive and durable with nothing but link, rename and fsync.

A check before a write ("is it there? no: write it") lets several writers win, and a writer killed half way
leaves a short file under the final name. So the bytes go to a temporary file in the same directory first,
are fsynced, and take their name by one `link`, which the kernel grants to one writer only; then the
directory is fsynced, and last the temporary name goes. Directories are walked by descriptor with O_NOFOLLOW:
a symbolic link below the root is never followed, whatever it points to and whenever it was planted.
"""

from __future__ import annotations

import errno
import os
import stat as stat_bits
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco_cli.errors import DilocoError, NoSpaceError
from diloco_cli.randomness import nonce
from diloco_cli.store.keys import BadKeyError, check_key, check_prefix, is_between, is_key_part
from diloco_cli.store.port import (
    Created,
    Exists,
    ObjectStat,
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
)

_TEMPORARY_PREFIX = ".tmp~"
"""`~` is no key character: no key can collide with a temporary file, and no listing shows one. What a killed
writer leaves behind only takes space."""

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a planted FIFO must not block us
_OPEN_TEMPORARY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


class LocalStore:
    """Files below an existing directory. Safe between threads and between processes of one machine."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).resolve()
        self.url = self.root.as_uri()
        self._durable_directories: set[str] = set()

    def create(self, key: str, data: bytes) -> Created | Exists:
        check_key(key)
        with self._declared_errors(key), self._parent(key, make=True) as (directory, name):
            holder = _read(directory, name)  # spares a large write that could only lose
            if holder is None:
                with _temporary(directory, data) as temporary:
                    try:
                        os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
                    except FileExistsError:
                        holder = _read(directory, name)
                        if holder is None:
                            raise StoreUnavailableError("the object was deleted while it was created") from None
                    except OSError as error:
                        raise _without_links(error) from error
                    os.fsync(directory)  # while the object has two names, which tells readers to wait: see _read
            if holder is not None:
                os.fsync(directory)  # its writer may have died before he could, and our caller relies on it
        return Created() if holder is None or holder == data else Exists(holder)

    def get(self, key: str) -> bytes | None:
        check_key(key)
        with self._declared_errors(key):
            try:
                with self._parent(key) as (directory, name):
                    return _read(directory, name)
            except FileNotFoundError:
                return None

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        check_key(key)
        with self._declared_errors(key):
            try:
                with self._parent(key) as (directory, name):
                    return _read(directory, name, max(0, start), max(0, end))
            except FileNotFoundError:
                return None

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        check_prefix(prefix)
        found: list[str] = []
        if limit > 0:
            for key in self._keys_below(prefix.rpartition("/")[0], prefix, after):
                found.append(key)
                if len(found) == limit:
                    break
        return found

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
        with (
            self._declared_errors(key),
            suppress(FileNotFoundError),
            self._parent(key) as (directory, name),
        ):
            os.unlink(name, dir_fd=directory)
            os.fsync(directory)

    def stat(self, key: str) -> ObjectStat | None:
        check_key(key)
        with self._declared_errors(key):
            try:
                with self._parent(key) as (directory, name):
                    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                return None
        return ObjectStat(key, found.st_size, found.st_mtime) if stat_bits.S_ISREG(found.st_mode) else None

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
            raise missing_directory(self.root) from error

    def _keys_below(self, directory: str, prefix: str, after: str) -> Iterator[str]:
        """Keys in lexical order, one directory in memory at a time. A directory sorts as its name and a
        slash, which is how its keys compare with those of its siblings ('a-b' < 'a/b' < 'a0')."""
        start = f"{directory}/" if directory else ""
        with self._declared_errors(start):
            try:
                with self._parent(f"{start}x") as (descriptor, _), os.scandir(descriptor) as entries:
                    names = sorted(_listed(entries))
            except (FileNotFoundError, NotADirectoryError):
                return
        for name in names:
            path = start + name
            if not name.endswith("/"):
                if is_between(path, prefix, after):
                    yield path
            elif (path.startswith(prefix) or prefix.startswith(path)) and (after < path or after.startswith(path)):
                yield from self._keys_below(path[:-1], prefix, after)

    @contextmanager
    def _declared_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise declared_error(error, str(self.root / key)) from error


def missing_directory(root: Path) -> StoreBrokenError:
    return StoreBrokenError(
        "no such directory", where=str(root), hint=f"mkdir -p {root}, or mount the disk that holds it"
    )


def declared_error(error: OSError, where: str) -> DilocoError:
    """The error of the tree that tells what to do about the system's."""
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    if error.errno in _NO_SPACE:
        return NoSpaceError(reason, where=where, hint="free some space, or move the store to another disk")
    if error.errno in _FORBIDDEN:
        return StoreForbiddenError(reason, where=where, hint="the store's directory must belong to this user")
    if error.errno in _IN_THE_WAY:
        return BadKeyError(f"a link, a directory or another object is in the way: {reason}", where=where)
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


def make_durable_root(root: Path) -> None:
    """The directory and its parents, each entry durable: a store whose objects outlive a power cut must not itself be
    gone after one. What is there already may have been made by somebody who died before he could fsync it."""
    for path in [*reversed(root.parents), root][1:]:
        made = not path.exists()
        if made:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            _sync_directory(path.parent)
        except OSError:
            if made:
                raise  # a directory that others have made may be one that we must not open


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_durable_directory(parent: int, name: str) -> None:
    """The parent is fsynced even if the directory was there: its maker may have died before doing so."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    os.fsync(parent)


@contextmanager
def _temporary(directory: int, data: bytes) -> Iterator[str]:
    """Name of a new, fsynced file with these bytes; it is gone afterwards, unless it was renamed."""
    name = f"{_TEMPORARY_PREFIX}{nonce()}"
    descriptor = os.open(name, _OPEN_TEMPORARY, 0o600, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(descriptor)
        yield name
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def _read(directory: int, name: str, start: int = 0, end: int | None = None) -> bytes | None:
    """What is read must still be there after a power cut: others build on it. An object that still has its temporary
    name beside the final one may not be on the disk yet (its writer may even be dead), so the reader sees to it."""
    try:
        descriptor = os.open(name, _OPEN_TO_READ, dir_fd=directory)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat_bits.S_ISREG(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "not a regular file")
        if found.st_nlink > 1:
            os.fsync(directory)
        if end is None:
            return file.readall()
        wanted = max(0, min(end, found.st_size) - start)
        return b"".join(_chunks(descriptor, start, wanted))


def _chunks(descriptor: int, start: int, wanted: int) -> Iterator[bytes]:
    while wanted > 0 and (chunk := os.pread(descriptor, wanted, start)):
        yield chunk
        start, wanted = start + len(chunk), wanted - len(chunk)


def _listed(entries: Iterator[os.DirEntry[str]]) -> Iterator[str]:
    """Names of keys, and those of directories with a slash; no links, no temporary files, nothing foreign."""
    for entry in entries:
        if is_key_part(entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield f"{entry.name}/"
            elif entry.is_file(follow_symlinks=False):
                yield entry.name
