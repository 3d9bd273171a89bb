"""A forger: it runs no code of the product's, has no key, or another one than it needs, and writes straight into the
buckets at random times, until the run is over: claims and joins in others' names, operators' requests, epochs,
snapshots, hints, heartbeats. None of it may count, and whatever is demanded of a healthy run is demanded beside it, for
it does not cease with the faults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.digests import digest
from diloco_cli.protocol.log.commit_log import HeadHint, Snapshot
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, SyncerHeartbeat
from diloco_cli.protocol.log.keys import (
    HEAD_HINT_KEY,
    SYNCER,
    commit_key,
    epoch_key,
    heartbeat_key,
    incarnation_key,
    incarnation_of,
    join_key,
    key_of,
    number_of,
    request_key,
    snapshot_key,
)
from diloco_cli.protocol.log.records import Island, Join, ProcessClaim, Request, RequestKind, encode, record_digest
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import LOG, OPERATOR, Checksummed, Secret, learner_signer, syncer_signer
from tests.histories.client import Bucket
from tests.histories.options import BATCH_TOKENS, with_key
from tests.histories.stream import Stream

if TYPE_CHECKING:
    from tests.histories.history import History

STRANGER = Secret("of a stranger, " * 3, "a history")
FAR = 1 << 20
REQUESTS: tuple[RequestKind, ...] = ("stop", "resume", "rollback", "gc", "readmit")
JUNK = (b"", b"{}", b"junk", b'{"a":1}', b"\xff" * 40)
MAX_ACTS = 200
PAUSE_SLOTS = (0.5, 4.0)
ASKED = 2
ASKED_AFTER_SLOTS = (2.0, 12.0)  # by an operator, once faults have ceased


class Forger:
    ACTS = ("claim", "claim", "claim", "request", "join", "epoch", "snapshot", "hint", "heartbeat")  # methods

    def __init__(self, history: History) -> None:
        self.history, self.draw = history, Stream(history.seed, "forger")
        self.acts = 0
        self._later()

    def _later(self) -> None:
        wait_s = self.draw.between(*PAUSE_SLOTS) * self.history.options.slot_s
        self.history.world.call_at(self.history.world.now_s + wait_s, self._act)

    def _act(self) -> None:
        if self.acts >= MAX_ACTS or "finish" in self.history.monitor.replayer.kinds[-1:]:
            return
        self.acts += 1
        getattr(self, f"_{self.draw.choice(self.ACTS)}")()
        self._later()

    def bucket_of(self, learner: str) -> Bucket:
        """Where this learner's own objects lie."""
        region = self.history.region
        return region.bucket if region is not None and learner in region.residents else self.history.bucket

    def forge(self, bucket: Bucket, signer: str, key: str, body: bytes, copied: bytes | None) -> None:
        """Place a record that its signer has not signed."""
        ways = [self._elsewhere, self._damaged, *([self._by_a_stranger, self._by_another] if self.is_signed else [])]
        draw = self.draw.whole(0, 7)
        if draw == 0:
            data = self.draw.choice(JUNK)
        elif draw == 1:
            data = body
        elif draw == 2 and copied is not None:
            data = copied
        else:
            data = self.draw.choice(ways)(signer, key, body)
        if key not in bucket.objects:
            bucket.put(key, data)
            bucket.forged.add(key)
            self.history.note(f"a forger wrote {key}")

    def overwrite(self, key: str, data: bytes) -> None:
        """What the others overwrite, too."""
        self.history.bucket.put(key, data)

    @property
    def learners(self) -> list[str]:
        return [*self.history.monitor.replayer.batches]

    @property
    def is_signed(self) -> bool:
        return self.history.run.signing is not None

    def _elsewhere(self, signer: str, key: str, body: bytes) -> bytes:
        """As a record of another run."""
        return Checksummed("another").sign(signer, key, body)

    def _damaged(self, signer: str, key: str, body: bytes) -> bytes:
        """With the checksum of other bytes."""
        signed = Checksummed(self.history.run.run_id).sign(signer, key, body)
        return signed[:1] + b" " + signed[1:]

    def _by_a_stranger(self, signer: str, key: str, body: bytes) -> bytes:
        """Certified by another operator."""
        run_id, role = self.history.run.run_id, signer
        if signer == OPERATOR:
            return STRANGER.keyring(run_id).sign(OPERATOR, key, body)
        own = syncer_signer("host-0") if signer == LOG else signer
        private = digest(f"a stranger's key of {own}".encode()).rpartition("-")[2]
        return Secret(STRANGER.certified(run_id, {own: private}), "a history").keyring(run_id).sign(role, key, body)

    def _by_another(self, signer: str, key: str, body: bytes) -> bytes:
        """By a learner of the run, with its own key."""
        history = self.history
        other = self.draw.choice([name for name in (*self.learners, "n9") if learner_signer(name) != signer])
        own = learner_signer(other)
        return with_key(history.run, own, history.nemesis.keys_made[own]).keyring.sign(own, key, body)

    # -- in learners' names ---------------------------------------------------------------------------------------

    def _claim(self) -> None:
        name = self.draw.choice(self.learners)
        bucket = self.bucket_of(name)
        newest = self.history.monitor.genuine.claims[name]
        if self.is_signed and not newest:
            return
        incarnation = incarnation_of(number_of(newest) + self.draw.choice((1, 1, 1, FAR)), key_of(newest))
        key = incarnation_key(name, incarnation)
        claim = ProcessClaim(incarnation, "f" * 32, "elsewhere", 1, "then", "forged")
        copied = bucket.objects.get(incarnation_key(name, newest)) if newest else None
        self.forge(bucket, learner_signer(name), key, encode(claim), copied)

    def _join(self) -> None:
        name, epoch = f"x{self.acts}", self.history.monitor.replayer.epoch
        key = join_key(name, epoch, 0)
        island = Island(name, "here", BATCH_TOKENS, 1, 1.0, 1.0)
        self.forge(
            self.history.bucket, learner_signer(name), key, encode(Join(island, epoch, 0, "f" * 32, "then")), None
        )

    # -- in operators' and syncers' names -------------------------------------------------------------------------

    def _request(self) -> None:
        genuine = self.history.monitor.genuine.requests
        number = max(genuine, default=-1) + self.draw.choice((1, 1, 2))
        kind = self.draw.choice(REQUESTS)
        copied = self.history.bucket.objects.get(request_key(number - 1)) if number - 1 in genuine else None
        body = encode(Request(number, kind, "f" * 32, "then", "forged", to=0))
        self.forge(self.history.bucket, OPERATOR, request_key(number), body, copied)

    def _epoch(self) -> None:
        """Nobody serves it: who comes next claims the one after it."""
        bucket = self.history.bucket
        number = last_number(bucket, "epoch/", 10) + 1
        claim = ProcessClaim(number, "f" * 32, "elsewhere", 1, "then", "forged")
        self.forge_once(bucket, LOG, epoch_key(max(1, number)), encode(claim))

    def _snapshot(self) -> None:
        """Of an empty state, and the hint to it."""
        replayer, bucket = self.history.monitor.replayer, self.history.bucket
        if replayer.n < 2:
            return
        n = self.draw.whole(0, replayer.n - 1)
        commit = bucket.objects.get(commit_key(n), b"")
        body = encode(Snapshot(RunState(n=n), record_digest(commit), self.history.run.run_id))
        self.forge_once(bucket, LOG, snapshot_key(n), body)
        self.overwrite(HEAD_HINT_KEY, encode(HeadHint(n)))

    def forge_once(self, bucket: Bucket, signer: str, key: str, body: bytes) -> None:
        if key not in bucket.objects:
            self.forge(bucket, signer, key, body, None)

    def _hint(self) -> None:
        self.overwrite(HEAD_HINT_KEY, self.draw.choice((*JUNK, encode(HeadHint(FAR)), encode(HeadHint(0)))))

    def _heartbeat(self) -> None:
        """Of its own making, or a genuine one with a line added."""
        name = self.draw.choice((SYNCER, *self.learners))
        epoch, n = self.history.monitor.replayer.epoch, self.history.monitor.replayer.n
        said = SyncerHeartbeat("SERVING", epoch + 1, n + FAR, "elsewhere") if name == SYNCER else None
        record = said or LearnerHeartbeat("DONE", FAR, n + FAR, 1, 1, 1.0, 0)
        genuine = self.history.bucket.objects.get(heartbeat_key(name), b"").partition(b"\n")[0]
        others = (*JUNK, *[b"%b\n%d" % (genuine, self.acts)] * len(JUNK))
        self.overwrite(heartbeat_key(name), encode(record) if self.draw.chance(0.7) else self.draw.choice(others))


def asked_again(history: History) -> None:
    """Operators make some requests that change nothing, to be answered in time whatever others write."""
    draw, at_s = Stream(history.seed, "asked again"), history.world.now_s
    for _ in range(ASKED):
        at_s += draw.between(*ASKED_AFTER_SLOTS) * history.options.slot_s
        history.world.call_at(at_s, history.nemesis.readmit_nobody)


def last_number(bucket: Bucket, prefix: str, digits: int) -> int:
    """The greatest number under a prefix, others' objects included; -1 if there is none."""
    newest = max((key for key in bucket.objects if key.startswith(prefix)), default="")
    return int(newest[len(prefix) : len(prefix) + digits]) if newest else -1
