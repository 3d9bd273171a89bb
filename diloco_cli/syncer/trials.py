"""Trials for a re-judgement (protocol/rules/rejudging.py): recorded merges once more, without some learners' deltas.

The syncer's own arithmetic repeats them from the versions as of the good commit, out of the deltas in the bucket. Every
delta counts from the trial's own version of its base, so that what the learners left out did to that base is left out
too. Where no merge is left of a slot, the fragment stays as it is. With all deltas the recorded versions come out, bit
for bit.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.actors.merging import read_payload
from diloco_cli.protocol.actors.ports import Refused
from diloco_cli.protocol.log.commit_log import read_log, state_after
from diloco_cli.protocol.log.commits import Commit, Merge, Rollback
from diloco_cli.protocol.log.keys import commit_key, max_fragment_bytes, offer_key, state_key, weights_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.places import genuine_of
from diloco_cli.protocol.log.records import MergedOffer, Offer, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, decode
from diloco_cli.protocol.rules.rejudging import LeaveOut
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.signing import learner_signer
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import Spool, TorchArithmetic
from diloco_cli.tensors.merge import DeltaSource

Result = TypeVar("Result")


def state_at(run: RunFormat, store: Store, n: int) -> RunState:
    head = _now(store, read_log(run))
    return _now(store, state_after(run, n, head.revoked))


class Repetition:
    """One trial. `parameters`, after `run_through`: [n] float32 of each fragment."""

    def __init__(self, run: RunFormat, store: Store, trial: LeaveOut, spool: Spool | None = None) -> None:
        self.run, self.store, self.trial, self.spool = run, store, trial, spool
        self.arithmetic = TorchArithmetic(run, spool=spool)
        self.start = state_at(run, store, trial.good)
        self.current: dict[int, int] = {}
        self._weights: dict[tuple[int, int], bytes | memoryview] = {}
        for output in self.start.outputs:
            key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
            self.arithmetic.restore(output.fragment, output.state_digest, self._read(key, output.fragment))
            self._brought(output.fragment, output.version)

    def run_through(self) -> list[torch.Tensor]:
        """Raises DataCheckError if an object is missing or damaged."""
        for commit in self._path():
            if isinstance(commit, Rollback):  # to what is there already: undone merges are not on the path
                for output in commit.outputs:
                    self._brought(output.fragment, commit.n)
            elif isinstance(commit, Merge):
                self._merge(commit)
        return [self.arithmetic.parameters(fragment) for fragment in range(self.run.num_fragments)]

    def _path(self) -> list[Commit]:
        """The commits that lead from the good one to the head, without what rollbacks between them have undone."""
        found: list[Commit] = []
        n = self.trial.head
        while n > self.trial.good:
            data = self.store.get(commit_key(n), MAX_RECORD_BYTES)
            commit = decode(Commit, data or b"", commit_key(n))
            found.append(commit)
            n = commit.to if isinstance(commit, Rollback) else n - 1
        if n < self.trial.good:
            raise DataCheckError("a rollback lies before the commit that evaluated well", where=commit_key(n))
        return found[::-1]

    def _merge(self, commit: Merge) -> None:
        fragment = commit.outputs[0].fragment
        left = [item for item in commit.inputs if item.learner not in self.trial.without]
        if left:
            deltas = [(self._delta(item, fragment), item.weight, item.scale) for item in left]
            merged = self.arithmetic.merge(commit.slot, deltas)
            if isinstance(merged, Refused):
                raise DataCheckError(f"cannot be repeated: {merged.reasons}", where=commit_key(commit.n))
            self.arithmetic.settle(fragment, digest(merged.state))
        self._brought(fragment, commit.n)

    def _brought(self, fragment: int, version: int) -> None:
        """The fragment's present parameters are its version of this number. Older ones than learners may use go."""
        self.current[fragment] = version
        weights = self.arithmetic.settled(fragment).weights
        self._weights[fragment, version] = weights if self.spool is None else self.spool.keep(weights)
        known = sorted(number for of, number in self._weights if of == fragment)
        for number in known[: -(self.run.settings.sync.staleness_rounds + 2)]:
            del self._weights[fragment, number]

    def _delta(self, item: MergedOffer, fragment: int) -> DeltaSource:
        key = offer_key(item.learner, item.incarnation, item.seq)
        signer = learner_signer(item.learner)
        data = genuine_of(lambda at: self.store.get(at, MAX_RECORD_BYTES), self.run.keyring, signer, key)
        offer = decode(Offer, data or b"", key)
        payload = _now(self.store, read_payload(offer))
        if isinstance(payload, str) or offer.payload_digest != item.payload_digest:
            raise DataCheckError("its payload is not the one that was merged", where=key)
        base = None if item.base == self.current[fragment] else self._base(fragment, item.base)
        delta = self.arithmetic.read_delta(offer, payload, base)
        if isinstance(delta, str):
            raise DataCheckError(f"cannot be repeated: {delta}", where=key)
        return delta

    def _base(self, fragment: int, version: int) -> bytes:
        """The weights of an older version: the trial's own, or recorded ones from before the good commit."""
        if (fragment, version) in self._weights:
            return bytes(self._weights[fragment, version])
        base = self.start.version(fragment, version)
        if base is None:
            raise DataCheckError(f"version {version} of fragment {fragment} is not known any more")
        return self._read(weights_key(fragment, version, base.epoch, base.weights_digest), fragment)

    def _read(self, key: str, fragment: int) -> bytes:
        data = self.store.get(key, max_fragment_bytes(self.run.layout, fragment))
        if data is None or not key.endswith(digest(data)):
            raise DataCheckError("is missing, or has other bytes than the log says", where=key)
        return data


def _now(store: Store, steps: Steps[Result]) -> Result:
    return perform(steps, store, SystemClock(monotonic_s, sleep_s, lambda: None))
