"""Shrinks a history that breaks an invariant: faults are left out, half of them at first, then one by one, while the
same invariant breaks.

`told`: the last events of a history as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.histories.options import REGION, Options
from tests.histories.outcome import HistoryResult, Moment
from tests.histories.replayer import in_one
from tests.histories.script import Script

_HEX = re.compile(r"(-[a-z0-9]+-[0-9a-f]{8})[0-9a-f]{56}")
MAX_RUNS = 150
TAIL = 12


def told(outcome: HistoryResult, last: int) -> list[str]:
    """The last `last` events as text."""
    return [_line(moment, outcome.objects) for moment in outcome.tail[-last:]]


def _line(moment: Moment, objects: dict[str, bytes]) -> str:
    when_s, text, key = moment
    said = _said(key, objects.get(key, b""))
    return _HEX.sub(r"\1", f"{when_s:.3f} s  {text} {key}{said}".rstrip())


def _said(key: str, data: bytes) -> str:
    kind = key.removeprefix(f"{REGION}/").partition("/")[0]
    if kind not in ("commit", "offer"):
        return ""
    try:
        record = in_one(data)
    except ValueError:
        return ": damaged"
    return f": {_commit(record) if kind == 'commit' else _offer(record)}"


def _offer(offer: dict[str, Any]) -> str:
    return f"fragment {offer['fragment']} on version {offer['base']}, data {offer['data_start']}-{offer['data_end']}"


def _commit(commit: dict[str, Any]) -> str:
    parts = [commit["kind"]]
    parts += [f"slot {commit['slot']}"] if "slot" in commit else []
    parts += [f"{item['learner']} {item['incarnation']}/{item['seq']}" for item in commit.get("inputs", ())]
    parts += [f"{item['learner']} {item['incarnation']}/{item['seq']} {item['reason']}" for item in commit["outcomes"]]
    return ", ".join(parts)


Live = Callable[[Script], HistoryResult]


@dataclass(frozen=True)
class Violation:
    """The report of a violation. `command` repeats the history that was shrunk."""

    seed: int
    invariant: str
    story: tuple[str, ...]
    command: str


def shortest(outcome: HistoryResult, live: Live) -> tuple[Script, HistoryResult]:
    """The smallest set of its faults found, in a bounded number of runs, with which the same invariant breaks. `live`:
    runs the same history with given faults only, as that of `outcome` was run."""
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
    """The report of a history that broke an invariant, shrunk."""
    assert outcome.violation is not None
    script, shown = shortest(outcome, live)
    assert shown.violation is not None
    faults = [fault.describe() for fault in script.calls] + [other.describe() for other in script.nemesis_events]
    story = (
        f"seed {seed}: {options.describe()}",
        *([f"{len(faults)} faults are enough:"] if faults else ["no fault is needed:"]),
        *(f"  {fault}" for fault in faults),
        "what happened at the end:",
        *(f"  {line}" for line in told(shown, TAIL)),
        str(shown.violation),
    )
    return Violation(seed, shown.violation.invariant, story, command)
