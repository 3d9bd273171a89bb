"""`diloco verify`: replays the log from the bucket alone and compares every digest. And a damaged or lost state,
computed anew from the version before it and the deltas that the log names.

A replay reads commits from 0, checks the chain and every rule by its own book-keeping (checker.py), measures the norms
of the deltas that were merged, recomputes each merge from the deltas that the log names, and demands bit-identical
outer parameters. Norms are sums whose last bits differ between machines, so they must agree to one part in a million;
what the log decided by the norms that it states must follow from them exactly, behind its floor too. Damage is listed,
never raised: if a merge cannot be recomputed, the replay goes on from the bucket's bytes.

If garbage was collected, the replay starts from the versions as of the floor; before it, it checks the chain and every
rule, which need the log alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import isclose

import torch

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, RefusedError
from diloco_cli.observe.checker import Checker, disagreements
from diloco_cli.protocol.actors.merging import Merged, Refused
from diloco_cli.protocol.log.commit_log import SNAPSHOT_EVERY, Snapshot, read_log
from diloco_cli.protocol.log.commits import Commit, EpochStart, Merge, Rollback
from diloco_cli.protocol.log.keys import (
    commit_key,
    delta_key,
    epoch_key,
    max_fragment_bytes,
    offer_key,
    read_snapshot_key,
    snapshot_key,
    state_key,
    weights_key,
)
from diloco_cli.protocol.log.operations import Result, Steps
from diloco_cli.protocol.log.records import (
    MAX_RECORD_BYTES,
    FragmentVersion,
    MergedOffer,
    Offer,
    RecordError,
    RunFormat,
    decode,
    fragment_of_slot,
    record_digest,
)
from diloco_cli.runtime.daemon import SystemClock, commits_ahead, perform
from diloco_cli.runtime.processes import usable_cores
from diloco_cli.signing import LOG, NOBODY, SignatureError, learner_signer
from diloco_cli.store.port import BadKeyError, Store
from diloco_cli.syncer.arithmetic import TorchArithmetic
from diloco_cli.tensors.codecs import use_threads
from diloco_cli.tensors.merge import DeltaSource
from diloco_cli.tensors.payload import PayloadError

MOST_LISTED = 1000  # a bucket without payloads has a complaint for each, or several
TOLERANCE = 1e-6  # relative, of a norm
COSINE_TOLERANCE = 2e-4  # the log has four digits


@dataclass
class Replay:
    """The result of a replay. `mismatches` and `missing` name keys, each the first MOST_LISTED; `unlisted` counts the
    others. `duplicates` counts offers applied twice. Commits
    up to `floor` were checked against each other alone; later merges were recomputed (0: all merges)."""

    commits: int = 0
    merges: int = 0
    offers_applied: int = 0
    offers_rejected: int = 0
    duplicates: int = 0
    tokens: int = 0
    epochs: int = 0
    floor: int = 0
    missing: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    unlisted: int = 0

    @property
    def ok(self) -> bool:
        return not (self.missing or self.mismatches or self.duplicates)

    def note(self, problems: list[str], what: str) -> None:
        """Put `what` among the `problems`, which are this record's."""
        if len(problems) < MOST_LISTED:
            problems.append(what)
        else:
            self.unlisted += 1


def verified(store: Store, run: RunFormat, on_start: Callable[[Replay], object] = lambda found: None) -> Replay:
    """A replay; a second one if the log's floor rose during the first, and objects that it needed were deleted.
    `on_start` gets each as it begins, and can see how far it is."""
    while True:
        replayer = LogVerifier(store, run)
        on_start(replayer.found)
        found = replayer.replay()
        if found.ok or replayer.floor() <= found.floor:
            return found


