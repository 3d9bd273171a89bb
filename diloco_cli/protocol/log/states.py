"""The states of a learner, a syncer, a standby and a run, and every allowed transition.

A process changes its state through `moved` alone. ARCHITECTURE.md draws these tables, and that of a unit on a machine
(runtime/units.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import TypeVar

from diloco_cli.errors import DilocoError


class LearnerState(StrEnum):
    STARTING = "STARTING"  # it loads the newest committed versions: the first incarnation
    RECOVERING = "RECOVERING"  # likewise, after a failure
    TRAINING = "TRAINING"
    WAITING = "WAITING"  # it pauses: the drift bound, a quarantine, or `at_tau` waits for a merge
    DRAINING = "DRAINING"  # it was told to leave and awaits the outcome of its offers
    FENCED = "FENCED"  # a newer incarnation has its place
    DONE = "DONE"
    FAILED = "FAILED"


class SyncerState(StrEnum):
    READING = "READING"  # the log, to its end
    CLAIMING = "CLAIMING"  # an epoch
    SERVING = "SERVING"
    MERGING = "MERGING"
    FINISHING = "FINISHING"  # the last evaluation, and an outcome for every offer
    FENCED = "FENCED"  # a syncer of a higher epoch serves
    DONE = "DONE"


class StandbyState(StrEnum):
    STANDING_BY = "STANDING_BY"
    CLAIMING = "CLAIMING"  # it takes over, and is a syncer from here on
    DONE = "DONE"  # the run is over


class RunPhase(StrEnum):
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    FINISHED = "FINISHED"


_L, _S, _B, _R = LearnerState, SyncerState, StandbyState, RunPhase
_OVER = {_L.DONE, _L.FENCED, _L.FAILED}
LEARNER: Mapping[LearnerState, AbstractSet[LearnerState]] = {
    _L.STARTING: {_L.RECOVERING, _L.TRAINING, _L.WAITING, _L.DRAINING, *_OVER},
    _L.RECOVERING: {_L.TRAINING, _L.WAITING, _L.DRAINING, *_OVER},
    _L.TRAINING: {_L.WAITING, _L.DRAINING, *_OVER},
    _L.WAITING: {_L.TRAINING, _L.DRAINING, *_OVER},
    _L.DRAINING: _OVER,
    **dict.fromkeys(_OVER, frozenset()),
}
SYNCER: Mapping[SyncerState, AbstractSet[SyncerState]] = {
    _S.READING: {_S.CLAIMING, _S.DONE},
    _S.CLAIMING: {_S.SERVING, _S.FENCED, _S.DONE},
    _S.SERVING: {_S.MERGING, _S.FINISHING, _S.FENCED, _S.DONE},
    _S.MERGING: {_S.SERVING, _S.FENCED, _S.DONE},
    _S.FINISHING: {_S.SERVING, _S.FENCED, _S.DONE},
    _S.FENCED: frozenset(),
    _S.DONE: frozenset(),
}
STANDBY: Mapping[StandbyState, AbstractSet[StandbyState]] = {
    _B.STANDING_BY: {_B.CLAIMING, _B.DONE},
    _B.CLAIMING: frozenset(),
    _B.DONE: frozenset(),
}
RUN: Mapping[RunPhase, Mapping[str, RunPhase]] = {  # by the kind of a commit; other kinds leave a run RUNNING
    _R.RUNNING: {"stop": _R.STOPPED, "finish": _R.FINISHED},
    _R.STOPPED: {"epoch_start": _R.RUNNING},
    _R.FINISHED: {},
}
State = TypeVar("State", LearnerState, SyncerState, StandbyState)


class IllegalStateError(DilocoError):
    """A transition that the state's table does not have: an error of this program."""

    code = "illegal_state"


def phase_after(phase: RunPhase, kind: str) -> RunPhase | None:
    """Of the run after one more commit; None: no commit of this kind may come now."""
    return RUN[phase].get(kind, phase if phase == RunPhase.RUNNING else None)


def moved(table: Mapping[State, AbstractSet[State]], now: State, to: State) -> State:
    """`to`, if that is the present state or an allowed transition leads there. Raises IllegalStateError."""
    if to != now and to not in table[now]:
        kind = type(now).__name__
        raise IllegalStateError(
            f"{kind} cannot go from {now} to {to}; allowed: {', '.join(sorted(table[now])) or 'nothing, it is over'}",
            hint="this is a bug in diloco: please report it",
        )
    return to
