"""Local files: the only module that knows where they are, and how the small ones are written and read.

What this machine keeps beside the buckets lies in one place for all folders: in $DILOCO_HOME, else in the user's own
folders, the state in ~/.local/state/diloco and what may be deleted at any time in ~/.cache/diloco:

    state  runs/<run>/run.json             name and URL of the run, and the folder from which it was launched
           runs/<run>/sites.json           what its jobs' sites are, as launched here
           runs/<run>/supervisor.json      identity of the supervising process
           runs/<run>/units/<unit>.json    identity of each living unit
           runs/<run>/supervised.json      what the supervisor last decided about each unit
           runs/<run>/hold/<unit>          present: the supervisor must not restart this unit
           runs/<run>/errors/<unit>.json   the last error of a unit's process
           runs/<run>/logs/<unit>.log      what a unit printed
           runs/<run>/wandb/               what `diloco wandb` has sent, and W&B's own files
           runs/<run>/metrics.token        what a scrape of `diloco status --serve` must know
           runs/<run>/spool/               deltas that a syncer has fetched and not merged yet, in files without names
           operators/<digest>.json         the operator's key that the run at an address was first seen with
           consent/<digest>.json           this machine's consent to what the run format with that digest names
    cache  data/                           `text-<digest>/`, the token shards of text files; `blocks/`, what was read of
                                           a bucket's shards

<run> is the run's name and a digest of its URL. Without runs/ a run goes on from its bucket alone, and this machine has
forgotten its own part: units that live here are not adopted but replaced, what chaos has paused stays so, jobs are not
asked after until their sites are named again (`launch --create-only`), logs and what else is noted there are gone.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from diloco_cli.environment import environment_value
from diloco_cli.errors import NoSpaceError, UsageError

SOURCE = Path(__file__).resolve().parent.parent
MAX_FILE_BYTES = 64 * 1024
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_PLACE_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR})


def user_state_directory(kind: str) -> Path:
    return _users_directory(kind, "XDG_STATE_HOME", ".local/state")


def user_file() -> Path:
    """The user's own settings, for all runs: $XDG_CONFIG_HOME/diloco/config.yaml or ~/.config/diloco/config.yaml."""
    config = environment_value("XDG_CONFIG_HOME")
    return (Path(config) if config else home() / ".config") / "diloco" / "config.yaml"


def user_cache_directory(kind: str) -> Path:
    """What may be deleted at any time."""
    return _users_directory(kind, "XDG_CACHE_HOME", ".cache")


def _users_directory(kind: str, variable: str, usual: str) -> Path:
    own = environment_value("DILOCO_HOME")
    if own is not None:
        return Path(own).absolute() / kind
    place = environment_value(variable)
    return (Path(place) if place else home() / usual) / "diloco" / kind


def home() -> Path:
    """The user's; $DILOCO_HOME where the user has none, as in a container that runs under any number."""
    try:
        return Path.home()
    except RuntimeError:
        if own := environment_value("DILOCO_HOME"):
            return Path(own).absolute()
        raise UsageError("this user has no home folder", hint="set DILOCO_HOME to a folder of yours") from None


def templates_directory() -> Path:
    """templates/ of the wheel, or of the source tree in an editable install."""
    packaged = Path(str(resources.files("diloco_cli"))) / "templates"
    return packaged if packaged.is_dir() else SOURCE / "templates"


def install_hint(extra: str) -> str:
    """The command that installs an extra: of the source tree, if that is what runs here. For the Python that runs this:
    the shell's `pip` may be another's."""
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    if (SOURCE / "pyproject.toml").is_file():
        return f"{pip} -e {shlex.quote(f'{SOURCE}[{extra}]')}"
    return f"{pip} 'diloco[{extra}]'"


class UnreadableError(ValueError):
    """A torn, foreign or newer file; the text is the reason."""


def checked_name(name: str, what: str) -> str:
    """The name, if it may become a file name: it cannot point outside of the run's directory."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{what} must match [a-z0-9][a-z0-9-]{{0,62}}, got {name!r}")
    return name


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Readable by its owner alone; a reader sees the old file or the new one."""
    try:
        make_directory(path.parent)
        write_whole(path, json.dumps(body, allow_nan=False).encode())
    except OSError as error:
        if error.errno in NO_SPACE_ERRNOS:
            raise NoSpaceError("no space left to note the state of a unit", where=str(path)) from error
        if error.errno in NO_PLACE_ERRNOS:
            raise _unwritable(path.parent, error) from error
        raise


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """A reader sees the old file or the new one; an error leaves the old one."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
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
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"not valid JSON (torn?): {error}") from error
    if not isinstance(found, dict):
        raise UnreadableError("not a JSON object")
    return found


def make_directory(path: Path) -> None:
    """With parents, for the owner alone: identities hold secrets."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in NO_PLACE_ERRNOS:
            raise _unwritable(path, error) from error
        raise


def refuse_unwritable(directory: Path) -> None:
    """Raises UsageError where this machine's notes could not be written, before anything else begins."""
    make_directory(directory)
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        if error.errno in NO_PLACE_ERRNOS:
            raise _unwritable(directory, error) from error
        raise


def _unwritable(directory: Path, error: OSError) -> UsageError:
    reason = (error.strerror or str(error)).lower()
    hint = "set DILOCO_HOME to a folder of yours"
    return UsageError(f"cannot write there: {reason}", where=str(directory), hint=hint)
