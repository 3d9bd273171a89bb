"""An independent reader of the bucket: plain JSON, own bookkeeping, none of the daemons' code. Numbers as in protocol
invariants: 1 log, 2 exactly once, 3 parameters, 4 tokens, 5 quorum, 7 published offers."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.protocol.records import RunFormat
from diloco_cli.store.port import Store
from tests.simulation.toy import Published, cast_bytes, number, outer_step, state_bytes

Plain = dict[str, Any]
SAID_BY_BOTH = (
    "learner", "incarnation", "seq", "base", "data_start", "data_end", "tokens", "steps",
    "payload_digest", "payload_bytes",
)  # fmt: skip


def commits_of(store: Store) -> list[Plain]:
    found: list[Plain] = []
    while (data := store.get(f"commit/{len(found):012d}.json")) is not None:
        found.append(json.loads(data))
    assert len(store.list("commit/")) == len(found), "a commit beyond a gap"
    return found


class BucketCheck:
    """Raises AssertionError at the first broken invariant."""

    def __init__(self, store: Store, run: RunFormat) -> None:
        self.store, self.run = store, run
        self.fated: dict[tuple[str, int, int], str] = {}
        self.bases: set[tuple[str, int, int]] = set()
        self.ends: dict[tuple[str, int], int] = defaultdict(int)
        self.floors: dict[str, int] = defaultdict(int)
        self.numbers: dict[int, tuple[int, int]] = {}
        self.casts: dict[tuple[int, int], int] = {}
        self.current: dict[int, int] = {}
        self.token_parameters = 0
        self.slot = 0
        self.kinds: list[str] = []
        self.batches = {island.name: island.batch_tokens for island in run.islands}
        self.shards = run.settings.data.shards or len(run.islands)

    def check(self, published: Published | None = None) -> BucketCheck:
        previous, epoch = "", 0
        for n, commit in enumerate(commits_of(self.store)):
            assert (commit["n"], commit["previous"]) == (n, previous), f"1: the chain breaks at commit {n}"
            assert commit["epoch"] >= epoch, f"1: epoch {commit['epoch']} after {epoch}"
            previous, epoch = digest(self.store.get(f"commit/{n:012d}.json") or b""), commit["epoch"]
            self.kinds.append(commit["kind"])
            self._commit(commit)
        for offer_id, data in (published.offers if published else {}).items():
            learner, incarnation, seq = offer_id
            there = self.store.get(f"offer/{learner}/{incarnation:08d}/{seq:010d}.json")
            assert there == data, f"7: offer {offer_id} has other bytes than its learner published"
        return self

    def _commit(self, commit: Plain) -> None:
        if commit["kind"] in ("merge", "skip"):
            assert commit["slot"] == self.slot, f"slot {commit['slot']} where {self.slot} was due"
            self.slot += 1
        for fate in commit["fates"]:
            self._settle(fate, fate["reason"])
        if commit["kind"] == "membership":
            assert commit["island"]["name"] not in self.batches, "an island joined twice"
            self.batches[commit["island"]["name"]] = commit["island"]["batch_tokens"]
            assert len(self.batches) <= self.shards, "two islands would read one shard"
        if commit["kind"] == "merge":
            self._merge(commit)
        for output in commit["outputs"]:
            self._output(output)

    def _settle(self, item: Plain, fate: str) -> None:
        offer_id = (item["learner"], item["incarnation"], item["seq"])
        assert offer_id not in self.fated, f"2: offer {offer_id} was {self.fated[offer_id]}, now {fate}"
        self.fated[offer_id] = fate

    def _merge(self, commit: Plain) -> None:
        fragment = commit["outputs"][0]["fragment"]
        names = [item["learner"] for item in commit["inputs"]]
        assert names == sorted(set(names)), "inputs sorted, one per learner"
        assert len(names) >= commit["quorum"] == self.run.settings.sync.quorum, f"5: {len(names)} inputs"
        assert commit["outputs"][0]["version"] == commit["n"]
        assert commit["tokens"] == sum(item["tokens"] for item in commit["inputs"])
        deltas = [(self._input(item, fragment), item["weight"]) for item in commit["inputs"]]
        self.numbers[fragment] = outer_step(*self.numbers[fragment], deltas)
        self.token_parameters += commit["tokens"] * self.run.layout.fragments[fragment].num_parameters

    def _input(self, item: Plain, fragment: int) -> int:
        """The delta, re-anchored by this reader's own parameters."""
        learner, base = item["learner"], (item["learner"], fragment, item["base"])
        self._settle(item, "applied")
        assert base not in self.bases, f"2: base {base} used twice"
        assert item["tokens"] == item["steps"] * self.batches[learner], f"{learner} claims other batches than its own"
        assert item["incarnation"] >= self.floors[learner], f"2: {learner} applied below its floor"
        assert item["data_start"] >= self.ends[learner, fragment], f"2: data of {learner} merged twice in {fragment}"
        self.bases.add(base)
        self.floors[learner] = item["incarnation"]
        self.ends[learner, fragment] = item["data_end"]
        at = f"{learner}/{item['incarnation']:08d}/{item['seq']:010d}"
        offer = json.loads(self.store.get(f"offer/{at}.json") or b"")
        assert all(item[key] == offer[key] for key in SAID_BY_BOTH), f"the log says other things of offer {at}"
        payload = self.store.get(f"delta/{at}-{item['payload_digest']}") or b""
        assert digest(payload) == item["payload_digest"], "8: other bytes than the record says"
        (delta,) = number(payload, "delta")
        return delta + self.numbers[fragment][0] - self.casts[fragment, item["base"]]

    def _output(self, output: Plain) -> None:
        fragment, version = output["fragment"], output["version"]
        names = f"{fragment:04d}/{version:012d}-{output['epoch']:010d}"
        state = self.store.get(f"state/{names}-{output['state_digest']}") or b""
        cast = self.store.get(f"cast/{names}-{output['cast_digest']}") or b""
        assert digest(state) == output["state_digest"] and digest(cast) == output["cast_digest"], "9: bytes are missing"
        if fragment not in self.numbers:
            parameter, momentum = number(state, "state")
            self.numbers[fragment] = (parameter, momentum)
        assert state == state_bytes(*self.numbers[fragment]), (
            f"3: version {version} of {fragment} differs from a replay"
        )
        assert cast == cast_bytes(self.numbers[fragment][0]), f"3: cast {version} of {fragment} differs from a replay"
        assert version > self.current.get(fragment, -1), "a version number was used again"
        self.current[fragment] = version
        self.casts[fragment, version] = self.numbers[fragment][0]

    @property
    def tokens(self) -> int:
        return self.token_parameters // self.run.layout.num_parameters
