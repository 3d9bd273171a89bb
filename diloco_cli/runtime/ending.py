"""What a supervision tells, and how it comes to its end: who asked for it, and how long units may take. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from diloco_cli.runtime.restart import FENCED_STATUS

EventKind = Literal[
    "started", "adopted", "ended", "held", "released", "done", "failed", "stopping", "terminated", "killed", "fenced"
]
Reason = Literal["finished", "stopped", "interrupted", "fenced", "failed"]
SIGNAL_STATUS_BASE = 128
ENDINGS: dict[str, Reason] = {"FINISHED": "finished", "STOPPED": "stopped", "STOPPING": "stopped"}


@dataclass(frozen=True)
class Event:
    """One line for people. `unit` is None if it concerns all."""

    kind: EventKind
    unit: str | None
    text: str


@dataclass(frozen=True)
class SupervisionResult:
    """How a supervision ended. `signum` is the signal that interrupted it."""

    reason: Reason
    signum: int | None

    @property
    def exit_status(self) -> int:
        if self.reason == "interrupted":
            return SIGNAL_STATUS_BASE + (self.signum or 2)
        return FENCED_STATUS if self.reason == "fenced" else 0


@dataclass(frozen=True)
class StopPolicy:
    """Bounds of a clean stop, from its beginning; together below 10 s.

    Units that can know from the bucket that the run ended, or shall stop, have `leave_s` before they get
    SIGTERM; where no stop request was written, they get it at once. What lives after `kill_s` gets SIGKILL.
    """

    leave_s: float = 4.0
    kill_s: float = 8.0
    give_up_s: float = 9.5


@dataclass(frozen=True)
class Ending:
    """Why and when, on the monotonic clock."""

    reason: Reason
    text: str
    terminate_at_s: float
    kill_at_s: float
    give_up_at_s: float


def next_ending(
    ending: Ending | None, num_signals: int, run_state: str | None, now_s: float, policy: StopPolicy
) -> Ending | None:
    """What follows from the signals heard and the run's state in the bucket: a person's wish outranks the run's own
    end, a second one hurries."""
    if ending is not None and num_signals >= 2:
        return replace(ending, terminate_at_s=now_s, kill_at_s=min(now_s, ending.kill_at_s))
    if num_signals:
        if ending is not None and ending.reason == "interrupted":
            return ending
        delay_s = policy.leave_s if ending is None else 0.0
        fresh = begin_ending("interrupted", "asked to stop; ask again to stop at once", now_s, delay_s, policy)
        return fresh if ending is None else replace(fresh, kill_at_s=ending.kill_at_s)
    if ending is None and run_state in ENDINGS:
        return begin_ending(ENDINGS[run_state], f"the run is {run_state}", now_s, policy.leave_s, policy)
    return ending


def begin_ending(reason: Reason, text: str, now_s: float, delay_s: float, policy: StopPolicy) -> Ending:
    """SIGTERM comes after `delay_s`."""
    return Ending(reason, text, now_s + delay_s, now_s + policy.kill_s, now_s + policy.give_up_s)
