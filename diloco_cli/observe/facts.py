"""Reads what the bucket says about a run; time-boxed, and never anything but the bucket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco_cli.clock import wall_s
from diloco_cli.protocol.beats import LARGEST_BEAT_BYTES, LearnerBeat, SyncerBeat
from diloco_cli.protocol.driver import Clock, perform
from diloco_cli.protocol.keys import STANDBY_BEATS, SYNCER, beat_key
from diloco_cli.protocol.log import read_log
from diloco_cli.protocol.records import RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.wire import Record, RecordError, decode
from diloco_cli.store.port import Store

TOLERATED_SKEW_S = 5.0
MOST_STANDBYS = 64


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
    """Everything `status` knows. `now_s`: the store's time when it was read, as far as this machine can tell;
    `clock_skew_s`: how far that lies ahead of this machine's clock, None if it does not."""

    url: str
    run: RunFormat
    state: RunState
    learners: dict[str, Heard]
    syncer: SyncerHeard | None
    now_s: float
    clock_skew_s: float | None = None
    standbys: dict[str, SyncerHeard] = field(default_factory=dict)


@dataclass(frozen=True)
class StoreTime:
    now_s: float
    skew_s: float | None


def store_time(wall_s: float, modified_s: Iterable[float]) -> StoreTime:
    """The store's time now: nothing in it changed later than now, so a slow clock of this machine's is put right. A
    fast one cannot be told from silence, and ages are then too long by as much."""
    newest_s = max(modified_s, default=wall_s)
    skew_s = newest_s - wall_s
    return StoreTime(max(wall_s, newest_s), skew_s if skew_s > TOLERATED_SKEW_S else None)


def read_facts(url: str, run: RunFormat, store: Store, clock: Clock, known: RunState | None = None) -> RunFacts:
    """`known` saves reading the log from its start again."""
    state = perform(read_log(run, known), store, clock)
    found = {
        island.name: _beat(store, beat_key(island.name), LearnerBeat) for island in state.with_members(run).everybody
    }
    beats = {name: beat for name, beat in found.items() if beat is not None}
    syncer = _beat(store, beat_key(SYNCER), SyncerBeat)
    standbys = _standbys(store)
    changes = [s for _, s in [*beats.values(), *standbys.values()]] + ([syncer[1]] if syncer else [])
    time = store_time(wall_s(), changes)
    learners = {name: Heard(beat, max(0.0, time.now_s - modified_s)) for name, (beat, modified_s) in beats.items()}
    heard = SyncerHeard(syncer[0], max(0.0, time.now_s - syncer[1])) if syncer else None
    waiting = {n: SyncerHeard(beat, max(0.0, time.now_s - modified_s)) for n, (beat, modified_s) in standbys.items()}
    return RunFacts(url, run, state, learners, heard, time.now_s, time.skew_s, waiting)


def _standbys(store: Store) -> dict[str, tuple[SyncerBeat, float]]:
    """By name: whoever stands by, whether launched, hosted or started by hand. A listing may lag: for eyes alone."""
    keys = store.list(STANDBY_BEATS, limit=MOST_STANDBYS)
    found = {key.removeprefix(STANDBY_BEATS).removesuffix(".json"): _beat(store, key, SyncerBeat) for key in keys}
    return {name: beat for name, beat in found.items() if beat is not None}


def _beat(store: Store, key: str, kind: type[Record]) -> tuple[Record, float] | None:
    """A unit's last words, and when the store got them."""
    data, stat = store.get(key, LARGEST_BEAT_BYTES), store.stat(key)
    if data is None or stat is None:
        return None
    try:
        return decode(kind, data, key), stat.modified_s
    except RecordError:
        return None
