"""The one tree of errors: what failed, where, the allowed values, and a hint with a command.

Every error has the exit status that `diloco` ends with; `cli/main.py` prints them.

`suggestion` gives the closest names to a mistyped one, for hints alone: no name is ever looked up by similarity.
`escaped` is text from a bucket, a log or a user's code, as it may be shown: it must not control a terminal.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_NAMES = 4
INTERRUPTED_STATUS = 130  # of the process, after Ctrl-C


class DilocoError(Exception):
    """Base of all declared errors. `where` is a place such as `run.yaml:12`; `hint` is one thing to try."""

    code = "error"
    exit_status = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class UsageError(DilocoError):
    """A wrong argument or an invalid file."""

    code = "usage"
    exit_status = 2


class InfeasibleError(DilocoError):
    """No plan exists for this hardware and this run."""

    code = "infeasible"
    exit_status = 3


class NotFoundError(DilocoError):
    """There is no such run or plan."""

    code = "not_found"
    exit_status = 4


class DegradedError(DilocoError):
    """The run works, but not as planned (`status --exit-code`)."""

    code = "degraded"
    exit_status = 5


class StoreError(DilocoError):
    """The store cannot be reached, forbids, or answered wrongly."""

    code = "store"
    exit_status = 6


class HypothesisError(DilocoError):
    """A storm was not survived as its scenario says."""

    code = "hypothesis"
    exit_status = 7


class RefusedError(DilocoError):
    """A safety rail refused."""

    code = "refused"
    exit_status = 8


class TakenError(RefusedError):
    """A living process goes by that name. No failure of its own: only the person who started the second is told."""


class FencedError(DilocoError):
    """A newer process has taken this one's place; nothing was changed."""

    code = "fenced"
    exit_status = 9


class DataCheckError(DilocoError):
    """Objects in the bucket are not what the log says."""

    code = "data_check"
    exit_status = 11


class RunFailedError(DilocoError):
    """The run cannot go on: non-finite loss, restarts exhausted."""

    code = "run_failed"
    exit_status = 12


class NoSpaceError(DilocoError):
    """A disk is full."""

    code = "no_space"
    exit_status = 13


class TerminatedError(DilocoError):
    """SIGTERM ended the process."""

    code = "terminated"
    exit_status = 143


class InterruptedRunError(TerminatedError):
    """Ctrl-C ended the process."""

    code = "interrupted"
    exit_status = 130


class TryAgainError(DilocoError):
    """Not now; the same command may work later."""

    code = "try_again"
    exit_status = 75


def similar_names(word: str, names: Iterable[str]) -> list[str]:
    """Names that begin like `word` first, then those that look like it."""
    by_lower = {name.lower(): name for name in names}
    wanted = word.lower()
    starts = sorted(name for name in by_lower if len(wanted) >= 2 and name.startswith(wanted))
    similar = difflib.get_close_matches(wanted, by_lower, n=MAX_NAMES, cutoff=0.6)
    found = dict.fromkeys([*starts, *similar])
    return [by_lower[name] for name in found][:MAX_NAMES]


def suggestion(word: str, names: Iterable[str]) -> str:
    """'; did you mean a or b?' or nothing."""
    found = similar_names(word, names)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def escaped(text: str, keep: str = "") -> str:
    """The text with escapes in the place of control characters, except those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()
