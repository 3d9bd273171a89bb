"""Mirrors copy the home log into a region's bucket: every commit, and before it the versions that it brings.

    home bucket                            a region's bucket
    FORMAT.json                     ->     FORMAT.json
    weights/..., then commit/<n>    ->     the same bytes under the same keys, in the log's order, create-once
    snapshot/<n>, its pieces, hint  ->     the same, once every commit up to n is there

The home log is the only authority: a mirror writes only bytes read from home, and snapshots of the home log, and no
process at home waits for a mirror. If a key of the region's bucket already holds other bytes, all work for the region
ends, because learners may have acted on them. If a mirror is far behind, it leaves out versions that are superseded
beyond use: a learner that reads such a commit finds no weights, and reads on.

Learners read no states and no offers or deltas of other learners, so these are not mirrored.

`WeightsWatch` finds weights that can no longer be read in the region's bucket, and tells the syncer. A mirror writes
weights once, because an object that a learner may have read is never overwritten. If they are damaged later, learners
of other regions do not notice; learners of the region go without the version until the next merge of that fragment. If
no merge comes, because the quorum needs these learners, the syncer must publish new versions under new keys
(protocol/actors/repair.py). So weights that were not superseded for some rounds are read, at growing intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.actors.collection import Collector
from diloco_cli.protocol.actors.joining import fetch_weights
from diloco_cli.protocol.actors.merging import READS
from diloco_cli.protocol.log.commit_log import fold, trusting_none_of
from diloco_cli.protocol.log.keys import (
    FORMAT_KEY,
    HEAD_HINT_KEY,
    commit_key,
    read_snapshot_key,
    snapshot_key,
    weights_key,
)
from diloco_cli.protocol.log.operations import Create, Get, Now, Put, Sleep, Steps, There, there, together
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.snapshots import SNAPSHOT_EVERY, HeadHint, newest_snapshot, read_pieces, write_snapshot
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.states import RunPhase
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, RecordError, decode, encode, read_signed
from diloco_cli.signing import LOG, MAX_TAIL_BYTES, SignatureError, body_of
from diloco_cli.store.port import Created

ROUNDS = 4  # without a merge; later than the syncer reads those at home
LOOKS = 3  # failed reads in a row: a store that does not show an object for a moment must cause no repair
SOONEST_S, LATEST_S = 5.0, 3600.0

POLL_S = 0.05
COLLECTS_FOR_S = 0.5  # at a time, between two checks for the next commit
MAKES_FOR_S = 5.0  # at a time, while a write waits for room


def read_weights(run: RunFormat, output: FragmentVersion) -> Steps[bytes | None]:
    """The bytes that the log names, or None after READS reads: a single read may be damaged."""
    for _ in range(READS):
        data = yield from fetch_weights(run, output)
        if data is not None:
            return data
    return None


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
                data = yield from there(read_weights(self.run, output))
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


def _copied(key: str, data: bytes) -> Steps[None]:
    """Write a piece of a snapshot. Other bytes under its key make that snapshot unsound for readers, and no more."""
    yield There(Create(key, data))


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
        self, run: RunFormat, head: HeadOf, leaving: Callable[[], bool] = lambda: False,
        pace: Callable[[], float] = lambda: 0.0, suspect: Callable[[int], None] = lambda fragment: None,
    ) -> None:  # fmt: skip
        self.run, self.head, self.leaving = run, head, leaving
        self.weights, self.suspect = WeightsWatch(run, pace, self._suspect), suspect
        self.state = RunState()
        self.collector = Collector(run)
        self.last_snapshot = 0  # none yet: a syncer writes its first one after SNAPSHOT_EVERY commits
        self._newest_at_home = self._hint_asked_at = -1
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
        ours = yield from self._of_home(commit_key(state.n))
        if ours != (yield from self._there(commit_key(state.n))):
            yield from self._compare_again(commit_key(state.n))
        key = snapshot_key(state.n)
        kept = yield from self._here(key)
        theirs = kept is None or not self.run.keyring.authenticates(LOG, key, kept)  # gone, or what somebody put there
        if not theirs and not same(key, kept, (yield from self._there(key))):
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
        data = yield from self._of_home(key)
        later = fold(self.run, self.state, data)
        there_already = (yield from self._there(key)) if self._compares else None
        self._compares = there_already is not None
        if there_already is not None and there_already != data:
            return (yield from self._compare_again(key))
        if there_already is None:
            yield from together([self._mirror_weights(output) for output in _brought(later)])
            yield from copy_once(key, data)
        self.state = later
        yield from self._mirror_snapshot()

    def _mirror_weights(self, output: FragmentVersion) -> Steps[None]:
        """Copy a version's weights before the commit that names it. Does nothing if no delta can be based on it any
        more, or if it cannot be read at home and has been superseded: learners do without such a version."""
        if output not in self.head().history:
            return
        data = yield from read_weights(self.run, output)
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
        try:
            pieces = yield from read_pieces(n, data)
        except RecordError:
            return False
        yield from together([_copied(*piece) for piece in pieces.items()])
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

    def _of_home(self, key: str) -> Steps[bytes]:
        data = yield from self._here(key)
        if data is None:
            raise DataCheckError("the home bucket has lost what its log holds", where=key)
        if not self.run.keyring.authenticates(LOG, key, data):
            raise SignatureError(f"what lies in the home bucket {self.run.keyring.wrong}", where=key)
        return data


def _brought(state: RunState) -> tuple[FragmentVersion, ...]:
    """The versions that the newest commit brought: a version is the number of its commit."""
    return tuple(output for output in state.outputs if output.version == state.n)


def _snapshot_of(hint: bytes | None) -> int:
    if hint is None:
        return -1
    try:
        return decode(HeadHint, hint, HEAD_HINT_KEY).snapshot
    except RecordError:
        return -1
