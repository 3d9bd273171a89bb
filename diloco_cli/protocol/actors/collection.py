"""Garbage collection: deletes objects that only commits before a floor need, once the floor is in the log. What is kept
behind it, and why, says ARCHITECTURE.md ("Garbage"). The syncer alone collects, and only behind a committed `gc_floor`,
so every process can know which objects may be gone. The work is done in batches of requests while the syncer waits, and
begins after a grace period for readers. Commits, epochs, incarnations and requests stay for ever: a number that was
deleted could be taken a second time by a writer that was held up.

`Housekeeper`: the commits that a syncer makes without a request, beside merging: quarantines and floors.
`Backlog`: how much garbage waits to be deleted, and whether it becomes more: for people, in the syncer's heartbeat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import fmean

from diloco_cli.errors import DataCheckError, NotFoundError
from diloco_cli.protocol.log.commit_log import LOOK_BACK, snapshot_at, snapshots_between, state_after, trusting_none_of
from diloco_cli.protocol.log.commits import CollectionFloor, Commit, Quarantine
from diloco_cli.protocol.log.heartbeats import GarbageHeartbeat
from diloco_cli.protocol.log.keys import (
    key_of,
    read_delta_key,
    read_event_key,
    read_inner_key,
    read_offer_key,
    read_snapshot_key,
    read_version_key,
)
from diloco_cli.protocol.log.operations import MAX_AT_ONCE, Delete, List, Now, Sleep, Steps, Undeleted, together
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.divergence import needed_from
from diloco_cli.protocol.rules.merging import due_for_quarantine

SAMPLE_EVERY_S = 30.0
SAMPLES = 20  # the trend is that of the last ten minutes
HOUR_S = 3600.0
NOT_KNOWN = -1  # commits, before the first sweep of a process has ended


class Backlog:
    """What a collector has not deleted yet, behind floors whose grace is over. Nobody lists a bucket for this: how many
    objects a commit leaves behind is known from the last sweep."""

    def __init__(self) -> None:
        self.swept: int | None = None
        self._each = 0.0
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES)

    def swept_to(self, floor: int, deleted: int) -> None:
        """A sweep has ended. The first one of a process may have found what earlier processes left."""
        if self.swept is not None and floor > self.swept:
            self._each = deleted / (floor - self.swept)
        self.swept = floor

    def at(self, floor: int, deleted: int, found: int, now_s: float) -> GarbageHeartbeat:
        """`floor`: the newest one whose grace is over; `deleted` and `found`: objects of the sweep that goes on. Before
        the first one ends nobody knows what earlier processes have left."""
        if self.swept is None:
            return GarbageHeartbeat(found, NOT_KNOWN)
        commits = max(0, floor - self.swept)
        objects = max(found, round(commits * self._each) - deleted)
        if not self._samples or now_s - self._samples[-1][0] >= SAMPLE_EVERY_S:
            self._samples.append((now_s, objects))
        return GarbageHeartbeat(objects, commits, self._per_h())

    def _per_h(self) -> float:
        """By the means of the older and of the newer half, as a backlog goes up with each floor and down again."""
        half = len(self._samples) // 2
        if half == 0:
            return 0.0
        older, newer = list(self._samples)[:half], list(self._samples)[-half:]
        apart_s = fmean(at_s for at_s, _ in newer) - fmean(at_s for at_s, _ in older)
        return round((fmean(n for _, n in newer) - fmean(n for _, n in older)) / apart_s * HOUR_S, 1)


KINDS = ("delta", "weights", "state", "inner", "snapshot", "event", "offer")  # offers, the smallest and most, last
PAGE = 256  # keys of one listing
BATCH = MAX_AT_ONCE - 1  # deletions at a time, beside one listing
LEAST_ROUNDS = 2  # kept in any case: from a version and the deltas since, a damaged one is made anew
FLOORS_APART = 8  # commits, at least: a floor is a commit itself
KEPT_SNAPSHOTS = 2  # up to the floor: one to fold the floor's state from, one in case it is damaged
IDLE_S, IDLE_SLOTS = 30.0, 3  # without a commit: the longer of these
MAX_UNSOUND = 64  # snapshots passed over for those
KEPT_MOMENTS = 4  # of each key of a learner, the newest
KEPT_BATCHES = 64  # of events of each unit, the newest


def kept_commits(run: RunFormat) -> int | None:
    """How many of the newest commits stay replayable by the run's settings; None: all."""
    rounds = run.settings.retention.rounds
    return None if rounds == "all" else max(LEAST_ROUNDS, rounds) * run.num_fragments