class LogVerifier:
    """Reads one run's bucket, changes nothing."""

    def __init__(self, store: Store, run: RunFormat) -> None:
        torch.set_num_threads(1)
        use_threads(usable_cores())
        self.store, self.run = store, run
        self.arithmetic = TorchArithmetic(run)
        self.found = Replay()
        self.checker = Checker(run, lambda holds, rule, otherwise: self._expect(holds, otherwise))
        self.digests: list[str] = []

    def replay(self) -> Replay:
        self.found.floor = self.floor()
        for data in commits_ahead(self.store):
            if not self._replay_bytes(data):
                break
            self.found.commits += 1
        else:
            self._check_end()
        self._check_snapshots()
        self.found.duplicates = self.checker.duplicates
        self.found.tokens = self.checker.token_parameters // self.run.layout.num_parameters
        return self.found

    def _replay_bytes(self, data: bytes) -> bool:
        """False: these are no commit, and the replay ends."""
        key = commit_key(self.found.commits)
        by = self.run.keyring.signature(LOG, key, data)
        self._expect(by is not None, f"{key} {self.run.keyring.wrong}")
        try:
            commit = decode(Commit, data, key)
        except RecordError as error:
            self.found.note(self.found.mismatches, f"{error}; the replay ends here")
            return False
        if by is not None and by != NOBODY:
            self.checker.check_signer(commit, by, self._claimed(commit), key)
        previous = self.digests[-1] if self.digests else ""
        chained = commit.n == self.found.commits and commit.previous == previous
        self._expect(chained, f"{key}: hash chain broken: it does not follow the commit before it")
        self.digests.append(record_digest(data))
        self._replay_commit(commit, key)
        return True

    def _replay_commit(self, commit: Commit, key: str) -> None:
        self.found.offers_rejected += len(commit.outcomes)
        self.found.epochs += isinstance(commit, EpochStart)
        sound = self.checker.check(commit, key)
        computed = isinstance(commit, Merge) and self._replay_merge(commit, key, sound)
        kept = commit.n > self.found.floor or self.found.floor == 0
        for output in commit.outputs:
            if kept and 0 <= output.fragment < self.run.num_fragments:
                self._check_output(output, computed)
        self.checker.settle(commit)
        if commit.n == self.found.floor > 0:
            for versions in self.checker.versions.values():
                self._check_output(versions[-1], False)

    def _claimed(self, commit: Commit) -> str:
        """The public key that claimed the epoch which a commit begins."""
        key = epoch_key(commit.epoch)
        data = self._present(key, MAX_RECORD_BYTES) if isinstance(commit, EpochStart) else None
        by = None if data is None else self.run.keyring.signature(LOG, key, data)
        return "" if by is None else by.public

    # -- one merge ----------------------------------------------------------------------------------------------

    def _replay_merge(self, commit: Merge, key: str, sound: bool) -> bool:
        """Whether the merge's output could be recomputed."""
        self.found.merges += 1
        self.found.offers_applied += len(commit.inputs)
        if commit.n <= self.found.floor or len(commit.outputs) != 1:
            return False
        output = commit.outputs[0]
        deltas = self.deltas(commit) if sound else list[DeltaSource | None]([None] * len(commit.inputs))
        for item, delta in zip(commit.inputs, deltas, strict=True):
            if delta is not None:
                same = isclose(item.norm, delta.norm, rel_tol=TOLERANCE)
                who = f"{key}: offer {item.incarnation}/{item.seq} of {item.learner}"
                self._expect(same, f"{who} has the norm {delta.norm}, not {item.norm}")
        merged = self.recomputed(commit, deltas)
        if merged is None:
            self._expect(False, f"{key}: this merge cannot be recomputed")
            return False
        self._expect(digest(merged.state) == output.state_digest, f"{key}: replayed parameters differ")
        self._expect(digest(merged.weights) == output.weights_digest, f"{key}: replayed weights differ")
        for item, cosine in zip(commit.inputs, merged.cosines, strict=True):
            same = isclose(item.cosine, cosine, abs_tol=COSINE_TOLERANCE)
            self._expect(same, f"{key}: {item.learner}'s delta has the cosine {cosine:.4g}, not {item.cosine}")
        return True

    def deltas(self, commit: Merge) -> list[DeltaSource | None]:
        return [self._delta(item, commit.outputs[0].fragment) for item in commit.inputs]

    def recomputed(self, commit: Merge, deltas: list[DeltaSource | None]) -> Merged | None:
        """The deltas applied to the version before; None if one is damaged or missing."""
        sound = [
            (delta, item.weight, item.scale, item.own_counted)
            for delta, item in zip(deltas, commit.inputs, strict=True)
            if delta is not None
        ]
        if not sound or len(sound) != len(deltas):
            return None
        slot, fragment = commit.slot, commit.outputs[0].fragment
        if fragment_of_slot(slot, self.run.num_fragments) != fragment:
            return None
        merged = self.arithmetic.merge(slot, sound)
        return None if isinstance(merged, Refused) else merged

    def _delta(self, item: MergedOffer, fragment: int) -> DeltaSource | None:
        """The delta, checked against its offer and re-anchored as the syncer must have done."""
        payload_at = delta_key(item.learner, item.incarnation, item.seq, item.payload_digest)
        max_bytes = max_fragment_bytes(self.run.layout, fragment)
        offer, payload = self._offer(item, fragment), self._present(payload_at, max_bytes, item.payload_digest)
        base, current = self.checker.version(fragment, item.base), self.checker.versions.get(fragment, [])
        if base is None:
            self._expect(False, f"{payload_at}: its base {item.base} is not in the log")
            return None
        if offer is not None:
            self._expect(offer.base_digest == base.weights_digest, f"{payload_at}: the offer names another base")
        base_weights = None
        if base is not current[-1]:
            base_weights = self._present(_weights_key(base), max_bytes, base.weights_digest)
            if base_weights is None:
                return None
        if offer is None or payload is None or not self.arithmetic.holds(fragment, current[-1].state_digest):
            return None
        delta = self.arithmetic.read_delta(offer, payload, base_weights)
        if isinstance(delta, str):
            self.found.note(self.found.mismatches, f"{payload_at}: {delta}")
            return None
        return delta

    def _offer(self, item: MergedOffer, fragment: int) -> Offer | None:
        """The offer that the log names, if it is there and says what the log says."""
        key = offer_key(item.learner, item.incarnation, item.seq)
        data, signer = self._present(key, MAX_RECORD_BYTES), learner_signer(item.learner)
        if data is None:
            return None
        keyring = self.run.keyring.without(self.checker.revoked)
        self._expect(keyring.authenticates(signer, key, data), f"{key} {keyring.wrong}")
        try:
            offer = decode(Offer, data, key)
        except RecordError as error:
            self.found.note(self.found.mismatches, str(error))
            return None
        different = disagreements(offer, item, fragment)
        self._expect(not different, f"{key}: the log says another {', '.join(different)} of this offer")
        return None if different else offer

    def _check_output(self, output: FragmentVersion, computed: bool) -> None:
        """Checks that the bucket's bytes are those that the log names; a replay starts from the first versions."""
        key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
        max_bytes = max_fragment_bytes(self.run.layout, output.fragment)
        state = self._present(key, max_bytes, output.state_digest)
        self._present(_weights_key(output), max_bytes, output.weights_digest)
        if state is None or self.arithmetic.holds(output.fragment, output.state_digest):
            return
        self._expect(not computed, f"{key}: went on from the bucket's bytes")
        try:
            self.arithmetic.restore(output.fragment, output.state_digest, state)
        except PayloadError as error:
            self.found.note(self.found.mismatches, f"{key}: {error}")

    # -- the end of the log -------------------------------------------------------------------------------------

    def floor(self) -> int:
        """The floor from which the replay can start, by the folded log; the replay then checks it."""
        try:
            return self._performed(read_log(self.run)).gc_floor
        except (RecordError, SignatureError):
            return 0  # the replay reports the error

    def _performed(self, steps: Steps[Result]) -> Result:
        return perform(steps, self.store, SystemClock(monotonic_s, sleep_s, lambda: None))

    def _check_end(self) -> None:
        """A commit that is missing in the middle looks like the end. The listing is for this alone."""
        floor = self.found.floor
        self._expect(
            self.checker.gc_floor == floor, f"the log's floor is {self.checker.gc_floor}, and was read as {floor}"
        )
        end = commit_key(self.found.commits)
        later = self.store.list("commit/", after=end, limit=1)
        self._expect_end(end, bool(later))

    def _check_snapshots(self) -> None:
        """Snapshots name the digest of their commit, so they also show a damaged or missing last commit."""
        recent = max(0, self.found.commits - 2 * SNAPSHOT_EVERY)
        for key in self.store.list("snapshot/", after=snapshot_key(recent)):
            data, number = self.store.get(key, MAX_RECORD_BYTES), read_snapshot_key(key)
            if data is None or number is None:
                continue  # collected since it was listed
            try:
                self._expect(self.run.keyring.authenticates(LOG, key, data), f"{key} {self.run.keyring.wrong}")
                snapshot = decode(Snapshot, data, key)
            except RecordError as error:
                self.found.note(self.found.mismatches, str(error))
                continue
            n = snapshot.state.n
            self._expect(key == snapshot_key(n), f"{key}: holds the state of commit {n}")
            if 0 <= n < len(self.digests):
                same = snapshot.commit_digest == self.digests[n]
                self._expect(same, f"{commit_key(n)}: other bytes than {key} says")
            elif n >= len(self.digests):
                self._expect_end(commit_key(self.found.commits), True)

    def _expect_end(self, key: str, later: bool) -> None:
        """A run that goes on may have written this commit since: it is missing only if it still is not there."""
        if later and key not in self.found.missing and self.store.get(key, MAX_RECORD_BYTES) is None:
            self.found.note(self.found.missing, key)

    def _present(self, key: str, max_bytes: int, expected: str | None = None) -> bytes | None:
        """The object, if it is there and has the digest that the log says."""
        try:
            data = self.store.get(key, max_bytes)
        except BadKeyError as error:
            self.found.note(self.found.mismatches, f"the log names an impossible key: {error}")
            return None
        if data is None:
            self.found.note(self.found.missing, key)
        elif expected is not None and digest(data) != expected:
            self.found.note(self.found.mismatches, f"{key}: other bytes than the log says")
            return None
        return data

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.found.note(self.found.mismatches, otherwise)


