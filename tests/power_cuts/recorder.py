"""Stands where LocalStore expects the module `os`: does what is asked, and notes what of it changes the disk.

`without`: the name of a function of LocalStore whose fsyncs are left out, as by a store that forgot them. `dies_at`:
the process is killed before this op; nothing it does afterwards happens, until `revive`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco_cli.store import local
from tests.power_cuts.disk import ROOT, Op, OpKind


class KilledError(BaseException):
    """The process is gone: no `except Exception` sees it."""


class RecordingOs:
    """Everything below `base`, which is on the disk already. Real fsyncs are spared: those of the model count."""

    def __init__(self, base: Path, *, without: str = "", dies_at: int | None = None) -> None:
        self.base, self.without, self.dies_at = base.resolve(), without, dies_at
        self.ops: list[Op] = []
        self.names: dict[int, dict[str, int]] = {ROOT: {}}
        self.open_nodes: dict[int, int] = {}
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @property
    def directories(self) -> list[int]:
        return [node for node in self.names if node != ROOT]

    def revive(self, dies_at: int | None = None) -> None:
        """Another process goes on, until it is killed as well."""
        self.dead, self.dies_at = False, dies_at

    def _note(self, kind: OpKind, node: int, name: str = "", target: int | None = None, data: bytes = b"") -> None:
        asker = sys._getframe(2).f_code.co_name
        self.ops.append(Op(kind, node, name, target, bytes(data), asker))

    def _live(self) -> None:
        """Called before anything happens."""
        if self.dies_at is not None and len(self.ops) >= self.dies_at:
            self.dead = True
        if self.dead:
            raise KilledError

    def _fresh(self, *, directory: bool = False) -> int:
        self._last = getattr(self, "_last", ROOT) + 1
        if directory:
            self.names[self._last] = {}
        return self._last

    def _find(self, path: str | Path, dir_fd: int | None) -> tuple[int, str] | None:
        """(directory, name) of a path; None if it does not lie below the base. The base itself: (ROOT, '')."""
        if dir_fd is not None:
            return (self.open_nodes[dir_fd], str(path)) if dir_fd in self.open_nodes else None
        absolute = Path(path)
        if absolute != self.base and self.base not in absolute.parents:
            return None
        *parents, name = absolute.relative_to(self.base).parts or ("",)
        node = ROOT
        for part in parents:
            node = self.names[node][part]
        return node, name

    def open(self, path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            self._live()
        descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
        place = self._find(path, dir_fd)
        if place is None:
            return descriptor
        directory, name = place
        if flags & os.O_CREAT and name not in self.names[directory]:
            node = self.names[directory][name] = self._fresh()
            self._note("entry", directory, name, node)
        self.open_nodes[descriptor] = self.names[directory][name] if name else directory
        return descriptor

    def close(self, descriptor: int) -> None:
        self.open_nodes.pop(descriptor, None)
        os.close(descriptor)

    def fdopen(self, descriptor: int, mode: str, buffering: int = -1) -> Any:
        return _File(self, descriptor, mode)

    def fsync(self, descriptor: int) -> None:
        self._live()
        if descriptor in self.open_nodes and sys._getframe(1).f_code.co_name != self.without:
            self._note("sync", self.open_nodes[descriptor])

    def mkdir(self, path: str | Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._live()
        os.mkdir(path, mode, dir_fd=dir_fd)
        place = self._find(path, dir_fd)
        if place is not None:
            node = self.names[place[0]][place[1]] = self._fresh(directory=True)
            self._note("entry", *place, node)

    def link(self, source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool) -> None:
        self._live()
        os.link(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        directory = self.open_nodes[dst_dir_fd]
        node = self.names[directory][name] = self.names[self.open_nodes[src_dir_fd]][source]
        self._note("entry", directory, name, node)

    def rename(self, source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._live()
        os.rename(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        directory = self.open_nodes[dst_dir_fd]
        node = self.names[directory][name] = self.names[directory].pop(source)
        self._note("entry", directory, name, node)
        self._note("entry", directory, source, None)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self._live()
        os.unlink(name, dir_fd=dir_fd)
        directory = self.open_nodes[dir_fd]
        del self.names[directory][name]
        self._note("entry", directory, name, None)

    def wrote(self, descriptor: int, data: bytes) -> None:
        self._note("write", self.open_nodes[descriptor], data=data)


class _File:
    """An unbuffered file whose writes are noted."""

    def __init__(self, recorder: RecordingOs, descriptor: int, mode: str) -> None:
        self._recorder, self._descriptor = recorder, descriptor
        self._file: Any = os.fdopen(descriptor, mode, buffering=0)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.open_nodes.pop(self._descriptor, None)
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        self._recorder._live()
        written: int = self._file.write(data)
        self._recorder.wrote(self._descriptor, bytes(data[:written]))
        return written


@contextmanager
def recorded(recorder: RecordingOs) -> Iterator[RecordingOs]:
    """LocalStore uses the recorder in this block."""
    before = local.os
    local.os = recorder  # type: ignore[assignment]
    try:
        yield recorder
    finally:
        local.os = before


class HastyOs:
    """The module `os` without its fsync: for going on in a directory that no power cut will meet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        """Nothing: the study has seen the fsyncs already."""


@contextmanager
def hasty() -> Iterator[None]:
    before = local.os
    local.os = HastyOs()  # type: ignore[assignment]
    try:
        yield
    finally:
        local.os = before
