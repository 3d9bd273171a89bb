"""Blocks of a bucket's shards in a local folder, never more bytes than it may hold; lost without harm.

Processes share the folder: a lock is held while one is stored, so that the bound holds for all of them together. A file
counts only under its final name; the reader checks every block against the index.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"
TEMPORARY = ".part"
Found = tuple[float, int, Path]  # when it was last used (the file's time), bytes, file


class BlockCache:
    """At most `max_bytes` in `folder`; the blocks that were used longest ago go first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def get(self, name: str) -> bytes | None:
        """The bytes stored under this name, or None."""
        path = self.folder / name
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:  # it was never there, or another process has just made room
            return None
        return data

    def holds(self, name: str) -> bool:
        return (self.folder / name).exists()

    def put(self, name: str, data: bytes) -> None:
        """Keep these bytes, if they fit, in the place of older ones. A full or read-only disk only means no cache."""
        if len(data) > self.max_bytes:
            return
        with suppress(OSError), self._alone():
            self._make_room(len(data))
            part = self.folder / TEMPORARY
            part.write_bytes(data)
            part.rename(self.folder / name)

    def num_bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size, _ in self._files())

    def _make_room(self, wanted: int) -> None:
        files = sorted(self._files())
        held = sum(size for _, size, _ in files)
        for _, size, path in files:
            if held + wanted <= self.max_bytes and path.name != TEMPORARY:
                continue  # a leftover of a killed process goes in any case
            path.unlink(missing_ok=True)
            held -= size

    def _files(self) -> Iterator[Found]:
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name != LOCK:
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        yield status.st_mtime, status.st_size, Path(entry.path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
