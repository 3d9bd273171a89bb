"""An independent reader of the bucket: plain JSON, own bookkeeping, none of the daemons' code.

It takes in commits one by one as they appear, or reads a bucket from its beginning. Numbers of the invariants:

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

from collections import defaultdict
from collections.abc import Set
from functools import lru_cache
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.protocol.log.records import RunFormat
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
from tests.histories.lines import head_of, in_one
from tests.histories.reckoning import AppliedOffer, Lengths, Version

Plain = dict[str, Any]
OfferId = tuple[str, int, int]
SAID_BY_BOTH = (
    "learner", "incarnation", "seq", "base", "data_start", "data_end", "tokens", "steps",
    "payload_digest", "payload_bytes",
)  # fmt: skip
PLACES = ("", *(f"-{number}" for number in range(1, 16)))  # of a record, where others may have taken the first ones
PARSED = 4096  # records remembered: one history reads each of its records several times
LIVENESS, BLAME = "liveness", "blame"
POISONER = "p0"  # the name of the hostile learner, where there is one
FLOODER = "z0"  # and of the island that floods the bucket, and never trains


class ViolationError(AssertionError):
    """An invariant is broken: its number, `liveness` or another word, and how."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"invariant {invariant}: {text}")
        self.invariant, self.text = invariant, text


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


def offer_bytes(store: Store, run: RunFormat, offer_id: OfferId, revoked: Set[str] = frozenset()) -> bytes | None:
    """An offer's genuine bytes, past any that others, or who holds a revoked key, have put under its key."""
    learner, incarnation, seq = offer_id
    key = f"offer/{learner}/{incarnation:08d}/{seq:010d}"
    for place in PLACES:
        data = store.get(f"{key}{place}.json")
        by = None if data is None else run.keyring.signature(f"learner/{learner}", f"{key}.json", data)
        if data is None or (by is not None and by.public not in revoked):
            return data
    return None


