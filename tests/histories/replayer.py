"""An independent reader of a bucket, which computes every merge anew.

The product's checker of logs (`observe/checker.py`) keeps the books of the log; this reader adds what the bucket shows:
the chain, claims of epochs, offers, payloads and arithmetic. It takes in commits one by one as they appear, or reads a
bucket from its beginning. Numbers of the invariants:

    1   commits 0..n without gap, each with one content; an unbroken hash chain; epochs never decrease
    2   each offer applied at most once, at most one per (learner, fragment, base); data ranges never overlap within a
        fragment; no offer of an older incarnation after the floor has risen
    3   parameters and momentum of every version equal this replay, bit for bit
    4   merged tokens are the sum over applied offers; a claimed range is what the delta was made from
    5   every merge has at least K distinct learners
    8   nothing non-finite or over the cap is merged, no payload whose digest differs from its record
    9   nothing that a reader needs is missing
    keys  each epoch counts under one key; nothing is merged or committed under a key that was revoked before
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import sqrt
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.observe.checker import Checker
from diloco_cli.protocol.log.commits import Commit, Merge, Rollback
from diloco_cli.protocol.log.keys import commit_key, epoch_key, state_key, weights_key
from diloco_cli.protocol.log.records import FragmentVersion, MergedOffer, RunFormat, decode
from diloco_cli.signing import Signature
from diloco_cli.store.port import Store
from tests.histories.integers import (
    MOST,
    first_version,
    gradient,
    numbers,
    outer_step,
    rounded,
    scaled,
    state_bytes,
    weights_bytes,
)

Plain = dict[str, Any]
OfferId = tuple[str, int, int]
SAID_BY_BOTH = (
    "learner", "incarnation", "seq", "base", "data_start", "data_end", "tokens", "steps",
    "payload_digest", "payload_bytes",
)  # fmt: skip
KEY_BITS = 32  # of an incarnation in a signed run: the fingerprint of the key that it writes under
PARSED = 4096  # records remembered: one history reads each of its records several times
LIVENESS, BLAME = "liveness", "blame"
POISONER = "p0"  # the name of the hostile learner, where there is one
FULL, EMPTY = 0.5, 1 / 64  # of the others' length, above which a delta weighs in full; what one of none weighs


class ViolationError(AssertionError):
    """An invariant is broken: its number, `liveness` or another word, and how."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"invariant {invariant}: {text}")
        self.invariant, self.text = invariant, text


def head_of(data: bytes) -> bytes:
    """A record's bytes before compression."""
    return data if data.startswith(b"{") else zlib.decompress(data)


def in_one(data: bytes) -> Plain:
    """Raises ValueError for bytes that are no record."""
    try:
        record: Plain = json.loads(head_of(data))
    except zlib.error as error:
        raise ValueError(str(error)) from error
    return record


@lru_cache(maxsize=PARSED)
def plain(data: bytes) -> Plain:
    """A record as plain JSON. The same bytes give the same object, so nobody may change it."""
    return in_one(data)


def signed_by(record: Plain) -> tuple[str, str]:
    """(Signer, public key) of a record of a signed run, as it says itself."""
    signer, public, *_ = record.get("signature", ":").split(":")
    return signer, public


def is_poisoner(name: str) -> bool:
    return name == POISONER


def expect(holds: bool, invariant: str, text: str) -> None:
    if not holds:
        raise ViolationError(invariant, text)


def below(learner: str, incarnation: int) -> str:
    """Where the objects of an incarnation lie, behind their kind."""
    number, key = divmod(incarnation, 1 << KEY_BITS)
    return f"{learner}/{key:08x}/{number:08d}" if number else f"{learner}/{incarnation:08d}"


def number_of(incarnation: int) -> int:
    return incarnation >> KEY_BITS or incarnation


def numbered(key: str) -> OfferId:
    """(Learner, incarnation, number of the object, 0 for a claim) of a claim, an offer, a delta, or moments."""
    kind, learner, *rest = key.removesuffix(".json").split("/")
    key_digits = rest.pop(0) if len(rest) > (1 if kind == "incarnation" else 2) else ""
    number, name = int(rest[0]), rest[1].partition("-")[0] if len(rest) > 1 else "0"
    return learner, number << KEY_BITS | int(key_digits, 16) if key_digits else number, int(name)


