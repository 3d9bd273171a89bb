"""Checks every write of a history as it takes effect, and every belief of a process; the replayer does the arithmetic.

Invariants that can only be checked during a history: 1 (each key of the log has one content for ever), 6 (adoptions), 7
(own offers), 9 (deletions), 11 (prefixes of roles); and liveness: outcomes, gaps between commits, operations a round.

`Genuine`: whatever else lies in the bucket, only what processes of the run have written may move the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.collection import KEPT_MOMENTS, KEPT_SNAPSHOTS, LEAST_ROUNDS
from diloco_cli.protocol.actors.inbox import MAX_OLD_MAILBOXES
from diloco_cli.protocol.log.claims import LISTS_EVERY
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import (
    STANDBY_HEARTBEATS,
    SYNCER,
    commit_key,
    fingerprint,
    key_of,
    read_join_key,
    read_snapshot_key,
)
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat, record_digest
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.pacing import WATCH_BOUNDS_S
from diloco_cli.signing import learner_signer
from tests.histories.client import Bucket
from tests.histories.harm import Harm
from tests.histories.moments import MomentsWatch
from tests.histories.poisoner import NormBooks
from tests.histories.processes import MAX_DRIFT
from tests.histories.replayer import (
    BLAME,
    LIVENESS,
    OfferId,
    Plain,
    Replayer,
    below,
    expect,
    keys_of,
    number_of,
    numbered,
    plain,
    signed_by,
)


def genuine_snapshots(bucket: Bucket) -> list[int]:
    """The numbers of this bucket's snapshots, but for forged ones."""
    read = (read_snapshot_key(key) for key in bucket.keys("snapshot/") if key not in bucket.forged)
    return [n for n in read if n is not None]


GENUINE = "genuine"


@dataclass
class Genuine:
    """Raises ViolationError where a commit rests on anything else. `claims`: each learner's newest incarnation."""

    offers: set[OfferId] = field(default_factory=set)
    claims: Counter[str] = field(default_factory=Counter)
    requests: set[int] = field(default_factory=set)
    joins: set[tuple[str, int]] = field(default_factory=set)  # (name, epoch)

    def created(self, key: str) -> None:
        """The process whose record this is has written it."""
        kind, _, rest = key.partition("/")
        if kind == "offer":
            self.offers.add(numbered(key))
        elif kind == "incarnation":
            learner, incarnation, _ = numbered(key)
            self.claims[learner] = max(self.claims[learner], incarnation)
        elif kind == "request":
            self.requests.add(int(rest[:10]))
        elif kind == "join":
            learner, _, name = rest.partition("/")
            self.joins.add((learner, int(name[:10])))

    def committed(self, commit: Plain) -> None:
        what = f"commit {commit['n']}, a {commit['kind']},"
        for item in (*commit.get("inputs", ()), *commit["outcomes"]):
            offer_id = item["learner"], item["incarnation"], item["seq"]
            expect(offer_id in self.offers, GENUINE, f"{what} tells of offer {offer_id}, which its learner never made")
        asked = commit["request"] is None or commit["request"] in self.requests
        expect(asked, GENUINE, f"{what} answers request {commit['request']}, which no operator made")
        for island in commit.get("islands", ()):
            joins = (island["name"], commit["epoch"]) in self.joins
            expect(joins, GENUINE, f"{what} admits {island['name']}, which has not asked this epoch's syncer")


OPERATOR = "operator"
OF_SYNCERS = (
    "epoch/",
    "commit/",
    "state/",
    "weights/",
    "snapshot/",
    "hint/",
    f"heartbeat/{SYNCER}",
    STANDBY_HEARTBEATS,
)
OF_OPERATORS = ("request/", "epoch/", "commit/", "state/", "weights/")  # with no syncer alive a command commits itself
OVERWRITTEN = ("hint/", "heartbeat/")
NEVER_DELETED = ("FORMAT.json", "commit/", "epoch/", "incarnation/", "request/", "join/")
INNOCENT = frozenset({  # why an offer of an honest, undamaged learner may be refused
    "late", "too_early", "old_incarnation", "superseded", "before_rollback", "unknown_base", "base_consumed",
    "data_overlap", "run_over", "key_revoked",
})  # fmt: skip
OUTCOME_ROUNDS = 2  # of merges: outcomes go with them, and a skip leaves the offers of its slot to the next merge
OUTCOME_APART_S = 25.0  # for offers carried home: a call of the relay may have been slow since before faults ceased
ANSWER_MERGES, ANSWER_S = 2, 8.0  # while a syncer serves, no request waits for its answer longer than both
OUTCOME_S = 4.0  # at the least: a new incarnation is looked for only every second of the syncer's own clock


