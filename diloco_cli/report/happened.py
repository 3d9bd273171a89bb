"""What happened in a run: by its whole log, and by the newest events that its processes left in the bucket."""

from __future__ import annotations

from diloco_cli.events.event import KINDS, Event
from diloco_cli.report.history import MAX_MARKS, RESTART, Mark, RunHistory
from diloco_cli.units import parse_time

TWIN_S = 120.0  # a restarted learner takes part again at most so much later


def marks_of(history: RunHistory, written: list[Event]) -> list[Mark]:
    """In the order of their times. A restart that its supervisor tells of is not told by the log again. What came
    before the first commit is told as of that. `written`: the events that processes wrote."""
    told = [
        Mark((parse_time(event.time) or 0.0) - history.started_s, event.kind, event.unit, event.text)
        for event in written
        if not KINDS[event.kind].routine
    ]
    restarts = [mark for mark in told if mark.kind == RESTART]
    by_log = [mark for mark in history.marks if not (mark.kind == RESTART and _has_twin(mark, restarts))]
    found = sorted([*by_log, *told], key=lambda mark: mark.s)[-MAX_MARKS:]
    return [Mark(max(0.0, mark.s), mark.kind, mark.unit, mark.text) for mark in found]


def _has_twin(mark: Mark, restarts: list[Mark]) -> bool:
    return any(other.unit == mark.unit and 0 <= mark.s - other.s + 1 <= TWIN_S for other in restarts)
