"""Watches every write of a history as it takes effect, and every belief as it arises; the replayer does the sums.

Invariants that only show while things happen: 1 (each key of the log has had one content, ever), 6 (adoptions), 7 (own
offers), 9 (deletions), 11 (who writes where); and liveness: fates, gaps between commits, operations a round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_cli.digests import digest
from diloco_cli.protocol.collection import KEPT_MOMENTS
from diloco_cli.protocol.keys import STANDBY_BEATS, SYNCER
from diloco_cli.protocol.records import Commit, Output, RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.simulate.histories.bucket import Bucket
from diloco_cli.simulate.histories.replayer import LIVENESS, OfferId, Plain, Replayer, expect

OPERATOR = "operator"
OF_SYNCERS = ("epoch/", "commit/", "state/", "cast/", "snapshot/", "hint/", f"beat/{SYNCER}", STANDBY_BEATS)
OF_OPERATORS = ("request/", "epoch/", "commit/", "state/", "cast/")  # with no syncer alive a command commits itself
OVERWRITTEN = ("hint/", "beat/")
NEVER_DELETED = ("FORMAT.json", "commit/", "epoch/", "incarnation/", "request/")
FATE_ROUNDS = 2  # of merges: fates travel with them, and a skip leaves the offers of its slot to the next merge
FATE_APART_S = 25.0  # of what was carried home: a call of that thread may have been slow since before faults ceased
FATE_S = 4.0  # at the least: a new incarnation is looked for only every second of the syncer's own clock


def prefixes_of(role: str, apart: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Where a role may write. A syncer's process also writes for learners that live `apart`, in their names."""
    if role == SYNCER:
        return OF_SYNCERS + tuple(sorted({prefix for name in apart for prefix in prefixes_of(name)}))
    if role == OPERATOR:
        return OF_OPERATORS
    own = tuple(f"{kind}/{role}/" for kind in ("incarnation", "offer", "delta", "inner"))
    return (*own, f"beat/{role}.json", "request/")


