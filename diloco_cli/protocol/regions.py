"""A region with a bucket of its own, beside a syncer: the mirror of the log there and the relay of its offers home.

Mirrors copy the home log into a region's bucket: every commit, and before it the versions that it brings.

    home bucket                            a region's bucket
    FORMAT.json                     ->     FORMAT.json
    weights/..., then commit/<n>    ->     the same bytes under the same keys, in the log's order, create-once
    snapshot/<n>, hint              ->     the same, once every commit up to n is there

The home log is the only authority: a mirror writes only bytes read from home, and snapshots of the home log, and no
process at home waits for a mirror. Where home has lost a commit, the region's copy takes its place. If a key of the
region's bucket already holds other bytes, all work for the region ends, because learners may have acted on them. If a
mirror is far behind, it leaves out versions that are superseded beyond use: a learner that reads such a commit finds no
weights, and reads on.

Learners read no states and no offers or deltas of other learners, so these are not mirrored.

`WeightsWatch` finds weights that can no longer be read in the region's bucket, and tells the syncer. A mirror writes
weights once, because an object that a learner may have read is never overwritten. If they are damaged later, learners
of other regions do not notice; learners of the region go without the version until the next merge of that fragment. If
no merge comes, because the quorum needs these learners, the syncer must publish new versions under new keys
(protocol/actors/syncer.py). So weights that were not superseded for some rounds are read, at growing intervals.

Relays carry what the learners of a region write in its bucket to the home bucket, where the syncer reads it.

    a region's bucket                      home bucket
    incarnation/<learner>/<i>       ->     the same bytes under the same key, create-once
    delta/..., then offer/...       ->     the same, in the order of their numbers
    heartbeat/<learner>             ->     overwritten, when it has changed
    join/<learner>/...              ->     the same bytes under the same key, create-once

So a merge never waits for a region: an offer counts once it is at home, and the home bucket has all that a replay
needs. A relay asks only for learners that FORMAT or a membership commit binds to its region, at the syncer's pace: a
learner's stated pace can neither hide its offers nor cost more requests. `withheld` keeps the syncer from reading an
offer of such a learner at home that was not seen in its region's bucket: another process may have written it. If home
holds other bytes under a learner's key, the relay gives up that mailbox alone, and `unheard` says why; the learner's
next incarnation has keys of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.actors.collection import Collector
from diloco_cli.protocol.actors.inbox import (
    MAX_OFFERS_PER_POLL,
    MAX_PENDING_ROUNDS,
    PolledMailbox,
    kept_mailboxes,
    replaced,
)
from diloco_cli.protocol.actors.joining import fetch_weights
from diloco_cli.protocol.actors.membership import JoinQueue
from diloco_cli.protocol.actors.merging import read_payload
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.claims import ClaimWatch, LearnerKeys
from diloco_cli.protocol.log.commit_log import (
    SNAPSHOT_EVERY,
    HeadHint,
    fold,
    newest_snapshot,
    trusting_none_of,
    write_snapshot,
)
from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES, LearnerHeartbeat
from diloco_cli.protocol.log.keys import (
    FORMAT_KEY,
    HEAD_HINT_KEY,
    commit_key,
    delta_key,
    heartbeat_key,
    incarnation_key,
    incarnation_of,
    key_of,
    number_of,
    offer_key,
    read_snapshot_key,
    snapshot_key,
    weights_key,
)
from diloco_cli.protocol.log.operations import Create, Get, Now, Put, Sleep, Steps, There, there, together
from diloco_cli.protocol.log.records import (
    MAX_RECORD_BYTES,
    FragmentVersion,
    Offer,
    RecordError,
    RunFormat,
    create_signed,
    decode,
    encode,
    read_signed,
)
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.protocol.rules.merging import has_possible_size, is_well_formed
from diloco_cli.protocol.rules.pacing import POLL_BOUNDS_S, pause_s, watch_every_s
from diloco_cli.signing import LOG, MAX_TAIL_BYTES, SignatureError, body_of, learner_signer
from diloco_cli.store.port import Created

ROUNDS = 4  # without a merge; later than the syncer reads those at home
LOOKS = 3  # failed reads in a row: a store that does not show an object for a moment must cause no repair
SOONEST_S, LATEST_S = 5.0, 3600.0

POLL_S = 0.05
COLLECTS_FOR_S = 0.5  # at a time, between two checks for the next commit
MAKES_FOR_S = 5.0  # at a time, while a write waits for room


@dataclass
class _WatchedWeights:
    """A fragment's newest version, when its weights are read next, and how many reads in a row failed."""

    version: int
    due_s: float
    pause_s: float
    failed: int = 0