def offer_bytes(store: Store, run: RunFormat, offer_id: OfferId) -> bytes | None:
    """An offer's genuine bytes."""
    learner, incarnation, seq = offer_id
    key = f"offer/{below(learner, incarnation)}/{seq:010d}.json"
    data = store.get(key)
    return data if data is not None and run.keyring.authenticates(f"learner/{learner}", key, data) else None


@dataclass(frozen=True)
class AppliedOffer:
    """A range of a learner's data that a merge applied to a fragment, and the key that its offer is signed with."""

    learner: str
    incarnation: int
    fragment: int
    start: int
    end: int
    public: str = ""


@dataclass
class Lengths:
    """Of each fragment the greatest norm by the square root of a step that the merged deltas of honest learners had: so
    long at most is what a delta is compared with, for its steps, while most are honest."""

    greatest: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def note(self, fragment: int, honest: Iterable[MergedOffer]) -> None:
        found = [(item.norm or 0.0) / sqrt(item.steps) for item in honest]
        self.greatest[fragment] = max([self.greatest[fragment], *found])

    def least_share(self, fragment: int, item: MergedOffer) -> float:
        """What an honest delta keeps of its weight at least."""
        others, norm = self.greatest[fragment] * sqrt(item.steps), item.norm or 0.0
        return 1.0 if norm >= FULL * others else max(EMPTY, norm / (FULL * others))