def _weights_key(output: FragmentVersion) -> str:
    return weights_key(output.fragment, output.version, output.epoch, output.weights_digest)


def rebuilt_state(run: RunFormat, store: Store, wanted: FragmentVersion) -> bytes | None:
    """The bytes of `wanted`, bit-identical by their digest, from the newest intact version before it; None if the
    deltas do not give them, or are not kept any more. Reads the log from commit 0, so only for emergencies."""
    replayer = LogVerifier(store, run)
    commits = _commits_of(store, wanted)
    origins = _origins(commits)
    start, state = _newest_intact(replayer, [commits[index] for index in origins], wanted)
    if state is None:
        return None
    settled = 0
    for before, index in pairwise(origins[start:]):
        commit = commits[index]
        while settled < index:
            replayer.checker.settle(commits[settled])
            settled += 1
        if isinstance(commit, Merge):
            if not _restore(replayer, commits[before], wanted.fragment, state):
                return None
            merged = replayer.recomputed(commit, replayer.deltas(commit))
            state = merged.state if merged is not None else b""
        if digest(state) != _output(commit, wanted.fragment).state_digest:
            return None
    return state


def lost(url: str, wanted: FragmentVersion) -> DataCheckError:
    """The error where a state cannot be made anew, with the way out: to the commit before it."""
    back = f"diloco rollback {url} --to {wanted.version - 1}; then: diloco resume {url}"
    return DataCheckError(
        f"the committed state of fragment {wanted.fragment} is lost or damaged, and the log does not give it anew",
        where=state_key(wanted.fragment, wanted.version, wanted.epoch, wanted.state_digest),
        hint=f"go back to before it: {back}" if wanted.version > 0 else "restore that object from a copy of the bucket",
    )