class WeightsWatch:
    """The weights of one region. `damaged`: a text by fragment, until a version of it can be read."""

    def __init__(self, run: RunFormat, pace: Callable[[], float], suspect: Callable[[FragmentVersion], None]) -> None:
        self.run, self.pace, self.suspect = run, pace, suspect
        self.damaged: dict[int, str] = {}
        self._watched: dict[int, _WatchedWeights] = {}

    def look(self, outputs: Iterable[FragmentVersion], now_s: float) -> Steps[bool]:
        """Read the weights of the first of `outputs` that is due; False if none was."""
        usual_s = max(SOONEST_S, ROUNDS * self.run.num_fragments * self.pace())
        for output in outputs:
            seen = self._watch(output, now_s, usual_s)
            if now_s >= seen.due_s:
                data = yield from there(fetch_weights(self.run, output))
                self._found(output, seen, data is not None)
                seen.pause_s = min(max(usual_s, LATEST_S), 2 * seen.pause_s)
                seen.due_s = now_s + (SOONEST_S if 0 < seen.failed < LOOKS else seen.pause_s)
                return True
        return False

    def _watch(self, output: FragmentVersion, now_s: float, usual_s: float) -> _WatchedWeights:
        """A version that replaces an unreadable one keeps its pause: a bucket that shows no weights costs few reads."""
        seen = self._watched.get(output.fragment)
        if seen is None or seen.version != output.version:
            pause_s = seen.pause_s if seen is not None and seen.failed else usual_s
            seen = self._watched[output.fragment] = _WatchedWeights(output.version, now_s + pause_s, pause_s)
        return seen

    def _found(self, output: FragmentVersion, seen: _WatchedWeights, readable: bool) -> None:
        seen.failed = 0 if readable else seen.failed + 1
        if readable:
            self.damaged.pop(output.fragment, None)
        elif seen.failed >= LOOKS:
            key = weights_key(output.fragment, output.version, output.epoch, output.weights_digest)
            self.damaged[output.fragment] = f"{key} cannot be read in the region's bucket"
            self.suspect(output)


HeadOf = Callable[[], RunState]
"""The home log as the syncer of this process knows it; n = -1 before it has read any."""


class RegionStoppedError(DataCheckError):
    """A region's bucket and the home bucket hold different bytes where they must hold the same."""


def copy_once(key: str, data: bytes) -> Steps[None]:
    """Write home's bytes under the same key in the region's bucket. RegionStoppedError if other bytes are there."""
    answer = yield There(Create(key, data))
    if isinstance(answer, Created) or same(key, answer.data, data):
        return
    again = yield There(Get(key, len(data) + MAX_TAIL_BYTES))  # the bytes in the first answer may have been damaged
    if not same(key, again, data):
        raise stopped(key)


def same(key: str, one: bytes | None, other: bytes | None) -> bool:
    """Whether two buckets hold the same under a key. Snapshots are what the log makes them, whichever syncer wrote and
    signed each: a mirror writes one where home has none yet."""
    if one is None or other is None or read_snapshot_key(key) is None:
        return one == other
    return body_of(one) == body_of(other)


def stopped(key: str) -> RegionStoppedError:
    return RegionStoppedError(
        "the region's bucket holds other bytes than the home bucket",
        where=key,
        hint="find out who wrote them; then delete that object in the region's bucket and start the syncer again",
    )


