"""What a report says happened: the log's word, and that of the processes."""

from __future__ import annotations

from diloco_cli.clock import wall_s
from diloco_cli.events.bucket import EventReader
from diloco_cli.events.event import FreshEvent, encode_batch
from diloco_cli.protocol.log.keys import event_key
from diloco_cli.report.happened import marks_of
from diloco_cli.report.history import RESTART, Mark
from diloco_cli.store.memory import MemoryStore
from tests.unit.report.test_history import begun


def test_a_restart_is_told_once_and_what_processes_say_stands_between() -> None:
    history, store = begun(), MemoryStore()
    history.started_s = wall_s() - 100.0
    said = [
        FreshEvent(-6.0, "started", "process 7"),
        FreshEvent(60.0, "chaos", "kill"),
        FreshEvent(62.0, RESTART, "again"),
        FreshEvent(63.0, "merged", "routine"),
    ]
    store.put(event_key("iowa", 0, "a"), encode_batch(said, 100.0))
    history.marks = [
        Mark(0.0, "serving", "syncer", "epoch 1"),
        Mark(10.0, "serving", "syncer", "epoch 2"),
        Mark(30.0, RESTART, "iowa", "takes part again"),
        Mark(75.0, RESTART, "iowa", "takes part again"),
        Mark(76.0, RESTART, "rhine", "takes part again"),
    ]
    found = [(round(mark.s), mark.kind, mark.unit) for mark in marks_of(history, EventReader().read(store))]
    assert found == [
        (0, "started", "iowa"), (0, "serving", "syncer"), (10, "serving", "syncer"), (30, RESTART, "iowa"),
        (60, "chaos", "iowa"), (62, RESTART, "iowa"), (76, RESTART, "rhine"),
    ]  # fmt: skip