def _bytes_of(run: RunFormat, store: Store, output: FragmentVersion) -> bytes | None:
    """The state's bytes in the bucket, if they are those of its digest."""
    key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
    data = store.get(key, max_fragment_bytes(run.layout, output.fragment))
    return data if data is not None and digest(data) == output.state_digest else None


def _origins(commits: list[Commit]) -> list[int]:
    """Indices of the commits that led to the last one, itself included: a rollback follows from its target."""
    found = [len(commits) - 1]
    while found[-1] > 0:
        commit, before = commits[found[-1]], found[-1] - 1
        while isinstance(commit, Rollback) and before > 0 and commits[before].n > commit.to:
            before -= 1
        found.append(before)
    return found[::-1]


def _commits_of(store: Store, wanted: FragmentVersion) -> list[Commit]:
    """All commits that brought a version of this fragment, up to the wanted one."""
    found = []
    for n in range(wanted.version + 1):
        data = store.get(commit_key(n), MAX_RECORD_BYTES)
        commit = decode(Commit, data or b"", commit_key(n))
        if any(output.fragment == wanted.fragment for output in commit.outputs):
            found.append(commit)
    return found


def _newest_intact(replayer: LogVerifier, commits: list[Commit], wanted: FragmentVersion) -> tuple[int, bytes | None]:
    """(index into `commits`, bytes); the very first version can be made from the seed, where its code may run."""
    for index in reversed(range(len(commits))):
        data = _bytes_of(replayer.run, replayer.store, _output(commits[index], wanted.fragment))
        if data is not None:
            return index, data
    try:
        first = next(islice(replayer.arithmetic.initial(), wanted.fragment, None)).state
    except RefusedError:  # a syncer that may not run the model's code
        return 0, None
    return 0, first if digest(first) == _output(commits[0], wanted.fragment).state_digest else None


def _restore(replayer: LogVerifier, commit: Commit, fragment: int, state: bytes) -> bool:
    try:
        replayer.arithmetic.restore(fragment, _output(commit, fragment).state_digest, state)
    except PayloadError:
        return False
    return True


def _output(commit: Commit, fragment: int) -> FragmentVersion:
    return next(output for output in commit.outputs if output.fragment == fragment)