class Mirror:
    """The mirror of one region in one syncer process. `state`: the log as far as the region has it.

    `leaving`: whether to end as soon as there is nothing left to do; `pace`: how long a slot takes. `suspect` is called
    with a fragment whose newest weights cannot be read in the region's bucket (see the top of this module)."""

    def __init__(
        self,
        run: RunFormat,
        head: HeadOf,
        leaving: Callable[[], bool] = lambda: False,
        pace: Callable[[], float] = lambda: 0.0,
        suspect: Callable[[int], None] = lambda fragment: None,
    ) -> None:
        self.run, self.head, self.leaving = run, head, leaving
        self.weights, self.suspect = WeightsWatch(run, pace, self._suspect), suspect
        self.state = RunState()
        self.collector = Collector(run)
        self.last_snapshot = 0  # none yet: a syncer writes its first one after SNAPSHOT_EVERY commits
        self._newest_at_home = self._hint_asked_at = -1
        self._lost: dict[str, bytes] = {}  # the region's copies of the newest commits, where home has them no more
        self._compares = True  # until the first commit that the region does not have: it has no later ones either

    @property
    def behind(self) -> int:
        """Commits that the region does not have yet."""
        return max(0, self.head().n - self.state.n)

    def serve(self) -> Steps[None]:
        """Mirror until `leaving`, and until there is nothing left to do. Raises RegionStoppedError."""
        self._compares = True
        yield from copy_once(FORMAT_KEY, (yield from self._of_home(FORMAT_KEY)))
        while self.head().n < 0:
            if self.leaving():
                return
            yield Sleep(POLL_S)
        yield from self._find_place()
        while True:
            while self.behind:
                yield from self._mirror_next()
            leaving = self.leaving()
            yield from self._mirror_snapshot(at_once=leaving)
            if leaving and not self.behind:
                return
            yield from self._rest()

    def _find_place(self) -> Steps[None]:
        """Start at the newest snapshot in the region's bucket: every commit before it was there when it was written.
        (Home may have collected its own snapshots, and to read from the first commit takes long in an old run.) The
        snapshot's commit is compared with home's, so is the snapshot if home has it, and every later commit."""
        if self.state.n >= 0:
            return
        head = self.head()
        state = yield from there(newest_snapshot(trusting_none_of(self.run, head.revoked), -1, head.n + 1))
        if state is None:
            return
        theirs = yield from self._there(commit_key(state.n))
        if theirs != (yield from self._of_home(commit_key(state.n), theirs)):
            yield from self._compare_again(commit_key(state.n))
        key = snapshot_key(state.n)
        kept = yield from self._here(key)
        is_ours = kept is not None and self.run.keyring.authenticates(LOG, key, kept)  # else gone, or a stranger's
        if is_ours and not same(key, kept, (yield from self._there(key))):
            yield from self._compare_again(key)
        self.state, self.last_snapshot = state, state.n

    def _compare_again(self, key: str) -> Steps[None]:
        """Bytes that differ once may have been damaged in the read; if they differ twice, the mirror ends."""
        if not same(key, (yield from self._here(key)), (yield from self._there(key))):
            raise stopped(key)

    def _here(self, key: str) -> Steps[bytes | None]:
        return (yield from read_signed(self.run.keyring, LOG, key))

    def _there(self, key: str) -> Steps[bytes | None]:
        return (yield from there(self._here(key)))

    def _mirror_next(self) -> Steps[None]:
        key = commit_key(self.state.n + 1)
        there_already = (yield from self._there(key)) if self._compares else None
        data = yield from self._of_home(key, there_already)
        later = fold(self.run, self.state, data)
        if key not in self._lost:  # it names the one before by its digest: that is home's own
            self._hand_back()
        self._compares = there_already is not None
        if there_already is not None and there_already != data:
            return (yield from self._compare_again(key))
        if there_already is None:
            brought = [output for output in later.outputs if output.version == later.n]  # by the newest commit
            yield from together([self._mirror_weights(output) for output in brought])
            yield from copy_once(key, data)
        self.state = later
        yield from self._mirror_snapshot()

    def _mirror_weights(self, output: FragmentVersion) -> Steps[None]:
        """Copy a version's weights before the commit that names it. Does nothing if no delta can be based on it any
        more, or if it cannot be read at home and has been superseded: learners do without such a version."""
        if output not in self.head().history:
            return
        data = yield from fetch_weights(self.run, output)
        key = weights_key(output.fragment, output.version, output.epoch, output.weights_digest)
        if data is not None:
            yield from copy_once(key, data)
        elif output in self.head().outputs:
            raise DataCheckError("the home bucket does not hold the version that its log names", where=key)

    def _mirror_snapshot(self, at_once: bool = False) -> Steps[None]:
        """Copy home's newest snapshot, so that the region's log opens fast at any age. While that snapshot is ahead of
        the mirror, write earlier ones, so that the next syncer's mirror need not begin anew: home's, or, where home
        has none, the folded log."""
        n = self.state.n
        if n - self.last_snapshot < (1 if at_once else SNAPSHOT_EVERY):
            return
        if self._newest_at_home <= self.last_snapshot and (self._hint_asked_at != n or at_once):
            self._hint_asked_at = n
            self._newest_at_home = _snapshot_of((yield Get(HEAD_HINT_KEY, MAX_RECORD_BYTES)))
        newest = self._newest_at_home
        if newest <= self.last_snapshot or (newest > n and n - self.last_snapshot < SNAPSHOT_EVERY):
            return
        if not (yield from self._copy_snapshot(min(newest, n))):
            yield from there(write_snapshot(self.run, self.state))
            self.last_snapshot = n

    def _copy_snapshot(self, n: int) -> Steps[bool]:
        """Copy the snapshot of commit n; False if home does not have it (any more)."""
        data = yield from self._here(snapshot_key(n))
        authentic = data is not None and self.run.keyring.authenticates(LOG, snapshot_key(n), data)
        if data is None or not authentic or len(data) > MAX_RECORD_BYTES:
            return False
        yield from copy_once(snapshot_key(n), data)
        yield There(Put(HEAD_HINT_KEY, encode(HeadHint(n))))
        self.last_snapshot = n
        return True

    def _rest(self) -> Steps[None]:
        """With nothing to mirror: check the region's weights, and collect garbage in its bucket for a short time, by
        the log as the region has it."""
        now_s: float = yield Now()
        if self.state.phase == RunPhase.RUNNING and not self.leaving():
            yield from self.weights.look(self.state.outputs, now_s)
        if not (yield from self.make_room(COLLECTS_FOR_S)):
            yield Sleep(POLL_S)

    def make_room(self, seconds: float = MAKES_FOR_S) -> Steps[bool]:
        """Collect garbage in the region's bucket; also while a write of this mirror waits for room there. False if
        there is nothing to collect."""
        now_s: float = yield Now()
        self.collector.look(self.state, now_s)
        return (yield from there(self.collector.work(self.state, now_s, seconds)))

    def _suspect(self, output: FragmentVersion) -> None:
        """Tell the syncer, unless the version has been superseded since."""
        if output in self.head().outputs:
            self.suspect(output.fragment)

    def _of_home(self, key: str, copy: bytes | None = None) -> Steps[bytes]:
        """What home holds under this key; if home has lost it, the region's `copy`."""
        data = yield from self._here(key)
        if data is not None and self.run.keyring.authenticates(LOG, key, data):
            self._lost.pop(key, None)
            return data
        if copy is not None:
            if self.run.keyring.authenticates(LOG, key, copy):
                self._lost[key] = copy
            return copy
        if data is None:
            raise DataCheckError("the home bucket has lost what its log holds", where=key)
        raise SignatureError(f"what lies in the home bucket {self.run.keyring.wrong}", where=key)

    def _hand_back(self) -> None:
        """The syncer puts back what it holds (protocol/log/mending.py)."""
        for key, copy in self._lost.items():
            self.run.keep(key, copy)
        self._lost.clear()


