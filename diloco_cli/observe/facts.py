"""The facts about a run: what its bucket says, within a time limit, and what this machine knows of its own units.

The bucket shows only that a unit falls silent. The processes, their supervisor's decisions and the disk of this machine
show why.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from diloco_cli.clock import monotonic_s, wall_s
from diloco_cli.events.bucket import EventReader, merged
from diloco_cli.events.event import Event, events_of
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES, LearnerHeartbeat, SyncerHeartbeat, genuine
from diloco_cli.protocol.log.keys import FORMAT_KEY, STANDBY_HEARTBEATS, SYNCER, commit_key, heartbeat_key
from diloco_cli.protocol.log.records import RecordError, RunFormat, decode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.quantities import format_duration, format_size, parse_time
from diloco_cli.runtime.daemon import Clock, perform
from diloco_cli.runtime.registry import (
    SUPERVISOR,
    Supervised,
    UnitRecord,
    last_store_word,
    noted_at,
    read_run,
    read_supervised,
    read_unit,
    run_directory,
)
from diloco_cli.runtime.units import UnitState
from diloco_cli.signing import LOG, Authenticator, learner_signer
from diloco_cli.store.open import answers
from diloco_cli.store.port import ObjectStat, Store, StoreUnavailableError
from diloco_cli.store.retry import LINE_EVERY_S
from diloco_cli.store.url import parse_url

if TYPE_CHECKING:
    from diloco_cli.chaos.actions import JournalEntry
    from diloco_cli.chaos.faults import Target

TOLERATED_SKEW_S = 5.0
STAMP_S = 1.0  # to which stores round the time of a change
LOOKS_KEPT = 5  # of which the largest bound counts: a clock that is slewed back is believed again after them
LOG_S = 3.0  # of a look: what is left is for the heartbeats
MAX_STANDBYS = 64
ANSWERS = "answers again"
STARTS_WITHIN_S = 60.0  # processes start, and load what they need, beside the time of the first slot
TOLD_AGAIN_S = 3 * LINE_EVERY_S  # a call that goes on failing is told again before
BYTES_A_MERGE = 8  # for each parameter of a fragment: its state, and the weights
UNKNOWN = datetime.fromtimestamp(0, UTC)
NOTHING_SAID = Supervised("", 0, "")
T = TypeVar("T")
Heartbeat = TypeVar("Heartbeat", LearnerHeartbeat, SyncerHeartbeat)
Found = Mapping[str, tuple[bytes | None, ObjectStat | None]]
"""What lies under each key."""


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
    far it is ahead of this machine's clock (below 0: behind), None if that is not notable. `commit_age_s`: of the
    newest commit, by the store's own time of its object; None: it was not asked. `written`: the events that processes
    wrote. `strange`: learners under whose heartbeat's key something lies that they have not signed. Of a slow store:
    `cut`: the log may go on behind `state`; `unread`: units whose heartbeats were not read in time."""

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
    cut: bool = False
    unread: frozenset[str] = frozenset()

    @property
    def partial(self) -> str:
        """What a slow store did not show in time, in words; "" if nothing is missing."""
        said = []
        if self.cut:
            ago = format_duration(self.seconds_since(self.state.metrics.updated_at))
            said.append(f"the log was read to commit {self.state.n} of {ago} ago")
        if self.unread:
            said.append(f"no heartbeat was read of {', '.join(sorted(self.unread))}")
        return f"the store is slow, this is a part: {'; '.join(said)}" if said else ""

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


@dataclass
class StoreClock:
    """The store's clock, by the looks of one process. No object changed later than now, so a slow clock of this machine
    is corrected at once. A fast one looks like silence of the units, until a second look finds an object that changed
    since the first: it cannot be older than the time between them. `_ahead_s`: at least so far is this machine's clock
    ahead, by the last looks."""

    _seen: Mapping[str, float] = field(default_factory=dict)
    _began: tuple[float, float] = (0.0, 0.0)
    _ahead_s: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS_KEPT))

    def now_s(self, wall_s: float, steady_s: float, began: tuple[float, float], seen: Mapping[str, float]) -> float:
        """The store's time now. `wall_s`, `steady_s`: this machine's clock, and one that nobody sets; `began`: both at
        the beginning of this look; `seen`: when each object changed."""
        passed_s, before = wall_s - self._began[0], self._seen
        if abs(passed_s - (steady_s - self._began[1])) > TOLERATED_SKEW_S:  # it was set, or the machine slept
            self._ahead_s.clear()
        elif news := [modified_s for key, modified_s in seen.items() if modified_s > before.get(key, inf)]:
            self._ahead_s.append(wall_s - passed_s - max(news) - STAMP_S)
        self._seen, self._began = seen, began
        ahead_s = max(self._ahead_s, default=0.0)
        ahead_s = ahead_s if ahead_s > TOLERATED_SKEW_S else 0.0
        return max(wall_s - ahead_s, max(seen.values(), default=-inf))