@dataclass
class Monitor:
    """Raises ViolationError as soon as something is wrong. `healthy`: no faults strike any more."""

    bucket: Bucket
    run: RunFormat
    healthy: bool = False
    last_commit_s: float = 0.0
    adopted: int = 0
    deletions: int = 0
    worked: set[str] = field(default_factory=set)
    _apart: frozenset[str] = frozenset()
    _apart_bucket: Bucket | None = None
    _prefixes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _fresh: dict[OfferId, tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replayer = Replayer(self.bucket, self.run)

    def lives_apart(self, learners: set[str], bucket: Bucket) -> None:
        """These publish in a bucket of their region, from where the syncer's process carries it home."""
        self._apart, self._apart_bucket = frozenset(learners), bucket

    # -- writes -------------------------------------------------------------------------------------------------

    def created(self, role: str, key: str, data: bytes, now_s: float) -> None:
        self.check_place(role, key)
        if key.startswith("commit/"):
            expect(key == f"commit/{self.replayer.n + 1:012d}.json", "1", f"{role} created {key} beyond the log's end")
            self._committed(self.replayer.feed(data), now_s)
            self.last_commit_s = now_s
        elif key.startswith("offer/"):
            _, learner, incarnation, name = key.split("/")
            self._fresh[learner, int(incarnation), int(name.partition(".")[0])] = self.replayer.merges, now_s

    def put(self, role: str, key: str) -> None:
        self.check_place(role, key)
        expect(key.startswith(OVERWRITTEN), "1", f"{role} overwrote {key}")

    def deleted(self, role: str, key: str, data: bytes | None, bucket: Bucket | None = None) -> None:
        """9 and 11: only behind a committed floor, and nothing that a reader still needs. `bucket`: not at home."""
        expect(role in (SYNCER, OPERATOR), "11", f"{role} deleted {key}")
        expect(not key.startswith(NEVER_DELETED), "1", f"{role} deleted {key}")
        if data is None:
            return
        self.deletions += 1
        expect(self.replayer.gc_floor > 0, "9", f"{role} deleted {key} before any floor was committed")
        kind, _, rest = key.partition("/")
        if kind in ("state", "cast"):
            self._check_version(kind, int(rest[:4]), int(rest[5:17]), int(rest[18:28]), key)
        elif kind == "delta":
            learner, incarnation, name = rest.split("/")
            fated_n = self.replayer.fated_at.get((learner, int(incarnation), int(name[:10])))
            old = int(incarnation) < self.replayer.floors[learner]
            known = old or (fated_n is not None and fated_n <= self.replayer.gc_floor)
            expect(known, "9", f"{key} was deleted, which has no fate behind the floor {self.replayer.gc_floor}")
        elif kind == "inner":
            enough = _later_moments(key, bucket or self.bucket) >= KEPT_MOMENTS
            expect(enough, "9", f"{key} was deleted, which a restart may ask for")
        elif kind == "snapshot":
            expect(int(rest[:12]) < self.replayer.gc_floor, "9", f"{key} was deleted, which the floor needs")

    def _check_version(self, kind: str, fragment: int, version: int, epoch: int, key: str) -> None:
        """As of the floor, the current version is needed, and casts that a delta may still be based on."""
        floor = self.replayer.gc_floor
        versions = [v.number for v in self.replayer.versions[fragment] if v.number <= floor]
        kept = versions[-(self.run.settings.sync.staleness_rounds + 2) :] if kind == "cast" else versions[-1:]
        if self.replayer.rolled_back_behind(floor):
            kept = [number for number in kept if number >= self.replayer.rolled_back_behind(floor)]
        committed = any(key in (v.state_key, v.cast_key) for v in self.replayer.versions[fragment])
        expect(version <= floor, "9", f"{key} was deleted, which lies beyond the floor {floor}")
        needed = committed and version in kept
        expect(not needed, "9", f"{key} was deleted, which readers of the floor {floor} need")
        orphan_of_now = not committed and epoch >= self.replayer.epoch and version > versions[-1]
        expect(not orphan_of_now, "9", f"{key} was deleted, which this epoch's syncer may be about to commit")

    def check_place(self, role: str, key: str) -> None:
        """11: everybody writes only what is his to write."""
        prefixes = self._prefixes.get(role) or self._prefixes.setdefault(role, prefixes_of(role, self._apart))
        expect(key.startswith(prefixes), "11", f"{role} wrote {key}")

    def _committed(self, commit: Plain, now_s: float) -> None:
        for item in (*commit["inputs"], *commit["fates"]):
            self._fresh.pop((item["learner"], item["incarnation"], item["seq"]), None)
        rounds = FATE_ROUNDS * self.run.num_fragments
        if not self.healthy:
            return
        for (learner, incarnation, seq), (merges, since_s) in self._fresh.items():
            within_s = FATE_APART_S if learner in self._apart else FATE_S
            late = self.replayer.merges - merges > rounds + 1 and now_s - since_s > within_s
            current = incarnation >= self.replayer.floors[learner]
            text = f"offer {incarnation}/{seq} of {learner} has no fate after {self.replayer.merges - merges} merges"
            expect(not (late and current), LIVENESS, text)

    # -- beliefs ------------------------------------------------------------------------------------------------

    def on_adoption(self, learner: str, output: Output, cast: bytes) -> None:
        """6: nobody ever adopts a version that is not in the log."""
        self.adopted += 1
        known = next((v for v in self.replayer.versions[output.fragment] if v.number == output.version), None)
        there = known is not None and known.cast_digest == output.cast_digest == digest(cast)
        expect(there, "6", f"{learner} adopted version {output.version} of {output.fragment}, which is not in the log")

    def on_publication(self, offer_id: OfferId, data: bytes) -> None:
        """7: what a learner believes published is there, in its own words."""
        learner, incarnation, seq = offer_id
        bucket = self._apart_bucket if learner in self._apart else self.bucket
        there = None if bucket is None else bucket.get(f"offer/{learner}/{incarnation:08d}/{seq:010d}.json")
        expect(there == data, "7", f"offer {incarnation}/{seq} of {learner} has other bytes than it published")

    def on_commit(self, state: RunState, commit: Commit) -> None:
        """What a syncer reports as committed is in the log, and its memory is what the log says."""
        data = self.bucket.get(f"commit/{commit.n:012d}.json")
        there = data is not None and digest(data) == state.digest and state.n == commit.n
        expect(there, "6", f"a syncer took commit {commit.n} for its own, and the log has another one")

    def grown_healthy(self, now_s: float) -> None:
        self.healthy, self.last_commit_s = True, now_s
        self._fresh = dict.fromkeys(self._fresh, (self.replayer.merges, now_s))

    def check_gap(self, now_s: float, bound_s: float) -> None:
        gap_s = now_s - self.last_commit_s
        expect(gap_s <= bound_s, LIVENESS, f"no commit for {gap_s:.1f} s without faults, more than {bound_s:.1f} s")


def _later_moments(key: str, bucket: Bucket) -> int:
    """How many newer inner states of the same learner there are. (One that its newest offer names may be gone: the
    learner saved as many since, and published none. Then a restart begins without moments, and warms up.)"""
    learner = key[: key.index("/", len("inner/")) + 1]
    return sum(other > key for other in bucket.objects if other.startswith(learner))


def check_folded(state: RunState, replayer: Replayer, run: RunFormat) -> None:
    """10: what a fresh process folds out of the log is what this log says, by books of another make."""
    own = (replayer.n, replayer.previous, replayer.epoch, replayer.slot, replayer.token_parameters)
    theirs = (state.n, state.digest, state.epoch, state.slot, state.token_parameters)
    expect(theirs == own, "10", f"a restarted process reads {theirs} where the log says {own}")
    for name, known in state.learners.items():
        expect((known.quarantined is not None) == (name in replayer.kept_out), "10", f"{name}: let in, or not")
        expect(known.floor == replayer.floors[name], "10", f"{name}: floor {known.floor}")
        share = replayer.shares.get(name, 0)
        expect(known.token_parameters == share, "10", f"{name}: a share of {known.token_parameters} instead of {share}")
        next_seq = 0
        while (name, known.floor, next_seq) in replayer.fated:
            next_seq += 1
        expect(known.next_seq == next_seq, "10", f"{name}: watermark {known.next_seq} instead of {next_seq}")
        later = {s for who, of, s in replayer.fated if (who, of) == (name, known.floor) and s > next_seq}
        expect(set(known.fated) == later, "10", f"{name}: fates of {set(known.fated)} beyond it instead of {later}")
    ends = {(n, fragment): a.data_end for n, known in state.learners.items() for fragment, a in known.applied.items()}
    expect(ends == dict(replayer.ends), "10", f"applied data ends at {ends} instead of {dict(replayer.ends)}")