def _snapshot_of(hint: bytes | None) -> int:
    if hint is None:
        return -1
    try:
        return decode(HeadHint, hint, HEAD_HINT_KEY).snapshot
    except RecordError:
        return -1


HEARTBEATS_EVERY_S = 3.0
LAST_WORDS_S = 4.0

OTHER_BYTES = "the home bucket holds other bytes than the region's"

PaceOf = Callable[[], float]
"""How long a slot takes, as the syncer of this process measures it."""
Tell = Callable[[str], None]


@dataclass
class Box(PolledMailbox):
    """All offers before `next_seq` are at home, or have their outcome. `compares`: until the first offer that is not at
    home yet, because then home has no later ones either."""

    compares: bool = True


@dataclass
class Relay:
    """The relay of one region in one syncer process. `tell` is called with texts for people; `unheard`: these texts by
    the incarnation whose mailbox was given up; `_opened`: the number up to which mailboxes were opened, by key."""

    run: RunFormat
    region: str
    head: HeadOf
    pace: PaceOf
    leaving: Callable[[], bool] = lambda: False
    tell: Tell = lambda line: None
    boxes: dict[tuple[str, int], Box] = field(default_factory=dict)
    unheard: dict[tuple[str, int], str] = field(default_factory=dict)
    claims: dict[tuple[str, int], ClaimWatch] = field(default_factory=dict)
    offers: int = 0
    _heartbeats: dict[str, bytes] = field(default_factory=dict)
    _opened: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.joins, self.keys = JoinQueue(self.run), LearnerKeys(self.run.keyring)

    def serve(self) -> Steps[None]:
        next_rare_s = next_heartbeats_s = yield Now()
        while not self.leaving():
            if self.head().n < 0:  # the log says where each learner stands
                yield Sleep(POLL_BOUNDS_S[1])
                continue
            now_s: float = yield Now()
            if now_s >= next_rare_s:
                next_rare_s = now_s + watch_every_s(self.pace())
                yield from self._incarnations(now_s)
                yield from self._joins()
            if now_s >= next_heartbeats_s:
                next_heartbeats_s = now_s + HEARTBEATS_EVERY_S
                yield from self._carry_heartbeats()
            if not (yield from self._carry_offers(now_s)):
                yield Sleep(pause_s(self.pace()))
        yield from self._last_words()

    def _last_words(self) -> Steps[None]:
        """Carry the learners' last heartbeats, which they write after the run's end, for LAST_WORDS_S at most."""
        began_s: float = yield Now()
        while (yield Now()) - began_s < LAST_WORDS_S:
            yield from self._carry_heartbeats()
            if all(_has_left(heartbeat) for heartbeat in self._heartbeats.values()):
                return
            yield Sleep(POLL_BOUNDS_S[1])

    def withheld(self, learner: str, incarnation: int, seq: int) -> bool:
        """Whether an offer that lies at home has not been seen in its learner's own bucket (yet)."""
        box = self.boxes.get((learner, incarnation))
        return box is None or seq >= box.next_seq

    def _learners(self, state: RunState) -> list[str]:
        return [island.name for island in state.with_members(self.run).all_islands if island.region == self.region]

    # -- incarnations, heartbeats, requests ----------------------------------------------------------------------------

    def _incarnations(self, now_s: float) -> Steps[None]:
        """Look for new incarnations, and carry home the claims of those whose offers are asked for, and their keys."""
        state = self.head()
        self.keys.keyring = self.run.keyring.without(state.revoked)
        for certificate in (yield from there(self.keys.look())):
            yield Create(*certificate)
        learners = self._learners(state)
        watches = [self._watch(name, key, state) for name in learners for key in self.keys.of(name)]
        beyond = {name: number_of(state.learner(name).floor) for name in learners}
        for watch in watches:
            beyond[watch.learner] = max(beyond[watch.learner], watch.last)  # strangers' objects use numbers up, too
        yield from there(together([watch.look(beyond[watch.learner]) for watch in watches]))
        for watch in watches:
            floor, of = state.learner(watch.learner), (watch.learner, watch.key)
            known, self._opened[of] = self._opened[of], watch.newest
            for incarnation in kept_mailboxes(watch.key, known, watch.newest):
                next_seq = floor.next_seq if incarnation == floor.floor else 0
                box = Box(watch.learner, incarnation, next_seq, now_s)
                yield from self._carry_claim(box)
                self.boxes[box.learner, box.incarnation] = box
        self._retire(state, now_s)

    def _watch(self, learner: str, key: int, state: RunState) -> ClaimWatch:
        if (learner, key) not in self.claims:
            floor = state.learner(learner).floor
            watch = self.claims[learner, key] = ClaimWatch.beside(self.run.keyring, learner, key, floor)
            self._opened[learner, key] = watch.newest - (floor > 0 and key_of(floor) == key)  # the floor's opens, too
        return self.claims[learner, key]

    def _carry_claim(self, box: Box) -> Steps[None]:
        key = incarnation_key(box.learner, box.incarnation)
        claim = yield from there(self._read(box, key))
        if claim is not None and self._is_record(box, key, claim):
            yield from self._carry_record(box, key, claim)

    def claimed(self, learner: str) -> tuple[int, ...]:
        """The newest incarnation of a learner under each of its keys that was seen in its own bucket."""
        state, found = self.head(), list(self.claims.items())  # the syncer's thread asks
        newest = (incarnation_of(watch.newest, key) for (name, key), watch in found if name == learner and watch.newest)
        return tuple(incarnation for incarnation in newest if state.counts(incarnation))

    def _retire(self, state: RunState, now_s: float) -> None:
        """Give up the mailboxes of incarnations that are replaced, settled, or under a revoked key."""
        for learner in {name for name, _ in self.boxes}:
            boxes = [box for box in self.boxes.values() if box.learner == learner]
            newest, floor = max(boxes, key=lambda box: box.incarnation), state.learner(learner).floor
            gone = {box.incarnation for box in boxes if box.incarnation < floor or not state.counts(box.incarnation)}
            left = [(learner, box.incarnation) for box in boxes if box is not newest and box.incarnation not in gone]
            for key in {(learner, incarnation) for incarnation in gone} | set(replaced(left, newest, now_s)):
                del self.boxes[key]
                self.unheard.pop(key, None)

    def _carry_heartbeats(self) -> Steps[None]:
        """Copy heartbeats unchecked: they are hints, and readers at home check them."""
        yield from together([self._carry_heartbeat(name) for name in self._learners(self.head())])

    def _carry_heartbeat(self, name: str) -> Steps[None]:
        heartbeat = yield There(Get(heartbeat_key(name), MAX_HEARTBEAT_BYTES))
        if heartbeat is None or len(heartbeat) > MAX_HEARTBEAT_BYTES or heartbeat == self._heartbeats.get(name):
            return
        yield Put(heartbeat_key(name), heartbeat)
        self._heartbeats[name] = heartbeat

    def _joins(self) -> Steps[None]:
        """Carry requests to join this region. Home reads them as if they had been written there."""
        for found in (yield from there(self.joins.look(self.head()))):
            if found.island.region == self.region:
                yield Create(found.key, found.data)

    # -- offers ---------------------------------------------------------------------------------------------------

    def _carry_offers(self, now_s: float) -> Steps[bool]:
        """Carry new offers of the mailboxes that are due; True if there were any."""
        due = [
            box for key, box in sorted(self.boxes.items()) if key not in self.unheard and now_s >= box.next_request_s
        ]
        return any((yield from together([self._carry_portion(box, now_s) for box in due])))

    def _carry_portion(self, box: Box, now_s: float) -> Steps[bool]:
        found_any = False
        for _ in range(MAX_OFFERS_PER_POLL):
            if not (yield from self._carry_offer(box, now_s)):
                break
            box.found_s, found_any = now_s, True
        box.asked(now_s, self.pace())
        return found_any

    def _carry_offer(self, box: Box, now_s: float) -> Steps[bool]:
        known = self.head().learner(box.learner)
        settled = known.next_seq if box.incarnation == known.floor else 0
        box.next_seq = max(box.next_seq, settled)
        if box.next_seq - settled >= MAX_PENDING_ROUNDS * self.run.num_fragments:
            return False  # a flood must not fill the home bucket
        key = offer_key(box.learner, box.incarnation, box.next_seq)
        found = yield from there(box.look(self.run.keyring))
        if found.damaged:
            yield from self._carry_damaged(key)
        elif found.data is None or not (yield from self._carry_sound(box, key, found.data)):
            return False
        box.next_seq += 1
        self.offers += 1
        return True

    def _carry_sound(self, box: Box, key: str, data: bytes) -> Steps[bool]:
        """Carry a genuine offer home, unless it is there; False if that failed."""
        if not self._is_record(box, key, data):
            return False
        at_home = (yield from self._read(box, key)) if box.compares else None
        box.compares = at_home is not None
        if at_home is None:
            return (yield from self._carry_payload(box, data, key)) and (yield from self._carry_record(box, key, data))
        return at_home == data or (yield from self._agree_on_record(box, key))

    def _read(self, box: Box, key: str) -> Steps[bytes | None]:
        signer = learner_signer(box.learner)
        data = yield from read_signed(self.run.keyring, signer, key)
        return data if data is not None and self.run.keyring.authenticates(signer, key, data) else None

    def _carry_damaged(self, key: str) -> Steps[None]:
        """Only at home can such an offer get its outcome."""
        data = yield There(Get(key, MAX_RECORD_BYTES))
        if data is not None:
            yield Create(key, data)

    def _carry_payload(self, box: Box, data: bytes, key: str) -> Steps[bool]:
        """Carry an offer's payload if the offer is well formed; the syncer refuses any other. False if home has other
        bytes under the payload's key, or if the offer must be read again."""
        try:
            offer = decode(Offer, data, key)
        except RecordError:  # the offer is bad, or the read damaged it, and then it must not be carried home
            return bool(data == (yield There(Get(key, MAX_RECORD_BYTES))))
        if offer.id != (box.learner, box.incarnation, box.next_seq) or not is_well_formed(offer):
            return True
        if not has_possible_size(offer, self.run):
            return True
        if offer.payload_bytes == 0:
            return True
        payload = yield from there(read_payload(offer))
        if not isinstance(payload, bytes):
            return True
        return (yield from self._carry(box, delta_key(*offer.id, offer.payload_digest), payload))

    def _carry_record(self, box: Box, key: str, data: bytes) -> Steps[bool]:
        """Write a claim or an offer at home; False if home holds another one of its learner."""
        at_home = yield from create_signed(self.run.keyring, learner_signer(box.learner), key, data)
        return at_home == data or (yield from self._agree_on_record(box, key))

    def _agree_on_record(self, box: Box, key: str) -> Steps[bool]:
        same = (yield from self._read(box, key)) == (yield from there(self._read(box, key)))
        return same or self._give_up(box, f"{key}: {OTHER_BYTES}")

    def _carry(self, box: Box, key: str, data: bytes) -> Steps[bool]:
        """Write the bytes at home; False if home holds other bytes under the key."""
        answer = yield Create(key, data)
        if isinstance(answer, Created) or answer.data == data:
            return True
        return (yield from self._agree(box, key, len(data)))

    def _agree(self, box: Box, key: str, max_bytes: int) -> Steps[bool]:
        """Bytes that differ once may have been damaged in the read; if they differ twice, a person must look."""
        same = (yield Get(key, max_bytes)) == (yield There(Get(key, max_bytes)))
        return same or self._give_up(box, f"{key}: {OTHER_BYTES}")

    def _is_record(self, box: Box, key: str, data: bytes) -> bool:
        return len(data) <= MAX_RECORD_BYTES or self._give_up(box, f"{key}: it is larger than any record")

    def _give_up(self, box: Box, why: str) -> bool:
        """Stop carrying this mailbox's offers and tell why: only a person can find the cause."""
        text = f"{why}; find out who wrote it, then start {box.learner} again: its next incarnation has keys of its own"
        self.unheard[box.learner, box.incarnation] = text
        self.tell(f"{box.learner} is not heard: {text}")
        return False


