"""What this machine knows of a run's units that live here: their processes, their supervisor's decisions, the disk.

The bucket shows only that a unit falls silent; here the cause is known.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco_cli.chaos.actions import JournalEntry, overview
from diloco_cli.chaos.faults import Target
from diloco_cli.observe.facts import moment
from diloco_cli.paths import run_directory
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.runtime.logs import last_store_word
from diloco_cli.runtime.registry import SUPERVISOR, Supervised, UnitRecord, read_run, read_supervised, read_unit
from diloco_cli.runtime.units import UnitState
from diloco_cli.store.open import parse_url
from diloco_cli.units import format_size

ANSWERS = "answers again"
BYTES_A_MERGE = 8  # for each parameter of a fragment: its state, and the weights
NOTHING_SAID = Supervised("", 0, "")


@dataclass(frozen=True)
class LocalUnit:
    """`condition`: running, paused, dead. `said`: what its supervisor last decided; `supervised`: that one lives.
    `by_chaos`: an injected fault has ended or paused this process."""

    kind: str
    pid: int | None
    condition: str
    said: Supervised = NOTHING_SAID
    supervised: bool = False
    by_chaos: bool = False

    @property
    def dead(self) -> bool:
        return self.condition == "dead"

    @property
    def restarts(self) -> bool:
        """Its supervisor will start it again, or has done so: then it has not yet been heard."""
        again = (UnitState.BACKOFF, UnitState.STARTING) if self.dead else (UnitState.RUNNING,)
        return self.supervised and bool(self.said.last_end) and self.said.state in again

    @property
    def gave_up(self) -> bool:
        return self.dead and self.said.state == UnitState.FAILED

    @property
    def account(self) -> str:
        """What has become of it, in words; "" while it runs."""
        who = " (chaos)" if self.by_chaos else ""
        if self.condition == "paused":
            return f"its process {self.pid} is paused by a signal{who}"
        if self.restarts:
            why = self.said.reason if self.dead else self.said.last_end
            return f"it is being restarted, after {self.said.starts} starts: {why}{who}"
        if not self.dead:
            return ""
        if self.gave_up or self.said.state == UnitState.HELD:
            return f"{self.said.reason}{who}"
        if self.said.state == UnitState.DONE:
            return f"its process {self.pid} has ended: {self.said.reason}"
        return f"its process {self.pid} has ended{who}, and no supervisor lives here that would restart it"


@dataclass(frozen=True)
class Local:
    """`units`: by name. `full`: which disk has no space for a merge; `store`: a unit's failing call to the store."""

    units: dict[str, LocalUnit] = field(default_factory=dict)
    full: str = ""
    store: str = ""


def read_local(name: str, url: str, run: RunFormat) -> Local:
    """Empty where this directory does not know the run, or knows another one by that name."""
    known = read_run(name)
    if known is None or known.url.rstrip("/") not in (url.rstrip("/"), *run.region_urls):
        return Local()
    supervised = read_supervised(name)
    units = {
        target.name: _unit(target, entry, supervised.get(target.name, NOTHING_SAID))
        for target, entry in overview(name)
        if target.name != SUPERVISOR and target.condition != "unknown"
    }
    if not units:
        return Local()
    living = [unit for unit, known_unit in units.items() if not known_unit.dead]
    largest = max(fragment.num_parameters for fragment in run.layout.fragments)
    return Local(units, full_disk(_folders(name, url), largest * BYTES_A_MERGE), _store_word(name, living))


def _unit(target: Target, entry: JournalEntry | None, said: Supervised) -> LocalUnit:
    by_chaos = entry is not None and entry.pid == target.pid and bool(entry.injected) and not entry.healed
    return LocalUnit(target.kind, target.pid, target.condition, said, target.supervised, by_chaos)


def _folders(name: str, url: str) -> list[Path]:
    parsed = parse_url(url)
    return [run_directory(name), *([Path(parsed.place)] if parsed.scheme == "file" else [])]


def full_disk(folders: Sequence[Path], needed_bytes: int) -> str:
    """Which of these folders' disks has no space for so many bytes, in words; "" if none is full."""
    for folder in folders:
        try:
            free_bytes = shutil.disk_usage(folder).free
        except OSError:
            continue
        if free_bytes < needed_bytes:
            needed = f"a merge needs {format_size(needed_bytes)}"
            return f"no space is left in {folder}: {format_size(free_bytes)} free, {needed}"
    return ""


def _store_word(name: str, living: Sequence[str]) -> str:
    """The newest failing call that a living unit has logged, and that no answer has followed."""
    for unit in living:
        time, text = last_store_word(name, unit)
        record = read_unit(name, unit)
        started_s = record.started_s if isinstance(record, UnitRecord) else 0.0
        if text and ANSWERS not in text and moment(time).timestamp() >= started_s:
            return f"{unit}: {text}"
    return ""
