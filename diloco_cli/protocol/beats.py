"""Beats: what units say of themselves every few seconds. Hints for people; no decision rests on them."""

from __future__ import annotations

from dataclasses import dataclass

UNIT_STATES: dict[str, str] = {
    "STARTING": "the process is up and loads model, data and the newest committed versions",
    "TRAINING": "it steps",
    "UPLOADING": "it steps while a delta is on its way",
    "WAITING": "it pauses: the drift bound without news from the log, or `at_tau` waits for a merge",
    "RECOVERING": "a new incarnation is catching up after a failure",
    "SUSPECT": "one expected beat is missing",
    "LOST": "nothing was heard for long",
    "DRAINING": "it was told to leave and finishes what it does",
    "DONE": "it left as intended",
    "FAILED": "it left with an error",
}


@dataclass(frozen=True)
class LearnerBeat:
    """One learner's own words. Rates are per second of its own clock; byte counts are since its first incarnation."""

    state: str
    incarnation: int
    n: int
    step: int
    position: int
    tokens_per_s: float
    behind: int
    mean_tokens_per_s: float = 0.0
    loss: float | None = None
    up_bytes: int = 0
    down_bytes: int = 0
    requests: int = 0
    blocked_percent: float = 0.0
    note: str = ""
    retrying: str = ""


@dataclass(frozen=True)
class SyncerBeat:
    """The syncer's own words."""

    state: str
    epoch: int
    n: int
    host: str
    reason: str = ""
    up_bytes: int = 0
    down_bytes: int = 0
    requests: int = 0
    retrying: str = ""
    memory_bytes: int = 0