def _has_left(heartbeat: bytes) -> bool:
    try:
        return decode(LearnerHeartbeat, heartbeat, "heartbeat").state in ("DONE", "FAILED")
    except RecordError:
        return True  # nothing to wait for


TRIES_AGAIN_S = 5.0  # after an error that a repeated call does not end: no such bucket, a version lost at home


@dataclass(frozen=True)
class Home:
    """The syncer as mirror and relay see it: the log's head, and how long a slot takes. `suspect` is called with a
    fragment whose newest weights can no longer be read in a region's bucket."""

    head: HeadOf
    pace: PaceOf = lambda: 0.0
    suspect: Callable[[int], None] = lambda fragment: None


def home_of(syncer: Syncer) -> Home:
    return Home(lambda: syncer.state, lambda: syncer.pace.slot_s, syncer.repairer.suspect)


class RegionLink:
    """The mirror and the relay of one region, for as long as one syncer serves."""

    def __init__(
        self,
        run: RunFormat,
        region: str,
        home: Home,
        leaving: Callable[[], bool],
        tell: Tell,
        mirror: type[Mirror] = Mirror,
        relay: type[Relay] = Relay,
    ) -> None:
        self.mirror = mirror(run, home.head, leaving, home.pace, home.suspect)
        self.relay = relay(run, region, home.head, home.pace, leaving, tell)

    def works(self) -> dict[str, Callable[[], Steps[None]]]:
        """The work of mirror and relay, done side by side. The caller restarts one that fails after TRIES_AGAIN_S."""
        return {"mirror": self.mirror.serve, "relay": self.relay.serve}


def read_after_relays(syncer: Syncer, links: Mapping[str, RegionLink]) -> None:
    """Keep the syncer from reading a region's learner's offer before the relay has seen it in the region's bucket, and
    let it know which incarnations the relay has seen there."""

    def relay_of(learner: str) -> Relay | None:
        island = syncer.state.with_members(syncer.run).island(learner)
        link = None if island is None else links.get(island.region)
        return None if link is None else link.relay

    def withheld(learner: str, incarnation: int, seq: int) -> bool:
        relay = relay_of(learner)
        return relay is not None and relay.withheld(learner, incarnation, seq)

    def claimed(learner: str) -> tuple[int, ...]:
        relay = relay_of(learner)
        return () if relay is None else relay.claimed(learner)

    syncer.inbox.withheld, syncer.inbox.claimed = withheld, claimed