class Replayer(Checker):
    """Raises ViolationError at the first broken invariant. `poison`: merged deltas that their ranges do not give, and
    `signed`: the keys of merged offers, as an `earlier` reader has found them: since then both may be collected.
    `values`: (parameter, momentum) by fragment and version."""

    def __init__(self, store: Store, run: RunFormat, earlier: Replayer | None = None) -> None:
        super().__init__(run, expect)
        self.store = store
        self.poison: dict[OfferId, int] = {} if earlier is None else earlier.poison
        self.signed: dict[OfferId, str] = {} if earlier is None else earlier.signed
        self.n = -1
        self.previous = ""
        self.settled: dict[OfferId, str] = {}
        self.settled_at: dict[OfferId, int] = {}
        self.values: dict[tuple[int, int], tuple[int, int]] = {}
        self.merges = self.collected = 0
        self.kinds: list[str] = []
        self.batches = {island.name: island.batch_tokens for island in run.islands}
        self.applied: list[AppliedOffer] = []
        self.left: dict[tuple[str, int, int], tuple[int, int]] = {}
        self.returns: dict[int, int] = {}
        self.lengths = Lengths()

    def read(self) -> Replayer:
        """Read the log to its end from the present position; no commit may lie beyond the end. Behind the newest floor
        only the objects that a replay from there needs must exist."""
        self.collected = self._newest_floor()
        while (data := self.store.get(commit_key(self.n + 1))) is not None:
            self.feed(data)
        last = commit_key(self.n) if self.n >= 0 else ""
        expect(not self.store.list("commit/", after=last), "1", f"a commit beyond the gap after {self.n}")
        for fragment in self.versions:
            start = self.version_at(fragment, self.collected)
            there = start is not None and all(self.store.get(key) is not None for key in keys_of(start))
            expect(there, "9", f"a replay from {self.collected} has no start for fragment {fragment}")
        return self

    def _newest_floor(self) -> int:
        floor, n = 0, 0
        while (data := self.store.get(commit_key(n))) is not None:
            floor, n = max(floor, plain(data).get("floor", 0)), n + 1
        return floor

    def _forget(self) -> None:
        """Keep everything: the monitor asks about old versions too."""

    def check_published(self, offers: dict[OfferId, bytes]) -> Replayer:
        """7: an offer that a learner believes published has that learner's bytes."""
        for (learner, incarnation, seq), data in offers.items():
            there = self.offer_of(self.store, (learner, incarnation, seq))
            gone = there is None and self.is_passed((learner, incarnation, seq), self.gc_floor)
            text = f"offer {incarnation}/{seq} of {learner} has other bytes than it published"
            expect(there == data or gone, "7", text)
        return self

    def offer_of(self, store: Store, offer_id: OfferId) -> bytes | None:
        return offer_bytes(store, self.run, offer_id)

    def feed(self, data: bytes) -> Plain:
        """The next record's bytes."""
        record, key, n = plain(data), commit_key(self.n + 1), self.n + 1
        expect((record["n"], record["previous"]) == (n, self.previous), "1", f"the chain breaks at commit {n}")
        commit = decode(Commit, data, key)
        claim = self.store.get(epoch_key(commit.epoch))
        expect(claim is not None, "1", f"epoch {commit.epoch} was never claimed")
        if self.run.signing is not None:
            self.check_signer(commit, Signature(*signed_by(record)), signed_by(plain(claim or b"{}"))[1], key)
        self.check(commit, key)
        expect(not self.duplicates, "2", f"{key}: an offer is applied a second time")
        self.n, self.previous = n, digest(head_of(data))
        self.kinds.append(commit.kind)
        if isinstance(commit, Merge):
            self._merge(commit)
        elif isinstance(commit, Rollback):  # no rounding error of merges that no longer count is fed back
            self.returns[n] = commit.to
            self.left.clear()
            for fragment in range(self.run.num_fragments):
                then = self.version_at(fragment, commit.to)
                self.values[fragment, n] = self.values[fragment, -1 if then is None else then.version]
        elif n == 0:
            self.values = {(fragment, 0): first_version(fragment) for fragment in range(self.run.num_fragments)}
        for output in commit.outputs:
            self._check_bytes(output)
        self.settle(commit)
        for outcome in commit.outcomes:
            self._note((outcome.learner, outcome.incarnation, outcome.seq), outcome.reason)
        self.batches |= {island["name"]: island["batch_tokens"] for island in record.get("islands", ())}
        return record

    def _note(self, offer_id: OfferId, outcome: str) -> None:
        self.settled[offer_id], self.settled_at[offer_id] = outcome, self.n

    # -- merges -------------------------------------------------------------------------------------------------

    def _merge(self, commit: Merge) -> None:
        fragment = commit.outputs[0].fragment
        self.merges += 1
        self.lengths.note(fragment, (item for item in commit.inputs if not is_poisoner(item.learner)))
        deltas = [(scaled(self._input(item, fragment), item.scale), item.weight) for item in commit.inputs]
        before = self.values[fragment, self.versions[fragment][-1].version]
        self.values[fragment, commit.n] = outer_step(*before, deltas)

    def _input(self, item: MergedOffer, fragment: int) -> int:
        """The delta, re-anchored by this reader's own parameters."""
        who = f"offer {item.incarnation}/{item.seq} of {item.learner}"
        offer_id = (item.learner, item.incarnation, item.seq)
        self._check_weight(item, fragment, who)
        self._note(offer_id, "applied")
        data = offer_bytes(self.store, self.run, offer_id)
        if data is None and self.n <= self.collected:
            return self._collected_input(item, fragment, who)
        offer = plain(data or b"{}")
        self.signed[offer_id] = signed_by(offer)[1]
        self._apply(item, fragment)
        expect(all(getattr(item, key) == offer.get(key) for key in SAID_BY_BOTH), "7", f"{who} says other things")
        expect(offer["slot"] == self.slot, "7", f"{who} was made for slot {offer['slot']}, not for {self.slot}")
        payload = self.payload_of(item)
        made = self._made(item, fragment, offer["feeds_back"], who)
        if payload is None and self.n <= self.collected:  # deltas are what their ranges give
            return self.poison.get(offer_id, made) + self._anchor(item, fragment, who)
        expect(payload is not None, "9", f"{who}: its payload is gone")
        expect(digest(payload or b"") == item.payload_digest, "8", f"{who}: other bytes than its record says")
        delta = self._delta(made, payload or b"", who)
        if delta != made:
            self.poison[offer_id] = delta
        return delta + self._anchor(item, fragment, who)

    def _check_weight(self, item: MergedOffer, fragment: int, who: str) -> None:
        """4: an honest delta weighs what its tokens and steps give, as far as they are believed."""
        island = self.run.island(item.learner)
        largest = max(known.batch_tokens for known in self.run.islands)  # a newcomer weighs no more than that
        tokens = item.tokens if island in self.run.islands else min(item.tokens, item.steps * largest)
        full = tokens**2 / item.steps * min(1.0, item.counted / item.tokens)
        least = full * (1 - 1e-9) * self.lengths.least_share(fragment, item)
        least = 0.0 if is_poisoner(item.learner) else least
        expect(least <= item.weight <= full, "4", f"{who}: weight {item.weight}")

    def is_passed(self, offer_id: OfferId, floor: int) -> bool:
        """Whether nobody asks for this offer once the log's floor is there: it has its outcome by then, and so has the
        next one of its incarnation, or a newer incarnation has one."""
        learner, incarnation, seq = offer_id
        settled = (self.settled_at.get((learner, incarnation, at)) for at in (seq, seq + 1))
        return incarnation < self.floors[learner] or all(n is not None and n <= floor for n in settled)

    def _apply(self, item: MergedOffer, fragment: int) -> None:
        public = self.signed.get((item.learner, item.incarnation, item.seq), "")
        of = item.learner, item.incarnation, fragment
        self.applied.append(AppliedOffer(*of, item.data_start, item.data_end, public))

    def _collected_input(self, item: MergedOffer, fragment: int, who: str) -> int:
        """An input whose offer is collected: its range gives its delta, unless an earlier reader has seen another."""
        self._apply(item, fragment)
        made = self._made(item, fragment, self.left.get((item.learner, item.incarnation, fragment), (None, 0))[0], who)
        return self.poison.get((item.learner, item.incarnation, item.seq), made) + self._anchor(item, fragment, who)

    def payload_of(self, item: MergedOffer) -> bytes | None:
        at = f"{below(item.learner, item.incarnation)}/{item.seq:010d}"
        return self.store.get(f"delta/{at}-{item.payload_digest}")

    def _delta(self, made: int, payload: bytes, who: str) -> int:
        try:
            (delta,) = numbers(payload, "delta")
        except ValueError:
            raise ViolationError("8", f"{who}: {payload!r} was merged") from None
        expect(abs(delta) <= MOST, "8", f"{who}: {delta} is over the cap")
        honest = delta == made or who.endswith(f" of {POISONER}")
        expect(honest, "4", f"{who}: its delta was not made from the range that it claims")
        return delta

    def _made(self, item: MergedOffer, fragment: int, feeds_back: int | None, who: str) -> int:
        """The delta that the range gives; with error feedback plus the rounding error of the last applied offer."""
        made = gradient(item.learner, item.data_start, item.data_end)
        if not self.run.settings.sync.error_feedback:
            return made
        of = item.learner, item.incarnation, fragment
        before, owed = self.left.get(of, (None, 0))
        expect(feeds_back == before, "4", f"{who} feeds back what is left of {feeds_back}, not of {before}")
        self.left[of] = item.seq, made + owed - rounded(made + owed)
        return rounded(made + owed)

    def _anchor(self, item: MergedOffer, fragment: int, who: str) -> int:
        base = self.version(fragment, item.base)
        assert base is not None  # the checker demands it
        if 0 < self.collected < self.n:
            expect(self.store.get(keys_of(base)[1]) is not None, "9", f"{who}: the weights of its base are gone")
        newest = self.versions[fragment][-1].version
        return self.values[fragment, newest][0] - self.values[fragment, item.base][0]

    def _check_bytes(self, output: FragmentVersion) -> None:
        """3 and 9: the version's objects are there, and hold what this reader has computed."""
        fragment, n = output.fragment, output.version
        state, weights = (self.store.get(key) or b"" for key in keys_of(output))
        whole = digest(state) == output.state_digest and digest(weights) == output.weights_digest
        expect(whole or n <= self.collected, "9", f"version {n} of fragment {fragment} is not there, or other bytes")
        parameter, momentum = self.values[fragment, n]
        made = digest(state_bytes(parameter, momentum)), digest(weights_bytes(parameter))
        same = made == (output.state_digest, output.weights_digest)
        expect(same, "3", f"version {n} of fragment {fragment} differs from a replay")

    def leads_to(self, head: int, n: int) -> bool:
        """Whether the state after commit `head` includes commit n: no rollback between them has undone it."""
        while head > n:
            head = self.returns.get(head, head - 1)
        return head == n

    def rolled_back_behind(self, n: int) -> int:
        """The newest rollback up to commit n, 0 if there is none."""
        return max((at for at in self.returns if at <= n), default=0)


def keys_of(output: FragmentVersion) -> tuple[str, str]:
    """Of a version's state and its weights."""
    of = output.fragment, output.version, output.epoch
    return state_key(*of, output.state_digest), weights_key(*of, output.weights_digest)
