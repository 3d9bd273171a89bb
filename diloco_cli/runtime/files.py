"""Small files of a run on this machine: written atomically, readable by their owner alone, checked when read."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from diloco_cli.config.codec import parse_object
from diloco_cli.errors import NoSpaceError, UsageError

MAX_FILE_BYTES = 64 * 1024
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
NO_SPACE_ERRNOS = frozenset({28, 122})  # ENOSPC, EDQUOT
NO_PLACE_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR})


class UnreadableError(ValueError):
    """A torn, foreign or newer file; the text is the reason."""


def checked_name(name: str, what: str) -> str:
    """The name, if it may become a file name: it cannot point outside of the run's directory."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{what} must match [a-z0-9][a-z0-9-]{{0,62}}, got {name!r}")
    return name


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Atomic and durable: a reader sees the old file or the new one, also after a power cut."""
    try:
        make_directory(path.parent)
        write_whole(path, json.dumps(body, allow_nan=False).encode(), durable=True)
        _sync_directory(path.parent)
    except OSError as error:
        if error.errno in NO_SPACE_ERRNOS:
            raise NoSpaceError("no space left to note the state of a unit", where=str(path)) from error
        if error.errno in NO_PLACE_ERRNOS:
            raise unwritable(path.parent, error) from error
        raise


def unwritable(directory: Path, error: OSError) -> UsageError:
    """The error of a machine that may not keep its notes there."""
    reason = (error.strerror or str(error)).lower()
    hint = "set DILOCO_HOME to a folder of yours"
    return UsageError(f"cannot write there: {reason}", where=str(directory), hint=hint)


def write_whole(path: Path, data: bytes, mode: int = 0o600, durable: bool = False) -> None:
    """A reader sees the old file or the new one; an error leaves the old one. `durable`: also after a power cut."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file, None if there is no file; UnreadableError if it holds anything else."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise UnreadableError(f"longer than {MAX_FILE_BYTES} bytes")
    try:
        return parse_object(data, MAX_FILE_BYTES)
    except ValueError as error:
        raise UnreadableError(f"not valid JSON (torn?): {error}") from error


def make_directory(path: Path) -> None:
    """With parents, for the owner alone: identities hold secrets."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in NO_PLACE_ERRNOS:
            raise unwritable(path, error) from error
        raise


def refuse_unwritable(directory: Path) -> None:
    """Raises UsageError where this machine's notes could not be written, before anything else begins."""
    make_directory(directory)
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        if error.errno in NO_PLACE_ERRNOS:
            raise unwritable(directory, error) from error
        raise


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
