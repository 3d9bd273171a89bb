"""Payloads that wait to be merged lie on this machine's disk, not in its memory: so what a syncer needs does not grow
with the number of learners."""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

SMALLEST_BYTES = 1 << 18  # what is smaller stays in memory


class Spool:
    """Keeps bytes in files without a name, mapped for reading. They are gone with the last view on them, and with the
    process however it ends. Nobody else can open them: what was checked is what is read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, data: bytes) -> bytes | memoryview:
        """The same bytes, on disk if they are many. Where the disk takes no more they stay in memory: a merge that
        needs more of it is better than none."""
        if len(data) < SMALLEST_BYTES:
            return data
        with suppress(OSError):
            return self._written(data)
        return data

    def _written(self, data: bytes) -> memoryview:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(dir=self._directory)
        try:
            os.unlink(path)
            with os.fdopen(os.dup(descriptor), "wb", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
            return memoryview(mmap.mmap(descriptor, len(data), access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)
