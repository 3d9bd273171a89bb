"""What a supervision tells: to the person in front of it, and to the bucket as events; with who killed what was
killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from diloco_cli.chaos.actions import read_entries
from diloco_cli.cli.output import talk
from diloco_cli.cli.run_argument import OpenRun
from diloco_cli.events.bucket import EventWriter
from diloco_cli.events.event import KINDS
from diloco_cli.launch.local_units import syncer_may_start
from diloco_cli.runtime.ending import SupervisionEvent
from diloco_cli.runtime.logs import note_line
from diloco_cli.runtime.registry import SUPERVISOR, log_path
from diloco_cli.runtime.restart import place_data
from diloco_cli.runtime.units import UnitSpec
from diloco_cli.store.open import open_store

STDERR = 2
Show = Callable[[SupervisionEvent], None]
UNKNOWN = "not by diloco: by a person, or by the kernel for want of memory"


@contextmanager
def telling(opened: OpenRun, units: list[UnitSpec], show: Show) -> Iterator[Show]:
    """What takes the events of a supervision of these units. Where one of them serves the run, the home bucket is
    in reach; else the syncer carries them there from the region's own bucket."""
    serves = syncer_may_start(opened.format, units)
    url = opened.format.home_of(opened.url) if serves else opened.url
    teller = Teller(opened.name, url, [unit.name for unit in units], show)
    try:
        yield teller.tell
    finally:
        teller.close()


class Teller:
    """Takes the events of a supervision. `units`: those that it supervises; what concerns all is told of the first."""

    def __init__(self, run: str, url: str, units: list[str], show: Show) -> None:
        self._run, self._units, self._show = run, units, show
        self._log = None if logs_itself(run) else log_path(run, SUPERVISOR)
        self._writer = EventWriter(open_store(url))

    def tell(self, event: SupervisionEvent) -> None:
        event = with_killer(event, self._run)
        unit = event.unit or self._units[0]
        kind, told = kind_of(event), event.text
        if event.cause is not None:
            self._writer.note("error", unit, event.cause.text, place_data(event.cause))
            told = told.removeprefix(f"{event.cause.text}; ")
        self._writer.note(kind, unit, f"{KINDS[kind].said}{told}", event.data)
        if self._log is not None:
            with suppress(OSError):
                note_line(self._log, line_of(event))
        self._show(event)

    def close(self) -> None:
        self._writer.close()
        if self._writer.dropped:
            talk(f"{self._writer.dropped} events were not written: {self._writer.trouble or 'the bucket is too slow'}")


def line_of(event: SupervisionEvent) -> str:
    return f"{event.unit or 'run'}: {event.kind}: {event.text}"


def logs_itself(run: str) -> bool:
    """Whether what this process says goes to the supervisor's log anyhow: it was detached."""
    try:
        here, log = os.fstat(STDERR), log_path(run, SUPERVISOR).stat()
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (log.st_dev, log.st_ino)


def kind_of(event: SupervisionEvent) -> str:
    """The name in KINDS (events/event.py)."""
    if event.kind == "started" and int(event.data.get("start", 1)) > 1:
        return "restarted"
    return "gave_up" if event.kind == "failed" else event.kind


def with_killer(event: SupervisionEvent, run: str) -> SupervisionEvent:
    """The event of an end by a signal, with who sent it: chaos, by its journal on this machine, or somebody else."""
    name = event.data.get("signal")
    if name is None or event.kind == "done":  # an end that this supervisor asked for
        return event
    numbered = enumerate(read_entries(run), start=1)
    sent = [
        number
        for number, entry in numbered
        if (entry.fault, entry.target, entry.pid) == ("kill", event.unit, event.data.get("pid"))
        and entry.injected is not False
    ]
    by = f"chaos #{sent[-1]}" if sent else UNKNOWN
    before, killed, after = event.text.rpartition(f"killed by {name}")  # what the unit itself said stands before it
    text = f"{before}{killed} ({by}){after}" if killed else event.text
    return replace(event, text=text, data={**event.data, "by": f"chaos #{sent[-1]}" if sent else "unknown"})
