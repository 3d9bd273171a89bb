"""`diloco verify`: replays the log from the bucket alone and compares every digest.

It reads commits from 0, checks the chain and every rule by its own book-keeping (not by the folded state that the
daemons use), recomputes each merge from the deltas that the log names, and demands bit-identical outer parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from diloco_cli.digests import digest
from diloco_cli.protocol.keys import cast_key, commit_key, delta_key, offer_key, state_key
from diloco_cli.protocol.records import Commit, Input, Offer, Output, RunFormat
from diloco_cli.protocol.weights import token_weight
from diloco_cli.protocol.wire import RecordError, decode
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import TorchArithmetic


@dataclass
class Replay:
    """What a replay found. `mismatches` and `missing` name keys; `duplicates` counts offers applied twice."""

    commits: int = 0
    merges: int = 0
    offers_applied: int = 0
    offers_rejected: int = 0
    duplicates: int = 0
    tokens: int = 0
    epochs: int = 0
    missing: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.missing or self.mismatches or self.duplicates)


class Replayer:
    """Reads one run's bucket, changes nothing."""

    def __init__(self, store: Store, run: RunFormat) -> None:
        torch.set_num_threads(1)
        self.store, self.run = store, run
        self.arithmetic = TorchArithmetic(run, check_norms=False)
        self.found = Replay()
        self.versions: dict[int, list[Output]] = {}
        self.applied: set[tuple[str, int, int]] = set()
        self.bases: set[tuple[str, int, int]] = set()
        self.ranges: dict[tuple[str, int], int] = {}
        self.floors: dict[str, int] = {}
        self.token_parameters = 0
        self.slot = 0

    def replay(self, on_commit: Callable[[int], None] = lambda n: None) -> Replay:
        previous, epoch = "", 0
        while (data := self.store.get(commit_key(self.found.commits))) is not None:
            key = commit_key(self.found.commits)
            try:
                commit = decode(Commit, data, key)
            except RecordError as error:
                self.found.mismatches.append(str(error))
                break
            self._expect(commit.n == self.found.commits and commit.previous == previous, f"{key}: hash chain broken")
            self._expect(commit.epoch >= epoch, f"{key}: epoch {commit.epoch} after epoch {epoch}")
            previous, epoch = digest(data), commit.epoch
            self._replay_commit(commit, key)
            self.found.commits += 1
            on_commit(commit.n)
        self.found.tokens = self.token_parameters // self.run.layout.num_parameters
        return self.found

    def _replay_commit(self, commit: Commit, key: str) -> None:
        self.found.offers_rejected += len(commit.fates)
        self.found.epochs += commit.kind == "epoch_start"
        if commit.kind in ("merge", "skip"):
            self._expect(commit.slot == self.slot, f"{key}: slot {commit.slot} where {self.slot} was due")
            self.slot += 1
        if commit.kind == "merge":
            self._replay_merge(commit, key)
        for output in commit.outputs:
            self._check_output(output, commit.kind == "merge")
            self.versions.setdefault(output.fragment, []).append(output)

    # -- one merge ----------------------------------------------------------------------------------------------

    def _replay_merge(self, commit: Commit, key: str) -> None:
        self.found.merges += 1
        output = commit.outputs[0]
        names = [item.learner for item in commit.inputs]
        self._expect(names == sorted(set(names)), f"{key}: inputs are not sorted and distinct by learner")
        self._expect(len(names) >= commit.quorum, f"{key}: {len(names)} inputs, quorum {commit.quorum}")
        self._expect(output.version == commit.n, f"{key}: version {output.version} of commit {commit.n}")
        deltas = []
        for item in commit.inputs:
            self._check_input(item, output.fragment, key)
            delta = self._delta(item, output.fragment)
            if delta is not None:
                deltas.append((delta, item.weight))
        if len(deltas) == len(commit.inputs):
            merged = self.arithmetic.merge(output.fragment, deltas)
            same = not isinstance(merged, str) and digest(merged.state) == output.state_digest
            self._expect(same, f"{key}: replayed parameters differ")
            same = not isinstance(merged, str) and digest(merged.cast) == output.cast_digest
            self._expect(same, f"{key}: replayed cast differs")
        parameters = self.run.layout.fragments[output.fragment].num_parameters
        self.token_parameters += parameters * sum(item.tokens for item in commit.inputs)

    def _check_input(self, item: Input, fragment: int, key: str) -> None:
        offer_id = (item.learner, item.incarnation, item.seq)
        base_id = (item.learner, fragment, item.base)
        self.found.offers_applied += 1
        self.found.duplicates += offer_id in self.applied
        self._expect(base_id not in self.bases, f"{key}: base {item.base} of {item.learner} used twice")
        self._expect(
            item.incarnation >= self.floors.get(item.learner, 0), f"{key}: an old incarnation of {item.learner}"
        )
        end = self.ranges.get((item.learner, fragment), 0)
        self._expect(item.data_start >= end, f"{key}: data of {item.learner} merged twice into fragment {fragment}")
        weight = token_weight(item.tokens, item.steps, self.run.settings.sync.weight)
        self._expect(weight == item.weight, f"{key}: weight {item.weight} instead of {weight}")
        self.applied.add(offer_id)
        self.bases.add(base_id)
        self.floors[item.learner] = item.incarnation
        self.ranges[item.learner, fragment] = item.data_end

    def _delta(self, item: Input, fragment: int) -> torch.Tensor | None:
        """The delta as the offer gives it, checked against the offer and re-anchored as the syncer must have done."""
        offer_at = offer_key(item.learner, item.incarnation, item.seq)
        payload_at = delta_key(item.learner, item.incarnation, item.seq, item.payload_digest)
        offer_data, payload = self._present(offer_at), self._present(payload_at)
        if offer_data is None or payload is None:
            return None
        offer = decode(Offer, offer_data, offer_at)
        same = (offer.fragment, offer.base, offer.tokens, offer.steps) == (fragment, item.base, item.tokens, item.steps)
        self._expect(same, f"{offer_at}: the log says other things of this offer")
        self._expect(digest(payload) == item.payload_digest, f"{payload_at}: other bytes than the log says")
        base_cast = None
        if item.base != self.versions[fragment][-1].version:
            base = next((o for o in self.versions[fragment] if o.version == item.base), None)
            base_cast = self._present(cast_key(fragment, base.version, base.epoch, base.cast_digest)) if base else None
            self._expect(base_cast is not None, f"{offer_at}: its base {item.base} is not in the log")
        delta = self.arithmetic.read_delta(offer, payload, base_cast)
        if isinstance(delta, str):
            self.found.mismatches.append(f"{payload_at}: {delta}")
            return None
        return delta

    def _check_output(self, output: Output, computed: bool) -> None:
        """The bytes in the bucket are those that the log names; the first versions are where a replay starts."""
        state_at = state_key(output.fragment, output.version, output.epoch, output.state_digest)
        cast_at = cast_key(output.fragment, output.version, output.epoch, output.cast_digest)
        state, cast = self._present(state_at), self._present(cast_at)
        if state is not None:
            self._expect(digest(state) == output.state_digest, f"{state_at}: other bytes than the log says")
        if cast is not None:
            self._expect(digest(cast) == output.cast_digest, f"{cast_at}: other bytes than the log says")
        if not self.arithmetic.holds(output.fragment, output.state_digest) and state is not None:
            self._expect(not computed, f"{state_at}: went on from the bucket's bytes")
            self.arithmetic.restore(output.fragment, output.state_digest, state)

    def _present(self, key: str) -> bytes | None:
        data = self.store.get(key)
        if data is None:
            self.found.missing.append(key)
        return data

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.found.mismatches.append(otherwise)