def read_facts(
    url: str,
    run: RunFormat,
    store: Store,
    clock: Clock,
    known: RunState | None = None,
    reader: EventReader | None = None,
    most_batches: int | None = None,
    store_clock: StoreClock | None = None,
) -> RunFacts:
    """`known`: an earlier state, so that only the newer commits are read; `reader`: likewise for events, of which it
    reads `most_batches` more; `store_clock`: knows the looks before."""
    began_s, began = clock.now_s(), (wall_s(), monotonic_s())
    state = perform(read_log(run, known, LOG_S), store, clock)
    cut = clock.now_s() - began_s >= LOG_S
    keyring = run.keyring.without(state.revoked)
    learners = {heartbeat_key(island.name): island.name for island in state.with_members(run).all_islands}
    # Standbys by name: launched, hosted or started by hand. A listing may lag, so this is for display alone.
    listed = _in_time(lambda: store.list(STANDBY_HEARTBEATS, limit=MAX_STANDBYS)) or []
    standbys = {key: key.removeprefix(STANDBY_HEARTBEATS).removesuffix(".json") for key in listed}
    keys = [*learners, heartbeat_key(SYNCER), *standbys]
    answered = dict(zip(keys, answers(lambda key: _in_time(partial(_read, store, key)), keys), strict=True))
    found: Found = {key: answer or (None, None) for key, answer in answered.items()}
    units = learners | {heartbeat_key(SYNCER): SYNCER}
    newest = _in_time(lambda: store.stat(commit_key(state.n) if state.n >= 0 else FORMAT_KEY))
    stats = {commit_key(state.n): newest, **{key: stat for key, (_, stat) in found.items()}}
    seen = {key: stat.modified_s for key, stat in stats.items() if stat is not None}
    here_s = wall_s()
    now_s = (store_clock or StoreClock()).now_s(here_s, monotonic_s(), began, seen)
    skew_s = now_s - here_s
    heard = _heard(found, keyring, learners, LearnerHeartbeat, now_s)
    return RunFacts(
        url=url,
        run=run,
        state=state,
        learners=heard,
        syncer=_heard(found, keyring, {heartbeat_key(SYNCER): SYNCER}, SyncerHeartbeat, now_s).get(SYNCER),
        now_s=now_s,
        clock_skew_s=skew_s if abs(skew_s) > TOLERATED_SKEW_S else None,
        standbys=_heard(found, keyring, standbys, SyncerHeartbeat, now_s),
        commit_age_s=None if newest is None else max(0.0, now_s - newest.modified_s),
        written=(reader or EventReader()).read(store, most_batches),
        cut=cut,
        unread=frozenset(name for key, name in units.items() if answered[key] is None),
        strange=frozenset(name for key, name in learners.items() if _is_strange(keyring, name, key, found[key][0])),
    )


def _in_time(call: Callable[[], T]) -> T | None:
    """None where the store does not answer in the time of the look."""
    try:
        return call()
    except StoreUnavailableError:
        return None


def _read(store: Store, key: str) -> tuple[bytes | None, ObjectStat | None]:
    return store.get(key, MAX_HEARTBEAT_BYTES), store.stat(key)


def _is_strange(keyring: Authenticator, learner: str, key: str, data: bytes | None) -> bool:
    return data is not None and genuine(keyring, learner_signer(learner), key, data) is None


def _heard(
    found: Found, keyring: Authenticator, names: Mapping[str, str], kind: type[Heartbeat], now_s: float
) -> dict[str, Heard[Heartbeat]]:
    """The genuine heartbeats by unit. `names`: the units by key."""
    heard = {}
    for key, name in names.items():
        data, stat = found[key]
        role = learner_signer(name) if kind is LearnerHeartbeat else LOG
        data = genuine(keyring, role, key, data)
        if data is not None and stat is not None:
            with suppress(RecordError):
                heard[name] = Heard(decode(kind, data, key), max(0.0, now_s - stat.modified_s))
    return heard


