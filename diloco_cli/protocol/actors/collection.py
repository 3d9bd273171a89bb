"""Garbage collection: deletes objects that only commits before a floor need, once the floor is in the log.

The syncer alone collects, and only behind a committed `gc_floor`, so every process can know which objects may be gone.
A floor is the number of a snapshot; from there on every commit can be replayed and rolled back to. Behind it

    kept for ever   commits, epochs, incarnations, offers, requests: they are small, and a number that was deleted could
                    be taken a second time by a writer that was held up
    kept            each fragment's state as of the floor, its weights that a delta may still be based on then, deltas
                    of offers without an outcome, each learner's newest saved moments
    deleted         older states, weights, deltas with an outcome, moments, snapshots; versions that a syncer of an
                    earlier epoch wrote and no commit names; and all but each unit's newest batches of events

The work is done in batches of requests while the syncer waits, and begins after a grace period for readers.

`Housekeeper`: the commits that a syncer makes without a request, beside merging: quarantines and floors.
"""

from __future__ import annotations

from collections import deque

from diloco_cli.protocol.log.commit_log import state_after
from diloco_cli.protocol.log.commits import CollectionFloor, Commit, Quarantine
from diloco_cli.protocol.log.faults import faults_for_quarantine, quarantine_reason
from diloco_cli.protocol.log.keys import (
    read_delta_key,
    read_event_key,
    read_inner_key,
    read_snapshot_key,
    read_version_key,
)
from diloco_cli.protocol.log.operations import Delete, List, Now, Sleep, Steps
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.snapshots import SNAPSHOT_EVERY, snapshot_at, snapshots_between
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.together import MAX_AT_ONCE, together
from diloco_cli.protocol.rules.divergence import needed_from

KINDS = ("delta", "weights", "state", "inner", "snapshot", "event")
PAGE = 256  # keys of one listing
BATCH = MAX_AT_ONCE - 1  # deletions at a time, beside one listing
MAX_UNSOUND = 64  # snapshots passed over for one floor
KEPT_MOMENTS = 4  # of each learner, the newest
KEPT_BATCHES = 64  # of events of each unit, the newest


def kept_commits(run: RunFormat) -> int | None:
    """How many of the newest commits stay replayable by the run's settings; None: all."""
    rounds = run.settings.retention.rounds
    return None if rounds == "all" else rounds * run.num_fragments


def next_floor(state: RunState, snapshots: tuple[int, ...], kept: int, needed: int | None) -> int | None:
    """The newest snapshot with at least `kept` commits between it and the head, but never the newest of all, because
    that may be damaged, and none beyond the commit that is `needed`. None if no such snapshot lies beyond the floor."""
    last = state.n - kept if needed is None else min(state.n - kept, needed)
    fitting = [n for n in snapshots[:-1] if state.gc_floor < n <= last]
    return max(fitting, default=None)


