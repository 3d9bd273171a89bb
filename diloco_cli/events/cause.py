"""What ended a process, for the person who can mend it: an error of the user's own code is told with its file and line.

The text holds no secret of the environment, no password of a URL, and nothing that steers a terminal.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.environment import secret_values
from diloco_cli.errors import DilocoError, TakenError, escaped

MAX_CAUSE_BYTES = 2048
HIDDEN = "***"
_POSITION = re.compile(r"at position ([0-9]{1,19}) of its data")
_USERINFO = re.compile(r"(?<=://)[^/\s@]+@")
_QUERY = re.compile(
    r"(?<=[?&;])([\w.-]*(?:key|token|secret|sig|password|credential)[\w.-]*=)[^\s&;'\"]+", re.IGNORECASE
)
_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Cause:
    """`place`: file and line of the user's code, "" for other errors. `lasting`: the same start ends the same way;
    errors of the world outside (OSError) may heal. `position`: of a learner in its data, if it had begun to train.
    `hint`: what the error itself says to try. `of_living`: another process goes by this name, and is well."""

    text: str
    place: str = ""
    lasting: bool = False
    position: int | None = None
    hint: str = ""
    of_living: bool = False


def cause_of(error: BaseException) -> Cause:
    """The cause of a process's end, from the deepest frame of the user's code, if there is one."""
    root, frame = _user_frame(error)
    notes = " ".join(getattr(error, "__notes__", ()))
    said = _POSITION.search(notes)
    position = int(said[1]) if said else None
    hint = safe(error.hint) if isinstance(error, DilocoError) and error.hint else ""
    of_living = isinstance(error, TakenError)
    if frame is None:
        told = str(error) if isinstance(error, DilocoError) else f"{type(error).__name__}: {error}"
        return Cause(safe(told), position=position, hint=hint, of_living=of_living)
    place = f"{relative(frame.filename)}:{frame.lineno}"
    told = f"your code: {place} in {frame.name}: {type(root).__name__}: {root}"
    lasting = not isinstance(root, OSError) or isinstance(root, FileNotFoundError)
    return Cause(safe(told), place, lasting, position, hint, of_living)


def note_position(error: BaseException, position: int) -> None:
    """Note on the error how far in its data the learner was that it ends."""
    error.add_note(f"at position {position} of its data")


def safe(text: str) -> str:
    """The text without secrets, with control characters escaped, at most MAX_CAUSE_BYTES long."""
    for value in secret_values():
        text = text.replace(value, HIDDEN)
    text = _QUERY.sub(rf"\1{HIDDEN}", _USERINFO.sub(f"{HIDDEN}@", text))
    return escaped(text).encode(errors="backslashreplace")[:MAX_CAUSE_BYTES].decode(errors="ignore")


def relative(path: str) -> str:
    """The file as its module's importer sees it: relative to the entry of sys.path that it lies under."""
    file = Path(path).resolve()
    roots = [Path(entry or ".").resolve() for entry in sys.path]
    inside = [root for root in roots if root in file.parents]
    return str(file.relative_to(max(inside, key=lambda root: len(root.parts)))) if inside else file.name


def _user_frame(error: BaseException) -> tuple[BaseException, traceback.FrameSummary | None]:
    """The error, or what caused it, that was raised in the user's code, and the deepest frame of that code."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__
    for one in reversed(chain):
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if _is_users(frame.filename)]
        if frames:
            return one, frames[-1]
        if isinstance(one, SyntaxError) and one.filename and _is_users(one.filename):
            return one, traceback.FrameSummary(one.filename, one.lineno, "<module>", lookup_line=False)
    return error, None


def _is_users(filename: str) -> bool:
    """Whether the file is neither of diloco, nor of Python, nor of an installed package."""
    if filename.startswith("<"):
        return False
    file = Path(filename).resolve()
    paths = sysconfig.get_paths()
    others = [_PACKAGE, *(Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "scripts"))]
    return not {"site-packages", "dist-packages"} & set(file.parts) and not any(it in file.parents for it in others)