@dataclass(frozen=True)
class LocalUnit:
    """`condition`: running, paused, dead. `said`: what its supervisor last decided; `supervised`: that one lives.
    `by_chaos`: an injected fault has ended or paused this process; `running_s`: for so long it has run."""

    kind: str
    pid: int | None
    condition: str
    said: Supervised = NOTHING_SAID
    supervised: bool = False
    by_chaos: bool = False
    running_s: float = 0.0

    @property
    def dead(self) -> bool:
        return self.condition == "dead"

    @property
    def is_held(self) -> bool:
        """Paused or kept down: `diloco chaos revive` takes it back."""
        return self.condition == "paused" or self.said.state == UnitState.HELD

    def restarts(self, heard_s: float | None) -> bool:
        """Its supervisor will start it again, or has done so and it has not been heard since: then its end is past."""
        again = (UnitState.BACKOFF, UnitState.STARTING) if self.dead else (UnitState.RUNNING,)
        unheard = self.dead or heard_s is None or heard_s > self.running_s
        return self.supervised and bool(self.said.last_end) and self.said.state in again and unheard

    def is_new(self, heard_s: float | None) -> bool:
        """It was started lately, and has not been heard since: what was heard is of an earlier process."""
        return self.condition == "running" and heard_s is not None and self.running_s < min(heard_s, STARTS_WITHIN_S)

    @property
    def gave_up(self) -> bool:
        return self.dead and self.said.state == UnitState.FAILED

    def account(self, heard_s: float | None) -> str:
        """What has become of it, in words; "" while it runs. `heard_s`: since its last heartbeat."""
        who = " (chaos)" if self.by_chaos else ""
        if self.condition == "paused":
            return f"its process {self.pid} is paused by a signal{who}"
        if self.restarts(heard_s):
            why = self.said.reason if self.dead else self.said.last_end
            return f"it is being restarted, after {self.said.starts} starts: {why}{who}"
        if self.is_new(heard_s):
            return f"its process {self.pid} was started {format_duration(self.running_s)} ago, and is not heard yet"
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


def read_local(url: str, run: RunFormat) -> Local:
    """Empty where nothing of the run was started on this machine, neither by its URL nor by that of a region."""
    known = noted_at(url)
    if read_run(known) is None:
        return Local()
    from diloco_cli.chaos.actions import overview  # it takes its time to load

    supervised = read_supervised(known)
    units = {
        target.name: _unit(known, target, entry, supervised.get(target.name, NOTHING_SAID))
        for target, entry in overview(known)
        if target.name != SUPERVISOR and target.condition != "unknown"
    }
    if not units:
        return Local()
    living = [unit for unit, known_unit in units.items() if not known_unit.dead]
    largest = max(fragment.num_parameters for fragment in run.layout.fragments)
    return Local(units, full_disk(_folders(known), largest * BYTES_A_MERGE), _store_word(known, living))


def _unit(url: str, target: Target, entry: JournalEntry | None, said: Supervised) -> LocalUnit:
    by_chaos = entry is not None and entry.pid == target.pid and bool(entry.injected) and not entry.healed
    running_s = max(0.0, wall_s() - _started_s(url, target.name))
    return LocalUnit(target.kind, target.pid, target.condition, said, target.supervised, by_chaos, running_s)


def _started_s(url: str, unit: str) -> float:
    record = read_unit(url, unit)
    return record.started_s if isinstance(record, UnitRecord) else 0.0


def _folders(url: str) -> list[Path]:
    parsed = parse_url(url)
    return [run_directory(url), *([Path(parsed.place)] if parsed.scheme == "file" else [])]


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


def _store_word(url: str, living: Sequence[str]) -> str:
    """The newest failing call that a living unit has logged, and that no answer has followed."""
    for unit in living:
        time, text = last_store_word(url, unit)
        since_s = max(_started_s(url, unit), wall_s() - TOLD_AGAIN_S)
        if text and ANSWERS not in text and moment(time).timestamp() >= since_s:
            return f"{unit}: {text}"
    return ""
