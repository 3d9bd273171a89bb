"""What a supervisor tells while it works, and at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco_cli.launch.restart import FENCED_STATUS, Exit
from diloco_cli.launch.states import State

EventKind = Literal[
    "started", "adopted", "ended", "held", "released", "done", "failed", "stopping", "terminated", "killed", "fenced"
]
Reason = Literal["finished", "stopped", "interrupted", "fenced", "failed"]
SIGNAL_STATUS_BASE = 128


@dataclass(frozen=True)
class Event:
    """One line for people. `at_s` is wall time; `unit` is None if it concerns all."""

    at_s: float
    kind: EventKind
    unit: str | None
    text: str


@dataclass(frozen=True)
class UnitSummary:
    """`starts` counts the processes that this supervisor started or adopted; `exits` are the latest ones."""

    name: str
    kind: str
    state: State
    starts: int
    restarts: int
    reason: str
    exits: tuple[Exit, ...]


@dataclass(frozen=True)
class Outcome:
    """How a supervision ended. `signum` is the signal that interrupted it."""

    reason: Reason
    signum: int | None
    wall_s: float
    units: tuple[UnitSummary, ...]

    @property
    def exit_status(self) -> int:
        if self.reason == "interrupted":
            return SIGNAL_STATUS_BASE + (self.signum or 2)
        return FENCED_STATUS if self.reason == "fenced" else 0
