"""Reads the facts about a run from the bucket alone, within a time limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Generic, TypeVar

from diloco_cli.clock import wall_s
from diloco_cli.events.bucket import EventReader, merged
from diloco_cli.events.event import Event, events_of
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES, LearnerHeartbeat, SyncerHeartbeat, genuine
from diloco_cli.protocol.log.keys import FORMAT_KEY, STANDBY_HEARTBEATS, SYNCER, commit_key, heartbeat_key
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import RecordError, decode
from diloco_cli.runtime.daemon import Clock, perform
from diloco_cli.signing import LOG, Unsigned, learner_signer
from diloco_cli.store.parallel import answers
from diloco_cli.store.port import ObjectStat, Store
from diloco_cli.units import parse_time

TOLERATED_SKEW_S = 5.0
MAX_STANDBYS = 64
UNKNOWN = datetime.fromtimestamp(0, UTC)
Heartbeat = TypeVar("Heartbeat", LearnerHeartbeat, SyncerHeartbeat)


def moment(text: str) -> datetime:
    """The moment of a time that the log states; UNKNOWN if it states none."""
    found = parse_time(text)
    return UNKNOWN if found is None else datetime.fromtimestamp(found, UTC)


@dataclass(frozen=True)
class Heard(Generic[Heartbeat]):
    """A unit's heartbeat and its age in seconds, by the store's own time of change."""

    heartbeat: Heartbeat
    age_s: float


@dataclass(frozen=True)
class RunFacts:
    """The facts for `status`. `now_s`: the store's time at reading, as this machine estimates it; `clock_skew_s`: how
    far it is ahead of this machine's clock, None if that is not notable. `commit_age_s`: of the newest commit, by the
    store's own time of its object; None: it was not asked. `written`: the events that processes wrote. `strange`:
    learners under whose heartbeat's key something lies that they have not signed."""

    url: str
    run: RunFormat
    state: RunState
    learners: dict[str, Heard[LearnerHeartbeat]]
    syncer: Heard[SyncerHeartbeat] | None
    now_s: float
    clock_skew_s: float | None = None
    standbys: dict[str, Heard[SyncerHeartbeat]] = field(default_factory=dict)
    commit_age_s: float | None = None
    written: list[Event] = field(default_factory=list)
    strange: frozenset[str] = frozenset()

    @property
    def log_ahead_s(self) -> float:
        """How far the clock of the newest commit's writer is ahead of `now_s`: the store knows how old that commit is,
        and the writers of the others are mostly the same."""
        newest_s = moment(self.state.metrics.updated_at or self.run.created_at).timestamp()
        return 0.0 if self.commit_age_s is None else newest_s + self.commit_age_s - self.now_s

    @property
    def events(self) -> list[Event]:
        """What is known to have happened, oldest first, with those of the log; by the store's clock."""
        return merged(events_of(self.state.metrics, self.log_ahead_s), self.written)

    def seconds_since(self, time: str) -> float:
        """Since a moment that the log states, whose clock may be wrong."""
        return max(0.0, self.now_s + self.log_ahead_s - moment(time).timestamp())

    def seconds_since_launch(self) -> float:
        return self.seconds_since(self.state.metrics.started_at or self.run.created_at)


def store_time(wall_s: float, modified_s: Iterable[float]) -> tuple[float, float | None]:
    """The store's time now, and its skew if that is notable. No object changed later than now, so a slow clock of this
    machine is corrected. A fast clock looks like silence of the units: then the shown ages are too long."""
    newest_s = max(modified_s, default=wall_s)
    skew_s = newest_s - wall_s
    return max(wall_s, newest_s), skew_s if skew_s > TOLERATED_SKEW_S else None


def read_facts(
    url: str, run: RunFormat, store: Store, clock: Clock, known: RunState | None = None,
    reader: EventReader | None = None, most_batches: int | None = None,
) -> RunFacts:  # fmt: skip
    """`known`: an earlier state, so that only the newer commits are read; `reader`: likewise for events, of which it
    reads `most_batches` more."""
    state = perform(read_log(run, known), store, clock)
    keyring = run.keyring.without(state.revoked)
    units = {island.name: heartbeat_key(island.name) for island in state.with_members(run).all_islands}
    # Standbys by name: launched, hosted or started by hand. A listing may lag, so this is for display alone.
    listed = store.list(STANDBY_HEARTBEATS, limit=MAX_STANDBYS)
    others = {key.removeprefix(STANDBY_HEARTBEATS).removesuffix(".json"): key for key in listed}
    keys = [*units.values(), heartbeat_key(SYNCER), *listed]
    found = dict(zip(keys, answers(partial(_read, store), keys), strict=True))
    strange: set[str] = set()
    learners = _heartbeats(found, keyring, units, LearnerHeartbeat, strange)
    syncer = _heartbeats(found, keyring, {SYNCER: heartbeat_key(SYNCER)}, SyncerHeartbeat, set())
    standbys = _heartbeats(found, keyring, others, SyncerHeartbeat, set())
    newest = store.stat(commit_key(state.n)) if state.n >= 0 else store.stat(FORMAT_KEY)
    changes = [s for _, s in [*learners.values(), *syncer.values(), *standbys.values()]]
    changes += [newest.modified_s] if newest is not None else []
    now_s, skew_s = store_time(wall_s(), changes)
    serving = _heard(syncer, now_s).get(SYNCER)
    age_s = None if newest is None else max(0.0, now_s - newest.modified_s)
    return RunFacts(
        url, run, state, _heard(learners, now_s), serving, now_s, skew_s, _heard(standbys, now_s), age_s,
        (reader or EventReader()).read(store, most_batches), frozenset(strange),
    )  # fmt: skip


def _read(store: Store, key: str) -> tuple[bytes | None, ObjectStat | None]:
    return store.get(key, MAX_HEARTBEAT_BYTES), store.stat(key)


def _heartbeats(
    found: Mapping[str, tuple[bytes | None, ObjectStat | None]], keyring: Unsigned, keys: Mapping[str, str],
    kind: type[Heartbeat], strange: set[str],
) -> dict[str, tuple[Heartbeat, float]]:  # fmt: skip
    """Units' last heartbeats by name, with the store's time of each; units without a genuine one are left out.
    `strange`: gets those under whose key something else lies."""
    heartbeats = {}
    for name, key in keys.items():
        role = learner_signer(name) if kind is LearnerHeartbeat else LOG
        there, stat = found[key]
        data = genuine(keyring, role, key, there)
        strange |= {name} if there is not None and data is None else set()
        if data is not None and stat is not None:
            with suppress(RecordError):
                heartbeats[name] = decode(kind, data, key), stat.modified_s
    return heartbeats


def _heard(heartbeats: Mapping[str, tuple[Heartbeat, float]], now_s: float) -> dict[str, Heard[Heartbeat]]:
    return {
        name: Heard(heartbeat, max(0.0, now_s - modified_s)) for name, (heartbeat, modified_s) in heartbeats.items()
    }