class Replayer:
    """Raises ViolationError at the first broken invariant. `poison`: merged deltas that their ranges do not give, and
    `signed`: the keys of merged offers, as an `earlier` reader has found them: since then both may be collected."""

    def __init__(self, store: Store, run: RunFormat, earlier: Replayer | None = None) -> None:
        self.store, self.run = store, run
        self.poison: dict[OfferId, int] = {} if earlier is None else earlier.poison
        self.signed: dict[OfferId, str] = {} if earlier is None else earlier.signed
        self.n = -1
        self.previous = ""
        self.epoch = 0
        self.settled: dict[OfferId, str] = {}
        self.bases: set[tuple[str, int, int]] = set()
        self.ends: dict[tuple[str, int], int] = defaultdict(int)
        self.floors: dict[str, int] = defaultdict(int)
        self.versions: dict[int, list[Version]] = defaultdict(list)
        self.token_parameters = 0
        self.settled_at: dict[OfferId, int] = {}
        self.slot = self.merges = 0
        self.kinds: list[str] = []
        self.batches = {island.name: island.batch_tokens for island in run.islands}
        self.shards = run.settings.data.shards or len(run.islands)
        self.base_floor = self.gc_floor = self.collected = 0
        self.kept_out: set[str] = set()
        self.applied: list[AppliedOffer] = []
        self.shares: dict[str, int] = {}
        self.shares_after: list[dict[str, int]] = []
        self.left: dict[tuple[str, int, int], tuple[int, int]] = {}
        self.returns: dict[int, int] = {}
        self.revoked: set[str] = set()
        self.epoch_signer, self.lengths = ("", ""), Lengths()

    def read(self) -> Replayer:
        """Read the log to its end from the present position; no commit may lie beyond the end. Behind the newest floor
        only the objects that a replay from there needs must exist."""
        self.collected = self._newest_floor()
        while (data := self.store.get(f"commit/{self.n + 1:012d}.json")) is not None:
            self.feed(data)
        last = f"commit/{self.n:012d}.json" if self.n >= 0 else ""
        expect(not self.store.list("commit/", after=last), "1", f"a commit beyond the gap after {self.n}")
        for fragment, versions in self.versions.items():
            start = [version for version in versions if version.number <= self.collected][-1]
            there = all(self.store.get(key) is not None for key in (start.state_key, start.weights_key))
            expect(there, "9", f"a replay from {self.collected} has no start for fragment {fragment}")
        return self

    def _newest_floor(self) -> int:
        floor, n = 0, 0
        while (data := self.store.get(f"commit/{n:012d}.json")) is not None:
            floor, n = max(floor, plain(data).get("floor", 0)), n + 1
        return floor

    def check_published(self, offers: dict[OfferId, bytes]) -> Replayer:
        """7: an offer that a learner believes published has that learner's bytes."""
        for (learner, incarnation, seq), data in offers.items():
            there = self.offer_of(self.store, (learner, incarnation, seq), data)
            gone = there is None and self.is_passed((learner, incarnation, seq), self.gc_floor)
            text = f"offer {incarnation}/{seq} of {learner} has other bytes than it published"
            expect(there == data or gone, "7", text)
        return self

    def offer_of(self, store: Store, offer_id: OfferId, data: bytes) -> bytes | None:
        """The genuine offer there for the holder of the key that signed `data`, revoked since or not."""
        own = signed_by(plain(data))[1]
        return offer_bytes(store, self.run, offer_id, self.revoked - {own})

    def feed(self, data: bytes) -> Plain:
        """The next record's bytes."""
        commit = plain(data)
        n = self.n + 1
        expect((commit["n"], commit["previous"]) == (n, self.previous), "1", f"the chain breaks at commit {n}")
        self._epoch(commit)
        self._signer(commit)
        self.n, self.previous = n, digest(head_of(data))
        self.kinds.append(commit["kind"])
        expect("finish" not in self.kinds[:-1], "1", f"a {commit['kind']} after the run had finished")
        stopped = self.kinds[-2:-1] == ["stop"] and commit["kind"] != "epoch_start"
        expect(not stopped, "1", f"a {commit['kind']} while the run was stopped")
        if commit["kind"] in ("merge", "skip"):
            expect(commit["slot"] == self.slot, "1", f"slot {commit['slot']} where {self.slot} was due")
            self.slot += 1
        for outcome in commit["outcomes"]:
            self._settle(outcome, outcome["reason"])
        if commit["kind"] == "membership":
            self._membership(commit["islands"])
        if commit["kind"] in ("quarantine", "readmit"):
            out = commit["kind"] == "quarantine"
            changes = (commit["learner"] in self.kept_out) != out or commit.get("evaluated") is not None
            expect(changes, "1", f"commit {n}, a {commit['kind']}, changes nothing")
            self.kept_out = self.kept_out | {commit["learner"]} if out else self.kept_out - {commit["learner"]}
        if commit["kind"] == "revoke":
            expect(commit["key"] not in self.revoked, "1", f"commit {n} revokes a key a second time")
            self.revoked.add(commit["key"])
            if commit["learner"] is not None:
                self.floors[commit["learner"]] = max(commit["floor"], self.floors[commit["learner"]])
        if commit["kind"] == "gc_floor":
            expect(
                self.gc_floor < commit["floor"] < n, "9", f"the floor goes from {self.gc_floor} to {commit['floor']}"
            )
            self.gc_floor = commit["floor"]
        if commit["kind"] == "merge":
            self._merge(commit)
        if commit["kind"] == "rollback":
            self._roll_back(commit, n)
        self.shares_after.append(self.shares)
        for output in commit.get("outputs", ()):
            self._output(output, n)
        for item in (*commit.get("inputs", ()), *commit["outcomes"]):
            self.floors[item["learner"]] = max(self.floors[item["learner"]], item["incarnation"])
        if commit["kind"] == "finish":
            target = self.run.settings.train.tokens
            expect(self.tokens >= target, "4", f"finished at {self.tokens} of {target} tokens")
        return commit

    def _epoch(self, commit: Plain) -> None:
        epoch, starts = commit["epoch"], commit["kind"] == "epoch_start"
        follows = epoch > self.epoch if starts else epoch == self.epoch
        expect(follows, "1", f"a {commit['kind']} of epoch {epoch} after epoch {self.epoch}")
        if starts:
            expect(self.store.get(f"epoch/{epoch:010d}.json") is not None, "1", f"epoch {epoch} was never claimed")
        self.epoch = epoch

    def _signer(self, commit: Plain) -> None:
        """Keys: each epoch has one key, that of its claim; no revoked one; the operator's makes no merges."""
        if self.run.signing is None:
            return
        signer, starts = signed_by(commit), commit["kind"] == "epoch_start"
        if starts:
            claim = plain(self.store.get(f"epoch/{commit['epoch']:010d}.json") or b"{}")
            expect(signed_by(claim) == signer, "keys", f"epoch {commit['epoch']} is not begun by whoever claimed it")
            self.epoch_signer = signer
        who = f"commit {commit['n']}, a {commit['kind']},"
        expect(signer == self.epoch_signer, "keys", f"{who} is signed with another key than its epoch's")
        expect(signer[1] not in self.revoked, "keys", f"{who} is signed with a revoked key")
        merges = commit["kind"] in ("merge", "skip", "finish") or (starts and commit["serves"])
        expect(signer[0] != "operator" or not merges, "keys", f"{who} is signed by an operator")

    def _membership(self, islands: list[Plain]) -> None:
        for island in islands:
            expect(island["name"] not in self.batches, "1", f"{island['name']} joined twice")
            self.batches[island["name"]] = island["batch_tokens"]
        expect(len(self.batches) <= self.shards, "2", "two islands would read one shard")

    def _settle(self, item: Plain, outcome: str) -> None:
        offer_id = (item["learner"], item["incarnation"], item["seq"])
        expect(offer_id not in self.settled, "2", f"offer {offer_id} was {self.settled.get(offer_id)}, now {outcome}")
        self.settled[offer_id], self.settled_at[offer_id] = outcome, self.n

    def _roll_back(self, rollback: Plain, n: int) -> None:
        """Every fragment becomes what it was, under a new number; merges since then no longer count."""
        to = rollback["to"]
        expect(self.gc_floor <= to < n, "9", f"commit {n} goes back to {to}, behind the floor {self.gc_floor}")
        self.shares, self.base_floor = self.shares_after[to], n
        self.returns[n] = to
        self.left.clear()  # no rounding error of merges that no longer count is fed back
        expect(dict(rollback["shares"]) == self.shares, "4", f"commit {n} says other shares than there were after {to}")
        self.token_parameters = sum(self.shares.values())
        for fragment in range(self.run.num_fragments):
            then = [version for version in self.versions[fragment] if version.number <= to][-1]
            self.versions[fragment].append(Version(n, then.parameter, then.momentum, "", "", ""))

    # -- merges -------------------------------------------------------------------------------------------------

    def _merge(self, commit: Plain) -> None:
        fragment = commit["outputs"][0]["fragment"]
        names, quorum = [item["learner"] for item in commit["inputs"]], self.run.settings.sync.quorum
        expect(fragment == (self.slot - 1) % self.run.num_fragments, "1", "another fragment was due")
        expect(names == sorted(set(names)), "5", "inputs are not sorted, one per learner")
        expect(len(names) >= quorum == commit["quorum"], "5", f"{len(names)} inputs, quorum {quorum}")
        expect(commit["tokens"] == sum(item["tokens"] for item in commit["inputs"]), "4", "tokens do not add up")
        self.merges += 1
        self.lengths.note(fragment, (item for item in commit["inputs"] if not is_poisoner(item["learner"])))
        deltas = [(scaled(self._input(item, fragment), item["scale"]), item["weight"]) for item in commit["inputs"]]
        before = self.versions[fragment][-1]
        parameter, momentum = outer_step(before.parameter, before.momentum, deltas)
        self.versions[fragment].append(Version(commit["n"], parameter, momentum, "", "", ""))
        parameters = self.run.layout.fragments[fragment].num_parameters
        self.token_parameters += commit["tokens"] * parameters
        self.shares = dict(self.shares)
        for item in commit["inputs"]:
            self.shares[item["learner"]] = self.shares.get(item["learner"], 0) + item["tokens"] * parameters

    def _input(self, item: Plain, fragment: int) -> int:
        """The delta, re-anchored by this reader's own parameters."""
        learner, base = item["learner"], (item["learner"], fragment, item["base"])
        who = f"offer {item['incarnation']}/{item['seq']} of {learner}"
        self._settle(item, "applied")
        expect(base not in self.bases, "2", f"{who}: base {item['base']} was used before")
        most = item["steps"] * self.batches[learner]
        expect(0 < item["tokens"] <= most, "4", f"{who}: {item['tokens']} tokens in {item['steps']} steps")
        island = self.run.island(learner)
        largest = max(known.batch_tokens for known in self.run.islands)  # a newcomer weighs no more than that
        full = (item["tokens"] if island in self.run.islands else min(item["tokens"], item["steps"] * largest)) ** 2
        full /= item["steps"]
        planned = self.run.settings.sync.every if island is None else island.local_steps
        least = full * min(1.0, planned / item["steps"]) * (1 - 1e-9)  # steps beyond a round may count in part
        least *= self.lengths.least_share(fragment, item)
        least = 0.0 if is_poisoner(learner) else least
        expect(least <= item["weight"] <= full, "4", f"{who}: weight {item['weight']}")
        expect(item["incarnation"] >= self.floors[learner], "2", f"{who}: below the floor {self.floors[learner]}")
        expect(item["data_start"] >= self.ends[learner, fragment], "2", f"{who}: data merged twice in {fragment}")
        expect(item["base"] >= self.base_floor, "2", f"{who}: its base {item['base']} lies behind a rollback")
        expect(learner not in self.kept_out, "2", f"{who}: its learner is quarantined")
        self.bases.add(base)
        self.ends[learner, fragment] = item["data_end"]
        offer_id = (learner, item["incarnation"], item["seq"])
        data = offer_bytes(self.store, self.run, offer_id, self.revoked)
        if data is None and self.n <= self.collected:
            return self._collected_input(item, fragment, who)
        offer = plain(data or b"{}")
        where = fragment, item["data_start"], item["data_end"]
        self.signed[offer_id] = signed_by(offer)[1]
        self.applied.append(AppliedOffer(learner, item["incarnation"], *where, self.signed[offer_id]))
        expect(all(item[key] == offer.get(key) for key in SAID_BY_BOTH), "7", f"{who} says other things than the log")
        expect(offer["slot"] == self.slot - 1, "7", f"{who} was made for slot {offer['slot']}, not for {self.slot - 1}")
        payload = self.payload_of(item)
        made = self._made(item, fragment, offer["feeds_back"], who)
        if payload is None and self.n <= self.collected:  # deltas are what their ranges give
            return self.poison.get(offer_id, made) + self._anchor(item, fragment, who)
        expect(payload is not None, "9", f"{who}: its payload is gone")
        expect(digest(payload or b"") == item["payload_digest"], "8", f"{who}: other bytes than its record says")
        delta = self._delta(made, payload or b"", who)
        if delta != made:
            self.poison[offer_id] = delta
        return delta + self._anchor(item, fragment, who)

    def is_passed(self, offer_id: OfferId, floor: int) -> bool:
        """Whether nobody asks for this offer once the log's floor is there: it has its outcome by then, and so has the
        next one of its incarnation, or a newer incarnation has one."""
        learner, incarnation, seq = offer_id
        settled = (self.settled_at.get((learner, incarnation, at)) for at in (seq, seq + 1))
        return incarnation < self.floors[learner] or all(n is not None and n <= floor for n in settled)

    def _collected_input(self, item: Plain, fragment: int, who: str) -> int:
        """An input whose offer is collected: its range gives its delta, unless an earlier reader has seen another."""
        of = item["learner"], item["incarnation"], fragment
        offer_id = (item["learner"], item["incarnation"], item["seq"])
        self.applied.append(AppliedOffer(*of, item["data_start"], item["data_end"], self.signed.get(offer_id, "")))
        made = self._made(item, fragment, self.left.get(of, (None, 0))[0], who)
        return self.poison.get(offer_id, made) + self._anchor(item, fragment, who)

    def payload_of(self, item: Plain) -> bytes | None:
        at = f"{item['learner']}/{item['incarnation']:08d}/{item['seq']:010d}"
        return self.store.get(f"delta/{at}-{item['payload_digest']}")

    def _delta(self, made: int, payload: bytes, who: str) -> int:
        try:
            (delta,) = numbers(payload, "delta")
        except ValueError:
            raise ViolationError("8", f"{who}: {payload!r} was merged") from None
        expect(abs(delta) <= MOST, "8", f"{who}: {delta} is over the cap")
        honest = delta == made or who.endswith(f" of {POISONER}")
        expect(honest, "4", f"{who}: its delta was not made from the range that it claims")
        return delta

    def _made(self, item: Plain, fragment: int, feeds_back: int | None, who: str) -> int:
        """The delta that the range gives; with error feedback plus the rounding error of the last applied offer."""
        made = gradient(item["learner"], item["data_start"], item["data_end"])
        if not self.run.settings.sync.error_feedback:
            return made
        of = item["learner"], item["incarnation"], fragment
        before, owed = self.left.get(of, (None, 0))
        expect(feeds_back == before, "4", f"{who} feeds back what is left of {feeds_back}, not of {before}")
        self.left[of] = item["seq"], made + owed - rounded(made + owed)
        return rounded(made + owed)

    def _anchor(self, item: Plain, fragment: int, who: str) -> int:
        versions = self.versions[fragment]
        base = next((version for version in reversed(versions) if version.number == item["base"]), None)
        if base is None:
            raise ViolationError("6", f"{who}: its base {item['base']} was never committed")
        if 0 < self.collected < self.n:
            expect(self.store.get(base.weights_key) is not None, "9", f"{who}: the weights of its base are gone")
        return versions[-1].parameter - base.parameter

    def _output(self, output: Plain, n: int) -> None:
        fragment, versions = output["fragment"], self.versions[output["fragment"]]
        expect(output["version"] == n, "1", f"commit {n} brings version {output['version']}")
        names = f"{fragment:04d}/{n:012d}-{output['epoch']:010d}"
        state_key, weights_key = (
            f"state/{names}-{output['state_digest']}",
            f"weights/{names}-{output['weights_digest']}",
        )
        state, weights = self.store.get(state_key) or b"", self.store.get(weights_key) or b""
        whole = digest(state) == output["state_digest"] and digest(weights) == output["weights_digest"]
        expect(whole or n <= self.collected, "9", f"version {n} of fragment {fragment} is not there, or other bytes")
        if not versions:
            versions.append(Version(n, *first_version(fragment), "", "", ""))
        own = versions[-1]
        made = digest(state_bytes(own.parameter, own.momentum)), digest(weights_bytes(own.parameter))
        same = made == (output["state_digest"], output["weights_digest"])
        expect(same and own.number == n, "3", f"version {n} of fragment {fragment} differs from a replay")
        own.state_key, own.weights_key, own.weights_digest = state_key, weights_key, output["weights_digest"]

    def leads_to(self, head: int, n: int) -> bool:
        """Whether the state after commit `head` includes commit n: no rollback between them has undone it."""
        while head > n:
            head = self.returns.get(head, head - 1)
        return head == n

    def rolled_back_behind(self, n: int) -> int:
        """The newest rollback up to commit n, 0 if there is none."""
        return max((at for at, kind in enumerate(self.kinds[: n + 1]) if kind == "rollback"), default=0)

    @property
    def tokens(self) -> int:
        return self.token_parameters // self.run.layout.num_parameters