def floor_in_turn(run: RunFormat, state: RunState) -> Steps[int | None]:
    """The floor that is due by the run's settings, None if none is. It moves by at least a quarter of what is kept."""
    kept = kept_commits(run)
    if kept is None or state.n - kept - state.gc_floor < max(SNAPSHOT_EVERY, kept // 4):
        return None
    snapshots = yield from snapshots_between(state.gc_floor + 1, state.n)
    return (yield from _sound_floor(run, state, snapshots, kept))


def _sound_floor(run: RunFormat, state: RunState, snapshots: tuple[int, ...], kept: int) -> Steps[int | None]:
    """The next floor by its snapshot, which must be sound, and so must the newest one: whoever writes into the bucket
    can put an object in a snapshot's place. Passes over MAX_UNSOUND at most."""
    for _ in range(MAX_UNSOUND):
        floor = next_floor(state, snapshots, kept, needed_from(state, run))
        if floor is None:
            break
        checked = floor, snapshots[-1]
        sound = []
        for n in checked:
            sound += [] if (yield from snapshot_at(run, n)) is None else [n]
        if len(sound) == len(checked):
            return floor
        snapshots = tuple(n for n in snapshots if n in sound or n not in checked)
    return None


def floor_by_request(run: RunFormat, state: RunState) -> Steps[int | str]:
    """The highest possible floor, or the reason why there is none."""
    snapshots = yield from snapshots_between(state.gc_floor + 1, state.n)
    needed = needed_from(state, run)
    floor = yield from _sound_floor(run, state, snapshots, 0)
    if floor is None and needed is not None and next_floor(state, snapshots, 0, None) is not None:
        return f"nothing to collect: commit {needed}, the last one that evaluated well, is kept to go back to"
    if floor is None:
        return f"nothing to collect: the second newest snapshot is not beyond commit {state.gc_floor}"
    return floor


def is_garbage(key: str, floor: RunState, epoch: int) -> bool:
    """Whether a delta, weights, state or snapshot may be deleted: `floor` is the state after the floor's commit,
    `epoch` the log's newest. An object whose key does not parse stays."""
    kind = key.partition("/")[0]
    if kind == "delta":
        delta = read_delta_key(key)
        return delta is not None and _is_settled(floor, *delta)
    if kind == "snapshot":
        n = read_snapshot_key(key)
        return n is not None and n < floor.n
    version = read_version_key(key)
    return version is not None and _is_left_behind(floor, epoch, *version, weights=kind == "weights")


def _is_settled(floor: RunState, learner: str, incarnation: int, seq: int) -> bool:
    known = floor.learner(learner)
    return incarnation < known.floor or (incarnation == known.floor and known.has_outcome(seq))


def _is_left_behind(
    floor: RunState, epoch: int, fragment: int, version: int, of_epoch: int, named: str, *, weights: bool
) -> bool:
    if version > floor.n or not 0 <= fragment < len(floor.outputs):
        return False
    current = floor.outputs[fragment]
    wanted = [current, *(o for o in floor.history if weights and o.fragment == fragment)]
    if (version, of_epoch, named) in {
        (o.version, o.epoch, o.weights_digest if weights else o.state_digest) for o in wanted
    }:
        return False
    return version < current.version or of_epoch < epoch  # the present syncer may still read its own version back


class Sweep:
    """One walk over the listings. `doomed`: keys found and not deleted yet; `deleted`: how many are deleted."""

    def __init__(self, floor: RunState) -> None:
        self.floor = floor
        self.kinds = deque(KINDS)
        self.after = ""
        self.doomed: deque[str] = deque()
        self.deleted = 0
        self._moments: deque[str] = deque()
        self._unit, self._batches = "", 0

    @property
    def is_done(self) -> bool:
        return not self.kinds and not self.doomed

    def step(self, epoch: int) -> Steps[None]:
        """One batch of deletions, and beside it one more page while less than a page waits."""
        batch = [self.doomed.popleft() for _ in range(min(BATCH, len(self.doomed)))]
        looks = [self.look(epoch)] if self.kinds and len(self.doomed) < PAGE else []
        yield from together([*map(_delete, batch), *looks])
        self.deleted += len(batch)

    def look(self, epoch: int) -> Steps[None]:
        """One more page."""
        keys: list[str] = yield List(f"{self.kinds[0]}/", self.after, PAGE)
        if not keys:
            self.kinds.popleft()
            self.after = ""
            return
        self.after = keys[-1]
        if self.kinds[0] == "inner":
            self.doomed.extend(self._older_moments(keys))
        elif self.kinds[0] == "event":
            self.doomed.extend(self._older_events(keys))
        else:
            self.doomed.extend(key for key in keys if is_garbage(key, self.floor, epoch))

    def _older_moments(self, keys: list[str]) -> list[str]:
        """Keys come sorted by learner, incarnation and step: all but each learner's last KEPT_MOMENTS are old."""
        older = []
        for key in keys:
            read = read_inner_key(key)
            if read is None:
                continue
            if self._moments and _learner(self._moments[0]) != read[0]:
                self._moments.clear()
            self._moments.append(key)
            if len(self._moments) > KEPT_MOMENTS:
                older.append(self._moments.popleft())
        return older

    def _older_events(self, keys: list[str]) -> list[str]:
        """Keys come sorted by unit, the newest of it first: all but the first KEPT_BATCHES of each are old."""
        older = []
        for key in keys:
            read = read_event_key(key)
            if read is None:
                continue
            self._batches = 1 if read[0] != self._unit else self._batches + 1
            self._unit = read[0]
            if self._batches > KEPT_BATCHES:
                older.append(key)
        return older


def _delete(key: str) -> Steps[None]:
    yield Delete(key)


def _learner(key: str) -> str:
    return key.split("/")[1]


class Collector:
    """Deletes behind the log's floor. If its process dies, the next one begins the work anew."""

    def __init__(self, run: RunFormat) -> None:
        self.run = run
        self.floor = 0
        self.starts_s = 0.0
        self.sweep: Sweep | None = None
        self.deleted = 0

    def look(self, state: RunState, now_s: float) -> None:
        """Take note of the log's floor; the readers' grace begins now. A sweep that has begun is finished first, so
        that floors which follow each other fast cannot keep it from its end."""
        begun = self.floor > 0 and not (self.sweep is not None and self.sweep.is_done)
        if state.gc_floor > self.floor and not begun:
            self.floor, self.sweep = state.gc_floor, None
            self.starts_s = now_s + self.run.settings.retention.grace_s

    def is_done(self, state: RunState) -> bool:
        return state.gc_floor == self.floor and (self.floor == 0 or (self.sweep is not None and self.sweep.is_done))

    def work(self, state: RunState, now_s: float, budget_s: float) -> Steps[bool]:
        """Make batches of requests, at least one, until `budget_s` is used up. False if there is nothing to do now."""
        if self.is_done(state) or now_s < self.starts_s:
            return False
        if self.sweep is None:
            self.sweep = Sweep((yield from state_after(self.run, self.floor, state.revoked)))
        while not self.sweep.is_done:
            before = self.sweep.deleted
            yield from self.sweep.step(state.epoch)
            self.deleted += self.sweep.deleted - before
            if (yield Now()) - now_s >= budget_s:
                break
        return True


def survey(run: RunFormat, state: RunState, floor: int) -> Steps[dict[str, list[str]]]:
    """Keys by kind that a floor would allow to delete, as far as a listing shows. Changes nothing."""
    sweep = Sweep((yield from state_after(run, floor, state.revoked)))
    while sweep.kinds:
        yield from sweep.look(state.epoch)
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for key in sweep.doomed:
        found[key.partition("/")[0]].append(key)
    return found


def collected(floor: int, why: str) -> Commit:
    return CollectionFloor(floor=floor, reason=f"what only commits before {floor} need goes ({why})")


class Housekeeper:
    """The housekeeping of one syncer process. It keeps nothing that the log does not have."""

    def __init__(self, run: RunFormat) -> None:
        self.run = run
        self.collector = Collector(run)
        self._next_floor_n = 0

    def due(self, state: RunState) -> Steps[Commit | None]:
        """The commit that is due now, if any."""
        name = to_quarantine(state, self.run)
        if name is not None:
            return Quarantine(learner=name, reason=quarantine_reason(state.learner(name).faults))
        if state.n < self._next_floor_n:
            return None
        self._next_floor_n = state.n + SNAPSHOT_EVERY
        floor = yield from floor_in_turn(self.run, state)
        return None if floor is None else collected(floor, "in turn")

    def rest(self, state: RunState, seconds: float) -> Steps[None]:
        """Pass `seconds` between two turns, collecting while there is garbage. A merge waits for one batch of the
        collection at most; a syncer that never rests makes one such batch a turn."""
        if self.collector.is_done(state):
            if seconds > 0:
                yield Sleep(seconds)
            return
        now_s: float = yield Now()
        self.collector.look(state, now_s)
        yield from self.collector.work(state, now_s, seconds)
        left_s = now_s + seconds - (yield Now()) if seconds > 0 else 0.0
        if left_s > 0:
            yield Sleep(left_s)


def to_quarantine(state: RunState, run: RunFormat) -> str | None:
    """The first learner by name that is due for quarantine; None if there is none, and also where fewer learners would
    be left than the quorum needs: its bad offers are refused in any case, and the run must not stop for them."""
    enough = faults_for_quarantine(run.num_fragments)
    if all(known.faults < enough for known in state.learners.values()):
        return None
    trusted = trusted_learners(state, run)
    if len(trusted) <= run.settings.sync.quorum:
        return None
    return next((name for name in trusted if state.learner(name).faults >= enough), None)


def trusted_learners(state: RunState, run: RunFormat) -> list[str]:
    """All learners of the run that are not quarantined, sorted."""
    names = {island.name for island in state.with_members(run).all_islands}
    return [name for name in sorted(names) if state.learner(name).quarantined is None]
