"""Reads what the bucket says about a run; time-boxed, and never anything but the bucket."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.clock import wall_s
from diloco_cli.protocol.beats import LearnerBeat, SyncerBeat
from diloco_cli.protocol.driver import Clock, perform
from diloco_cli.protocol.keys import SYNCER, beat_key
from diloco_cli.protocol.log import read_log
from diloco_cli.protocol.records import RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.wire import Record, RecordError, decode
from diloco_cli.store.port import Store


@dataclass(frozen=True)
class Heard:
    """A learner's beat and its age in seconds, by the store's own time of change."""

    beat: LearnerBeat
    age_s: float


@dataclass(frozen=True)
class SyncerHeard:
    beat: SyncerBeat
    age_s: float


@dataclass(frozen=True)
class RunFacts:
    """Everything `status` knows. `read_s` is wall time, for ages only."""

    url: str
    run: RunFormat
    state: RunState
    learners: dict[str, Heard]
    syncer: SyncerHeard | None
    read_s: float


def read_facts(url: str, run: RunFormat, store: Store, clock: Clock, known: RunState | None = None) -> RunFacts:
    """`known` saves reading the log from its start again."""
    state = perform(read_log(run, known), store, clock)
    learners = {}
    for island in run.islands:
        found = _beat(store, island.name, LearnerBeat)
        if found is not None:
            learners[island.name] = Heard(*found)
    syncer = _beat(store, SYNCER, SyncerBeat)
    return RunFacts(url, run, state, learners, SyncerHeard(*syncer) if syncer else None, wall_s())


def _beat(store: Store, unit: str, kind: type[Record]) -> tuple[Record, float] | None:
    key = beat_key(unit)
    data, stat = store.get(key), store.stat(key)
    if data is None or stat is None:
        return None
    try:
        return decode(kind, data, key), max(0.0, wall_s() - stat.modified_s)
    except RecordError:
        return None
