"""From a history that breaks an invariant to the shortest story that still does: faults are left out, half of them at
first, then one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco_cli.histories.options import Options
from diloco_cli.histories.outcome import HistoryResult
from diloco_cli.histories.script import Script
from diloco_cli.histories.telling import told

MAX_RUNS = 150
TAIL = 12
Live = Callable[[Script], HistoryResult]


@dataclass(frozen=True)
class Violation:
    """What is reported of one. `command` repeats the history from which the story was made."""

    seed: int
    invariant: str
    story: tuple[str, ...]
    command: str


def shortest(outcome: HistoryResult, live: Live) -> tuple[Script, HistoryResult]:
    """The fewest of its faults with which the same invariant breaks, as far as so many runs can tell. `live`: the same
    history with these faults only, lived as the one of `outcome` was."""
    found, script, runs = outcome, outcome.faulty, 0
    kept = list(range(len(script)))
    size = len(kept)
    while size >= 1 and runs < MAX_RUNS:
        removed = False
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            again = live(script.kept(fewer))
            runs += 1
            if _invariant_of(again) == _invariant_of(found):
                kept, found, removed = fewer, again, True
                break
            if runs >= MAX_RUNS:
                break
        size = min(size, len(kept)) if removed else size // 2
    return script.kept(kept), found


def _invariant_of(outcome: HistoryResult) -> str | None:
    return None if outcome.violation is None else outcome.violation.invariant


def violation_of(seed: int, options: Options, outcome: HistoryResult, command: str, live: Live) -> Violation:
    """The story of a history that broke an invariant."""
    assert outcome.violation is not None
    script, shown = shortest(outcome, live)
    assert shown.violation is not None
    faults = [fault.describe() for fault in script.calls] + [other.describe() for other in script.disturbances]
    story = (
        f"seed {seed}: {options.describe()}",
        *([f"{len(faults)} faults are enough:"] if faults else ["no fault is needed:"]),
        *(f"  {fault}" for fault in faults),
        "what happened at the end:",
        *(f"  {line}" for line in told(shown, TAIL)),
        str(shown.violation),
    )
    return Violation(seed, shown.violation.invariant, story, command)
