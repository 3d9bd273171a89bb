"""The signing key of this process, from its environment or a file, never from a command line."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from diloco_cli.environment import environment_value
from diloco_cli.errors import UsageError
from diloco_cli.signing import KEY_FILE_VARIABLE, KEY_VARIABLE, MAX_SECRET, Secret


def signing_secret() -> Secret | None:
    """The key in DILOCO_SIGNING_KEY, else in the file named in DILOCO_SIGNING_KEY_FILE; None if neither is set. Raises
    UsageError, which never quotes the key."""
    text = environment_value(KEY_VARIABLE)
    if text is not None:
        return Secret(text, KEY_VARIABLE)
    path = environment_value(KEY_FILE_VARIABLE)
    return None if path is None else Secret(_read(Path(path)), path)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_SECRET + 2)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=f"{KEY_FILE_VARIABLE}={path}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError("others than its owner may read this key", where=str(path), hint=f"chmod 600 {path}")
    try:
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise UsageError("a signing key is text", where=str(path)) from None


def write_key(path: Path, text: str) -> None:
    """A new file that only its owner may read. Raises UsageError if there is one already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{text}\n")
    except FileExistsError:
        raise UsageError("there is a file already; nothing was written", where=str(path)) from None
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(path)) from None
