"""The states of a unit on this machine, and every way from one to another."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    BACKOFF = "BACKOFF"
    HELD = "HELD"
    DONE = "DONE"
    FAILED = "FAILED"


class Happening(StrEnum):
    SPAWNED = "spawned"  # its process was started, or a living one was adopted
    DIED = "died"  # it ended and will be started again
    FINISHED = "finished"  # it ended and need not be started again
    GAVE_UP = "gave up"  # it ended too often
    DUE = "due"  # its backoff is over
    HOLD = "hold"  # somebody holds it down
    RELEASED = "released"  # nobody holds it any more
    RUN_OVER = "run over"  # the run ended or is being stopped


TRANSITIONS: dict[tuple[State, Happening], State] = {
    (State.STARTING, Happening.SPAWNED): State.RUNNING,
    (State.STARTING, Happening.DIED): State.BACKOFF,
    (State.STARTING, Happening.GAVE_UP): State.FAILED,
    (State.STARTING, Happening.HOLD): State.HELD,
    (State.STARTING, Happening.RUN_OVER): State.DONE,
    (State.RUNNING, Happening.DIED): State.BACKOFF,
    (State.RUNNING, Happening.HOLD): State.HELD,
    (State.RUNNING, Happening.FINISHED): State.DONE,
    (State.RUNNING, Happening.GAVE_UP): State.FAILED,
    (State.BACKOFF, Happening.DUE): State.STARTING,
    (State.BACKOFF, Happening.HOLD): State.HELD,
    (State.BACKOFF, Happening.RUN_OVER): State.DONE,
    (State.HELD, Happening.RELEASED): State.STARTING,
    (State.HELD, Happening.RUN_OVER): State.DONE,
}
LAST_STATES = frozenset({State.DONE, State.FAILED})


def next_state(state: State, happening: Happening) -> State:
    """Raises ValueError for a way that the table does not have."""
    try:
        return TRANSITIONS[state, happening]
    except KeyError:
        raise ValueError(f"a unit cannot go on from {state} when {happening}") from None
