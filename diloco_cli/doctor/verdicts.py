"""The findings of an examination: one verdict per check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["pass", "warn", "fail", "skip"]
"""warn: a run works, and a person should know. skip: the check does not apply here, or could not be tried because an
earlier one failed."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    detail: str
    hint: str = ""


@dataclass(frozen=True)
class Check:
    """A finding under its name. `ok`: it is no reason against using the store."""

    name: str
    ok: bool
    level: Level
    detail: str
    hint: str
    took_s: float


@dataclass(frozen=True)
class Examination:
    """The data of `doctor --json`. Megabits per second of whole objects, one after the other; milliseconds of the
    smallest read; None if they could not be measured. `num_repeated`: calls with transient errors that were repeated,
    the last of them with `last_trouble`. `left_behind`: keys that could not be deleted again."""

    url: str
    checks: list[Check] = field(default_factory=list)
    ok: bool = False
    up_mbps: float | None = None
    down_mbps: float | None = None
    latency_ms: float | None = None
    num_repeated: int = 0
    last_trouble: str = ""
    left_behind: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """Names of the failed checks."""
        return [check.name for check in self.checks if check.level == "fail"]


def passed(detail: str) -> Finding:
    return Finding("pass", detail)


def warned(detail: str, hint: str = "") -> Finding:
    return Finding("warn", detail, hint)


def failed(detail: str, hint: str = "") -> Finding:
    return Finding("fail", detail, hint)


def skipped(detail: str) -> Finding:
    return Finding("skip", detail)
