"""What ended a unit's process, told by itself before it ends: to its supervisor in a file, or, where none started it,
to the bucket as an event.

    .diloco/<run>/errors/<unit>.json    the last error of a unit's process
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco_cli.environment import environment_value
from diloco_cli.errors import DilocoError, FencedError, TerminatedError
from diloco_cli.events.bucket import WRITE_EVERY_S, tell_event
from diloco_cli.events.cause import Cause, cause_of
from diloco_cli.paths import run_directory
from diloco_cli.runtime.files import checked_name, read_json, write_json

CAUSE_VARIABLE = "DILOCO_CAUSE_FILE"  # PID:PATH, the supervisor's pid and the file that it will read


@contextmanager
def telling_why(url: str, unit: str) -> Iterator[None]:
    """Around all that a unit's process does."""
    try:
        yield
    except (TerminatedError, FencedError):
        raise
    except Exception as error:
        with suppress(DilocoError, OSError):  # the error itself is what matters
            tell(url, unit, cause_of(error))
        raise


def cause_path(run: str, unit: str) -> Path:
    return run_directory(run) / "errors" / f"{checked_name(unit, 'name of a unit')}.json"


def cause_environment(run: str, unit: str) -> dict[str, str]:
    """For a unit that this process starts and will read the cause of."""
    return {CAUSE_VARIABLE: f"{os.getpid()}:{cause_path(run, unit)}"}


def read_cause(run: str, unit: str, pid: int) -> Cause | None:
    """What that process left."""
    return read_cause_file(cause_path(run, unit), pid)


def read_cause_file(path: Path, pid: int) -> Cause | None:
    try:
        body = read_json(path) or {}
    except ValueError:
        return None
    text, place, position, hint = (body.get(name) for name in ("text", "place", "position", "hint"))
    if body.get("pid") != pid or not isinstance(text, str) or not isinstance(place, str) or not isinstance(hint, str):
        return None
    return Cause(text, place, body.get("lasting") is True, position if isinstance(position, int) else None, hint)


def hint_of(run: str, unit: str, cause: Cause | None) -> str:
    """What to do about a unit that is not started again: what its own error says, else where to look."""
    if cause is not None and cause.hint:
        return cause.hint
    mend = f"mend {cause.place}" if cause is not None and cause.place else f"read `diloco logs {unit} --run {run}`"
    return f"{mend}, then `diloco resume {run}`"


def tell(url: str, unit: str, cause: Cause) -> None:
    """To this process's supervisor, or to the bucket if there is none."""
    supervisor, _, path = (environment_value(CAUSE_VARIABLE) or "").partition(":")
    if path and Path(path).stem == unit:
        body = {"text": cause.text, "place": cause.place, "lasting": cause.lasting, "position": cause.position}
        write_json(Path(path), {"pid": os.getpid(), "hint": cause.hint, **body})
        if supervisor == str(os.getppid()):  # it lives, and tells the bucket
            return
    # a process that is restarted fast must not flood the bucket
    tell_event(url, "error", unit, cause.text, place_data(cause), every_s=WRITE_EVERY_S)


def place_data(cause: Cause) -> dict[str, str | int | float]:
    return {"place": cause.place} if cause.place else {}