def floor_with(run: RunFormat, state: RunState, kept: int) -> int | None:
    """The floor that leaves `kept` commits, and more if a rollback by the syncer may need an earlier one, or if they
    hold no merge of some fragment. None if it would not rise."""
    needed = needed_from(state, run)
    floor = min(state.n - kept, state.n if needed is None else needed)
    floor = min(floor, remade_from(state)) if floor > state.gc_floor else floor
    return floor if floor > state.gc_floor else None


def remade_from(state: RunState) -> int:
    """The commit up to which each fragment has a version besides its newest: from that one, and the deltas since, the
    newest can be made anew. Commits of other kinds, of restarts or refusals, do not count for this."""
    versions: dict[int, list[int]] = {output.fragment: [output.version] for output in state.outputs}
    for output in state.history:
        versions[output.fragment].append(output.version)
    ordered = [sorted(set(known)) for known in versions.values()]
    return min((known[-2] if len(known) > 1 else known[0] - 1 for known in ordered), default=state.n)


def floor_in_turn(run: RunFormat, state: RunState, idle: bool = False) -> int | None:
    """The floor that is due by the run's settings, None if none is. It moves by at least a quarter of what is kept. In
    an `idle` run, whose learners may find no room for their offers, any move is enough beyond its own commit."""
    kept = kept_commits(run)
    floor = None if kept is None else floor_with(run, state, kept)
    if kept is None or floor is None:
        return None
    least = 2 if idle else max(FLOORS_APART, kept // 4)
    return floor if floor - state.gc_floor >= least else None


def floor_by_request(run: RunFormat, state: RunState, asked: int | None = None) -> int | str:
    """The highest possible floor up to the one that is `asked` for, or the reason why there is none."""
    kept = LEAST_ROUNDS * run.num_fragments
    floor = floor_with(run, state, kept)
    if asked is not None and asked <= state.gc_floor:
        return f"nothing to collect: the floor is at commit {state.gc_floor} already"
    if floor is not None and floor - state.gc_floor >= FLOORS_APART:
        return floor if asked is None else min(floor, asked)
    needed = needed_from(state, run)
    if needed is not None and min(state.n - kept, remade_from(state)) - state.gc_floor >= FLOORS_APART:
        return f"nothing to collect: commit {needed}, the last one that evaluated well, is kept to go back to"
    why = f"the newest {kept} commits are kept, and each fragment's newest two versions"
    return f"nothing to collect: {why}; the floor, {state.gc_floor}, is near them"


def kept_snapshots(run: RunFormat, floor: int, revoked: Collection[str]) -> Steps[int]:
    """The oldest of the KEPT_SNAPSHOTS newest sound ones up to the floor: older ones may go. 0 if there are fewer: who
    writes into the bucket can put an object in a snapshot's place, so those that are no snapshots do not count."""
    numbers = yield from snapshots_between(max(0, floor - LOOK_BACK), floor)
    sound: list[int] = []
    for number in numbers[::-1][:MAX_UNSOUND]:
        if (yield from snapshot_at(trusting_none_of(run, revoked), number)) is not None:
            sound.append(number)
        if len(sound) == KEPT_SNAPSHOTS:
            return number
    return 0


def is_garbage(key: str, floor: RunState, epoch: int, snapshot: int = 0) -> bool:
    """Whether a delta, offer, weights, state or snapshot may be deleted: `floor` is the state after the floor's commit,
    `epoch` the log's newest, `snapshot` the oldest snapshot that is kept. An object whose key does not parse stays."""
    kind = key.partition("/")[0]
    if kind == "delta":
        delta = read_delta_key(key)
        return delta is not None and _is_settled(floor, *delta)
    if kind == "offer":
        offer = read_offer_key(key)
        return offer is not None and _is_passed(floor, *offer)
    if kind == "snapshot":
        n = read_snapshot_key(key)
        return n is not None and n < min(snapshot, floor.n)
    version = read_version_key(key)
    return version is not None and _is_left_behind(floor, epoch, *version, weights=kind == "weights")


def _is_settled(floor: RunState, learner: str, incarnation: int, seq: int) -> bool:
    known = floor.learner(learner)
    return incarnation < known.floor or (incarnation == known.floor and known.has_outcome(seq))


def _is_passed(floor: RunState, learner: str, incarnation: int, seq: int) -> bool:
    """Whether nobody asks for this offer: readers begin at the last one before those without an outcome
    (protocol/actors/joining.py), and from there on every number must be there."""
    known = floor.learner(learner)
    return incarnation < known.floor or (incarnation == known.floor and seq < known.next_seq - 1)


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
    """One walk over the listings behind the floor of this state. `snapshot`: the oldest one that is kept. `doomed`:
    keys found and not deleted yet; `deleted`: how many are deleted."""

    def __init__(self, floor: RunState, snapshot: int = 0) -> None:
        self.floor, self.snapshot = floor, snapshot
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
        """One batch of deletions, and beside it one more page while less than a page waits. Where the store allows none
        of the batch, its kinds are left for this sweep: the others still get their turn."""
        batch = [self.doomed.popleft() for _ in range(min(BATCH, len(self.doomed)))]
        looks = [self.look(epoch)] if self.kinds and len(self.doomed) < PAGE else []
        answers = (yield from together([*map(_delete, batch), *looks]))[: len(batch)]
        self.deleted += answers.count(None)
        if batch and all(answer is Undeleted.REFUSED for answer in answers):
            self._leave({_kind(key) for key in batch})

    def _leave(self, left: Collection[str]) -> None:
        self.doomed = deque(key for key in self.doomed if _kind(key) not in left)
        if self.kinds and self.kinds[0] in left:
            self.after = ""
        self.kinds = deque(kind for kind in self.kinds if kind not in left)

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
            self.doomed.extend(key for key in keys if self.is_garbage(key, epoch))

    def is_garbage(self, key: str, epoch: int) -> bool:
        return is_garbage(key, self.floor, epoch, self.snapshot)

    def _older_moments(self, keys: list[str]) -> list[str]:
        """Keys come sorted by learner, its key, incarnation and step: all but the last KEPT_MOMENTS of each key are
        old."""
        older = []
        for key in keys:
            if read_inner_key(key) is None:
                continue
            if self._moments and _folder(self._moments[0]) != _folder(key):
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


def _delete(key: str) -> Steps[Undeleted | None]:
    answer: Undeleted | None = yield Delete(key)
    return answer


def _kind(key: str) -> str:
    return key.partition("/")[0]


def _folder(key: str) -> tuple[str, int]:
    """The learner and the key below which moments lie."""
    read = read_inner_key(key)
    assert read is not None
    return read[0], key_of(read[1])


class Collector:
    """Deletes behind the log's floor. If its process dies, the next one begins the work anew. `floor`: the one whose
    garbage is deleted, or was deleted last."""

    def __init__(self, run: RunFormat) -> None:
        self.run = run
        self.grace_s = run.settings.retention.grace_s
        self.floor = self.deleted = 0
        self.sweep: Sweep | None = None
        self._put_off = False
        self._backlog = Backlog()
        self._waiting: deque[tuple[int, float]] = deque()  # later floors, and when the grace of each is over

    @property
    def starts_s(self) -> float:
        """When the next floor's work may begin; 0 if none waits."""
        return self._waiting[0][1] if self._waiting else 0.0

    @property
    def _rests(self) -> bool:
        return self.floor == 0 or self._put_off or (self.sweep is not None and self.sweep.is_done)

    def look(self, state: RunState, now_s: float) -> None:
        """Take note of the log's floor; the readers' grace begins now. A sweep that has begun is finished first, so
        that floors which follow each other fast cannot keep it from its end; the next one is of the newest floor whose
        grace is over by then."""
        newest = self._waiting[-1][0] if self._waiting else self.floor
        if state.gc_floor > newest:
            self._waiting.append((state.gc_floor, now_s + self.grace_s))
        while self._waiting and self._waiting[0][1] <= now_s and (self._rests or self.sweep is None):
            self.floor, self.sweep, self._put_off = self._waiting.popleft()[0], None, False

    def is_done(self, state: RunState) -> bool:
        return state.gc_floor == self.floor and self._rests

    def work(self, state: RunState, now_s: float, budget_s: float) -> Steps[bool]:
        """Make batches of requests, at least one, until `budget_s` is used up. False if there is nothing to do now."""
        if self._rests:
            return False
        if self.sweep is None:
            # Snapshots by a key that was revoked since count for nothing: after a million commits it would take half an
            # hour to fold the floor's state from the first one. A later floor lies behind snapshots by the new key.
            far = self.floor > LOOK_BACK and bool(state.revoked)
            self._put_off = far and not (yield from kept_snapshots(self.run, self.floor, state.revoked))
            if self._put_off:
                return False
            try:
                self.sweep = yield from sweep_behind(self.run, self.floor, state.revoked)
            except (NotFoundError, DataCheckError):  # a commit before the floor: a later one lies behind a snapshot
                self._put_off = True
                return False
        while not self.sweep.is_done:
            before = self.sweep.deleted
            yield from self.sweep.step(state.epoch)
            self.deleted += self.sweep.deleted - before
            if (yield Now()) - now_s >= budget_s:
                break
        if self.sweep.is_done:
            self._backlog.swept_to(self.floor, self.sweep.deleted)
        return True

    def backlog(self, now_s: float) -> GarbageHeartbeat:
        """What waits to be deleted now. Asked on any thread, also while another one works."""
        ripe = [floor for floor, ripe_s in list(self._waiting) if ripe_s <= now_s]
        deleted, found = (0, 0) if self.sweep is None else (self.sweep.deleted, len(self.sweep.doomed))
        return self._backlog.at(max([self.floor, *ripe]), deleted, found, now_s)


def sweep_behind(run: RunFormat, floor: int, revoked: Collection[str], kind: type[Sweep] = Sweep) -> Steps[Sweep]:
    snapshot = yield from kept_snapshots(run, floor, revoked)
    return kind((yield from state_after(run, floor, revoked)), snapshot)


def survey(run: RunFormat, state: RunState, floor: int) -> Steps[dict[str, list[str]]]:
    """Keys by kind that a floor would allow to delete, as far as a listing shows. Changes nothing."""
    sweep = yield from sweep_behind(run, floor, state.revoked)
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
        self._grew = (-1, 0.0)  # the head, and since when
        self._slowest_s = max(island.local_steps * island.step_s for island in run.islands) / run.num_fragments

    def due(self, state: RunState, now_s: float, slot_s: float) -> Commit | None:
        """The commit that is due now, if any. `slot_s`: how long the fastest island needs for a slot. It may wait for
        slower ones: the log may stand for some slots of the slowest, as planned, and is not idle."""
        if self._grew[0] != state.n:
            self._grew = (state.n, now_s)
        bad = due_for_quarantine(state, self.run)
        if bad is not None:
            return Quarantine(learner=bad[0], reason=bad[1])
        idle_s = max(IDLE_S, IDLE_SLOTS * max(slot_s, self._slowest_s))
        floor = floor_in_turn(self.run, state, now_s - self._grew[1] >= idle_s)
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