def prefixes_of(role: str, apart: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """The prefixes that a role may write to. A syncer's process also writes for learners that live `apart`."""
    if role == SYNCER:
        return OF_SYNCERS + tuple(sorted({prefix for name in apart for prefix in prefixes_of(name)}))
    if role == OPERATOR:
        return OF_OPERATORS
    own = tuple(f"{kind}/{role}/" for kind in ("incarnation", "offer", "delta", "inner"))
    return (*own, f"heartbeat/{role}.json", f"join/{role}/", f"certificate/learner/{role}/")


@dataclass
class Floors:
    """The floors in a bucket's log, in its order, each with the time at which its commit appeared there."""

    bucket: Bucket
    grace_s: float
    shown: list[tuple[int, float]] = field(default_factory=list)

    def show(self, commit: Plain, now_s: float) -> None:
        if commit["kind"] == "gc_floor":
            self.shown.append((commit["floor"], now_s))

    def past_grace(self, now_s: float) -> int:
        """The newest floor whose readers' grace is over by the fastest clock; 0 if there is none."""
        since_s = now_s - self.grace_s / (1.0 + MAX_DRIFT)
        return next((floor for floor, shown_s in reversed(self.shown) if shown_s <= since_s), 0)


@dataclass
class Monitor:
    """Raises ViolationError at the first broken invariant. `healthy`: there are no faults any more; `_grows`: the log
    has grown since. `last_look_s`: the longest time from a syncer's last look at a mailbox to the run's end.
    `suspects`: learners that wrote what no honest learner writes, or whose payload the store has damaged.
    `carries_s`: how long offers from a region's bucket may wait for others that are carried home before them.
    `_fresh`: for each offer without an outcome, the merges after which its slot is due, and from when a syncer can find
    it: when it appeared, or when listings show its key's certificate, if that is later;
    `_asked`: for each request without an answer, the number of merges and the time when it came, or when the request
    before it was answered; `_joining`: the same for islands that have asked the present syncer to join; `_serving`: for
    when the newest syncer began to serve."""

    bucket: Bucket
    run: RunFormat
    healthy: bool = False
    last_commit_s: float = 0.0
    adopted: int = 0
    deletions: int = 0
    last_look_s: Callable[[], float] = float
    suspects: set[str] = field(default_factory=set)
    records: dict[str, bytes] = field(default_factory=dict)  # the commits
    carries_s: float = 0.0
    _grows: bool = False
    _apart: frozenset[str] = frozenset()
    _apart_bucket: Bucket | None = None
    _prefixes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _fresh: dict[OfferId, tuple[int, float]] = field(default_factory=dict)
    _signed_by: dict[OfferId, str] = field(default_factory=dict)  # the public keys
    _asked: dict[int, tuple[int, float]] = field(default_factory=dict)
    _joining: dict[str, tuple[int, float]] = field(default_factory=dict)
    _serving: tuple[int, float] = (0, 0.0)

    def __post_init__(self) -> None:
        self.replayer = Replayer(self.bucket, self.run)
        self.harm, self.norms = Harm(self.replayer), NormBooks(self.replayer)
        self.floors = self.floors_of(self.bucket)
        self.moments = MomentsWatch(self.replayer)
        self.genuine = Genuine()

    def floors_of(self, bucket: Bucket) -> Floors:
        return Floors(bucket, self.run.settings.retention.grace_s)

    def lives_apart(self, learners: set[str], bucket: Bucket) -> None:
        """These learners publish in their region's bucket, from where the syncer's process carries offers home."""
        self._apart, self._apart_bucket = frozenset(learners), bucket

    # -- writes -------------------------------------------------------------------------------------------------

    def created(self, role: str, key: str, data: bytes, now_s: float) -> None:
        self.check_place(role, key)
        if role not in (SYNCER, OPERATOR):
            self.moments.born(key, data, self.bucket)
        if role != SYNCER:
            self.genuine.created(key)
        if key.startswith("commit/"):
            expect(key == f"commit/{self.replayer.n + 1:012d}.json", "1", f"{role} created {key} beyond the log's end")
            self.records[key] = data
            self._committed(self.replayer.feed(data), now_s)
            self.last_commit_s = now_s
        elif key.startswith("offer/"):
            self._offered(key, plain(data), now_s)
        elif key.startswith("request/"):
            self._asked[int(key[8:18])] = self.replayer.merges, now_s
        elif key.startswith("join/") and self._counts_as_wish(key):
            self._joining.setdefault(key.split("/")[1], (self.replayer.merges, now_s))

    def _counts_as_wish(self, key: str) -> bool:
        """Whether the present syncer must answer it. A member's wish came after its answer; one to an earlier syncer is
        carried out of a region too late for it."""
        named = read_join_key(key)
        return key.split("/")[1] not in self.replayer.batches and (named is None or named[1] == self.replayer.epoch)

    def _offered(self, key: str, offer: Plain, now_s: float) -> None:
        """9: when an offer appears, the payload that it names is there: otherwise its learner is to blame. One that the
        log has settled comes late, behind the floor: its payload may be gone, and it gets no outcome."""
        learner, incarnation, seq = numbered(key)
        public = signed_by(offer)[1]
        if (learner, incarnation, seq) in self.replayer.settled:
            return
        payload = (
            f"delta/{below(learner, incarnation)}/{seq:010d}-{offer['payload_digest']}" in self.bucket.objects
            or not offer["payload_bytes"]
        )
        honest = learner not in self.suspects and incarnation >= self.replayer.floors[learner]
        expect(payload or not honest, "9", f"{key} is there before its payload")
        due = self.replayer.merges + max(0, offer["slot"] - self.replayer.slot)
        if public not in self.replayer.revoked:
            certificate = f"certificate/learner/{learner}/{public}.json"  # by whose listing a syncer knows the key
            since_s = max(now_s, self.bucket.listed_from_s.get(certificate, now_s))
            self._fresh[learner, incarnation, seq] = due, since_s
            self._signed_by[learner, incarnation, seq] = public

    def mended(self, key: str, data: bytes) -> None:
        """1: nothing else is put back than what was there; of offers, than what the learner has signed."""
        same = data == self.records.get(key, self.run.kept.get(key))
        if key.startswith("offer/"):
            same = self.run.keyring.authenticates(learner_signer(key.split("/")[1]), key, data)
        expect(same, "1", f"{key} was put back with other bytes")

    def put(self, role: str, key: str) -> None:
        self.check_place(role, key)
        expect(key.startswith(OVERWRITTEN), "1", f"{role} overwrote {key}")

    def deleted(self, role: str, key: str, data: bytes | None, now_s: float, apart: Floors | None = None) -> None:
        """9 and 11: only behind a floor whose readers have had their grace, and nothing that a reader still needs.
        `apart`: the floors of the object's bucket, if that is not the home bucket."""
        expect(role in (SYNCER, OPERATOR), "11", f"{role} deleted {key}")
        expect(not key.startswith(NEVER_DELETED), "1", f"{role} deleted {key}")
        if data is None:
            return
        floors = apart or self.floors
        floor = floors.past_grace(now_s)
        expect(floor > 0, "9", f"{role} deleted {key} before the grace of any floor was over")
        kind, _, rest = key.partition("/")
        if kind in ("state", "weights"):
            self._check_version(kind, int(rest[:4]), int(rest[5:17]), int(rest[18:28]), key, floor)
        elif kind == "delta":
            learner, incarnation, _ = numbered(key)
            settled_n = self.replayer.settled_at.get(numbered(key))
            old = incarnation < self.replayer.floors[learner]
            known = old or (settled_n is not None and settled_n <= floor)
            expect(known, "9", f"{key} was deleted, which has no outcome behind the floor {floor}")
        elif kind == "inner":
            enough = _later_moments(key, floors.bucket) >= KEPT_MOMENTS
            expect(enough, "9", f"{key} was deleted, which a restart may ask for")
        elif kind == "offer":
            passed = self.replayer.is_passed(numbered(key), floor)
            expect(passed, "9", f"{key} was deleted, which a reader behind the floor {floor} may ask for")
        elif kind == "snapshot" and key not in floors.bucket.forged:
            left = [n for n in genuine_snapshots(floors.bucket) if int(rest[:12]) < n <= floor]
            expect(len(left) >= KEPT_SNAPSHOTS, "9", f"{key} was deleted, and {left} alone lead to the floor {floor}")

    def _check_version(self, kind: str, fragment: int, version: int, epoch: int, key: str, floor: int) -> None:
        """9: readers need the version that is current at the floor, and weights that a delta may still be based on."""
        versions = [v.version for v in self.replayer.versions[fragment] if v.version <= floor]
        kept = versions[-(self.run.settings.sync.staleness_rounds + 2) :] if kind == "weights" else versions[-1:]
        if self.replayer.rolled_back_behind(floor):
            kept = [number for number in kept if number >= self.replayer.rolled_back_behind(floor)]
        known = self.replayer.version(fragment, version)
        committed = known is not None and key in keys_of(known)
        expect(version <= floor, "9", f"{key} was deleted, which lies beyond the floor {floor}")
        needed = committed and version in kept
        expect(not needed, "9", f"{key} was deleted, which readers of the floor {floor} need")
        orphan_of_now = not committed and epoch >= self.replayer.epoch and version > versions[-1]
        expect(not orphan_of_now, "9", f"{key} was deleted, which this epoch's syncer may be about to commit")

    def check_floor(self, floor: int, n: int) -> None:
        """9: between the floor and the commit n that sets it lies what an operator can ask to keep at the least."""
        kept = LEAST_ROUNDS * self.run.num_fragments
        expect(n - 1 - floor >= kept, "9", f"the floor {floor} of commit {n} leaves fewer than {kept} commits")
        for fragment, versions in self.replayer.versions.items():
            newest = versions[-1].version
            expect(newest > floor, "9", f"behind the floor {floor} lies fragment {fragment}'s newest version, {newest}")

    def check_place(self, role: str, key: str) -> None:
        """11: each role writes only under its own prefixes."""
        prefixes = self._prefixes.get(role) or self._prefixes.setdefault(role, prefixes_of(role, self._apart))
        expect(key.startswith(prefixes), "11", f"{role} wrote {key}")

    def _committed(self, commit: Plain, now_s: float) -> None:
        self.floors.show(commit, now_s)
        if commit["kind"] == "gc_floor":
            self.check_floor(commit["floor"], commit["n"])
        self.genuine.committed(commit)
        self._check_blame(commit)
        self.harm.committed(commit)
        self.norms.committed(commit)
        if commit["request"] is not None:
            later = {number: at for number, at in self._asked.items() if number > commit["request"]}
            self._asked = dict.fromkeys(later, (self.replayer.merges, now_s))  # answered one after the other
        for item in (*commit.get("inputs", ()), *commit["outcomes"]):
            self._fresh.pop((item["learner"], item["incarnation"], item["seq"]), None)
        if commit["kind"] == "revoke":  # what it has signed is as if it were not there: nothing tells its outcome
            self._fresh = {offer: at for offer, at in self._fresh.items() if self._signed_by[offer] != commit["key"]}
        if commit["kind"] == "epoch_start":
            self._serving, self._joining = (self.replayer.merges, now_s), {}
        for island in commit.get("islands", ()):
            self._joining.pop(island["name"], None)
        if not self.healthy:
            return
        if commit["kind"] == "finish" and self._grows:
            self._check_finish(now_s)
        self._grows = True
        rounds = OUTCOME_ROUNDS * self.run.num_fragments
        for (learner, incarnation, seq), (merges, since_s) in self._fresh.items():
            within_s = OUTCOME_APART_S + self.carries_s if learner in self._apart else OUTCOME_S
            merged = self.replayer.merges - max(merges, self._serving[0])
            late = merged > rounds + 1 and now_s - max(since_s, self._serving[1]) > within_s
            current = self._is_asked_for(learner, incarnation)
            text = f"offer {incarnation}/{seq} of {learner} has no outcome after {merged} merges"
            expect(not (late and current and self._is_found(learner, incarnation, since_s, now_s)), LIVENESS, text)

    def _until_listed_s(self, learner: str, incarnation: int) -> float:
        """How long a claim may go unseen whose number does not follow those that a syncer sees under the
        learner's other keys (two processes began at once, one of these keys is revoked, or a listing lags): every
        LISTS_EVERY-th look lists claims."""
        hidden = {fingerprint(public) for public in self.replayer.revoked}
        prefix = f"certificate/learner/{learner}/"
        late = [key for key in self.bucket.listed_from_s if key.startswith(prefix)]
        hidden |= {fingerprint(key.removeprefix(prefix).removesuffix(".json")) for key in late}
        others = [numbered(key)[1] for key in self.bucket.keys(f"incarnation/{learner}/")]
        others = [one for one in others if key_of(one) != key_of(incarnation)]
        follows = all(number_of(incarnation) > number_of(one) and key_of(one) not in hidden for one in others)
        return 0.0 if follows else LISTS_EVERY * WATCH_BOUNDS_S[1]

    def _is_asked_for(self, learner: str, incarnation: int) -> bool:
        """Whether a syncer must still ask for this incarnation's offers; of replaced ones only for the newest."""
        newest = number_of(self.genuine.claims[learner])
        asked_for = number_of(incarnation) >= newest - MAX_OLD_MAILBOXES
        return asked_for and incarnation >= self.replayer.floors[learner]

    def _is_found(self, learner: str, incarnation: int, since_s: float, now_s: float) -> bool:
        """Whether the present syncer must have found the claim by now."""
        return now_s - max(since_s, self._serving[1]) > self._until_listed_s(learner, incarnation)

    def check_answers(self, free_s: float, now_s: float) -> None:
        """A serving syncer answers requests. `free_s`: from then on no fault delays it."""
        asked = {f"request {number}": since for number, since in self._asked.items()}
        asked |= {f"the wish of {name} to join": since for name, since in self._joining.items()}
        for what, (merges, since_s) in asked.items():
            merged = self.replayer.merges - max(merges, self._serving[0])
            waited_s = now_s - max(since_s, self._serving[1], free_s)
            late = merged > ANSWER_MERGES and waited_s > ANSWER_S
            expect(not late, LIVENESS, f"{what} has no answer after {merged} merges")

    def _check_blame(self, commit: Plain) -> None:
        """No learner is refused for a hostile reason, or quarantined, without a cause."""
        for outcome in commit["outcomes"]:
            fair = outcome["reason"] in INNOCENT or outcome["learner"] in self.suspects
            offer = f"offer {outcome['incarnation']}/{outcome['seq']} of {outcome['learner']}"
            text = f"{offer} was refused: {outcome['reason']}"
            expect(fair, BLAME, f"{text}, and nothing was wrong with it")
        if commit["kind"] == "quarantine":
            expect(commit["learner"] in self.suspects, BLAME, f"{commit['learner']} is kept out, and did nothing wrong")

    def _check_finish(self, now_s: float) -> None:
        """4: the run's end settles every offer that the syncer could find by then."""
        for (learner, incarnation, seq), (_, since_s) in self._fresh.items():
            home = learner not in self._apart and self._is_asked_for(learner, incarnation)
            text = f"offer {incarnation}/{seq} of {learner} has no outcome, {now_s - since_s:.2f} s before the end"
            found = home and self._is_found(learner, incarnation, since_s, now_s)
            expect(not found or now_s - since_s <= self.last_look_s(), "4", text)

    # -- beliefs ------------------------------------------------------------------------------------------------

    def on_adoption(self, learner: str, output: FragmentVersion, weights: bytes) -> None:
        """6: no learner adopts a version that is not in the log."""
        self.adopted += 1
        known = self.replayer.version(output.fragment, output.version)
        there = known is not None and known.weights_digest == output.weights_digest == digest(weights)
        expect(there, "6", f"{learner} adopted version {output.version} of {output.fragment}, which is not in the log")

    def on_publication(self, offer_id: OfferId, data: bytes) -> None:
        """7: an offer that a learner believes published is in the bucket, with the learner's bytes."""
        learner, incarnation, seq = offer_id
        bucket = self._apart_bucket if learner in self._apart else self.bucket
        there = None if bucket is None else self.replayer.offer_of(bucket, offer_id)
        gone = there is None and self.replayer.is_passed(offer_id, self.replayer.gc_floor)
        expect(there == data or gone, "7", f"offer {incarnation}/{seq} of {learner} has other bytes than it published")

    def on_commit(self, state: RunState, commit: Commit) -> None:
        """A commit that a syncer reports is in the log, whatever the bucket made of it since, and the syncer's state is
        that of the log."""
        data = self.records.get(commit_key(commit.n))
        there = data is not None and record_digest(data) == state.digest and state.n == commit.n
        expect(there, "6", f"a syncer took commit {commit.n} for its own, and the log has another one")

    def grown_healthy(self, now_s: float) -> None:
        self.healthy, self.last_commit_s = True, now_s
        merges = self.replayer.merges
        self._fresh = {offer: (max(due, merges), max(since_s, now_s)) for offer, (due, since_s) in self._fresh.items()}
        self._asked = dict.fromkeys(self._asked, (merges, now_s))
        self._joining = dict.fromkeys(self._joining, (merges, now_s))


def _later_moments(key: str, bucket: Bucket) -> int:
    """How many newer saved moments of the same learner there are. (Those that its newest offer names may have been
    collected, if the learner saved that many since and published no offer. Then a restart warms up without moments.)"""
    return sum(1 for _ in bucket.keys(key[: key.index("/", len("inner/")) + 1], after=key))


def check_folded(state: RunState, replayer: Replayer, run: RunFormat) -> None:
    """10: the state that a fresh process folds from the log agrees with the replayer's independent books."""
    own = (replayer.n, replayer.previous, replayer.epoch, replayer.slot, replayer.token_parameters)
    theirs = (state.n, state.digest, state.epoch, state.slot, state.token_parameters)
    expect(theirs == own, "10", f"a restarted process reads {theirs} where the log says {own}")
    for name, known in state.learners.items():
        expect((known.quarantined is not None) == (name in replayer.kept_out), "10", f"{name}: let in, or not")
        expect(known.floor == replayer.floors[name], "10", f"{name}: floor {known.floor}")
        share = replayer.shares.get(name, 0)
        expect(known.token_parameters == share, "10", f"{name}: a share of {known.token_parameters} instead of {share}")
        if key_of(known.floor) in {fingerprint(public) for public in replayer.revoked}:
            continue  # what is refused of a revoked key moves no watermark
        next_seq = 0
        while (name, known.floor, next_seq) in replayer.settled:
            next_seq += 1
        expect(known.next_seq == next_seq, "10", f"{name}: watermark {known.next_seq} instead of {next_seq}")
        later = {s for who, of, s in replayer.settled if (who, of) == (name, known.floor) and s > next_seq}
        expect(
            set(known.settled) == later, "10", f"{name}: outcomes of {set(known.settled)} beyond it instead of {later}"
        )
    ends = {(n, fragment): a.data_end for n, known in state.learners.items() for fragment, a in known.applied.items()}
    expect(ends == dict(replayer.ranges), "10", f"applied data ends at {ends} instead of {dict(replayer.ranges)}")
