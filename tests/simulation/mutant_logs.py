"""Mutants in the log, in what is known of offers, in payloads, mirrors and leases, each as a mutated actor."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from msgspec import structs

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.inbox import Inbox, Mailbox
from diloco_cli.protocol.actors.merging import Loader, Merged, make_resident, write_surely
from diloco_cli.protocol.actors.standby import Standby
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log import commit_log
from diloco_cli.protocol.log import commit_log as log
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import commit_key, delta_key, state_key, weights_key
from diloco_cli.protocol.log.operations import Create, Delete, Get, Now, Put, Sleep, Steps
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, FragmentVersion, Offer
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.regions import Mirror
from diloco_cli.signing import LOG, Checksummed, unpacked
from diloco_cli.store.port import Created, Exists, StoreUnavailableError, holder_bytes
from tests.histories.client import Client
from tests.histories.integers import Delta, IntegerArithmetic

FOR_EVER = 1 << 60


# -- the log ------------------------------------------------------------------------------------------------------


class Overwriting(Client):
    """Commits by overwriting."""

    def create(self, operation: Create) -> Steps[Created | Exists]:
        if not operation.key.startswith("commit/"):
            return (yield from super().create(operation))
        yield Put(operation.key, operation.data)
        return Created()


class Tidy(Syncer):
    """Deletes old records of the log."""

    def _turn(self) -> Steps[bool]:
        if self.state.n > 3:
            yield Delete(commit_key(1))
        return (yield from super()._turn())


class TakesOwnForLost(Client):
    """A create that finds the key taken is lost to it, though it may have taken the key itself."""

    def settle(self, operation: Create, doubt: StoreUnavailableError) -> Steps[Created | Exists]:
        holder: bytes | None = yield Get(operation.key, holder_bytes(operation.data))
        if holder is None:
            raise doubt
        plain = unpacked(holder)
        body, end, _ = plain.partition(b',"sum":')
        other = (body if end else plain[:-1]) + b',"zz":0}'  # another writer's, with a key that readers pass over
        return Exists(Checksummed("id").sign(LOG, operation.key, other) if end else other)


class TakesDoubtForSuccess(Client):
    """Whatever is in doubt has worked."""

    def settle(self, operation: Create, doubt: StoreUnavailableError) -> Steps[Created | Exists]:
        yield from ()
        return Created()


def without_watermarks(state: RunState) -> RunState:
    """With nothing about which offers have been applied or refused."""
    bare = {n: structs.replace(known, next_seq=0, settled=(), applied={}) for n, known in state.learners.items()}
    return structs.replace(state, learners=bare)


class AlteredSnapshots(Syncer):
    """Writes snapshots without watermarks."""

    def _commit(self, draft: Commit) -> Steps[bool]:
        written, self.last_snapshot = self.last_snapshot, FOR_EVER
        mine: bool = yield from super()._commit(draft)
        self.last_snapshot = written
        if self.state.n - written >= commit_log.SNAPSHOT_EVERY:
            yield from commit_log.write_snapshot(self.run, without_watermarks(self.state))
            self.last_snapshot = self.state.n
        return mine


# -- offers -------------------------------------------------------------------------------------------------------


def with_inbox(inbox: type[Inbox]) -> type[Syncer]:
    """A syncer that looks for offers so."""

    class MutantSyncer(Syncer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.inbox = self.loader.inbox = inbox(self.run, withheld=self.inbox.withheld)

    return MutantSyncer


class Undiscerning(Inbox):
    """Takes every offer that it finds, whether the log has given it an outcome or not."""

    def open(self, state: RunState, now_s: float) -> None:
        super().open(without_watermarks(state), now_s)

    def _receive(self, box: Mailbox, data: bytes | None, state: RunState) -> None:
        super()._receive(box, data, without_watermarks(state))

    def sort_out(self, state: RunState) -> None:
        super().sort_out(without_watermarks(state))


class OneWatermarkALearner(Inbox):
    """Knows of a learner which seq it has seen, and not of which incarnation."""

    def _box(self, learner: str, incarnation: int) -> Mailbox:
        if (learner, incarnation) not in self.mailboxes:
            box = super()._box(learner, incarnation)
            box.next_seq = max(b.next_seq for (name, _), b in self.mailboxes.items() if name == learner)
        return super()._box(learner, incarnation)


# -- payloads -----------------------------------------------------------------------------------------------------


def with_loader(loader: type[Loader]) -> type[Syncer]:
    """A syncer that reads and judges candidates so."""

    class LoadingSyncer(Syncer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.loader = loader(self.run, self.arithmetic, self.inbox, self.recover)

    return LoadingSyncer


class NoDigests(Loader):
    """Merges a payload whatever its bytes are."""

    def load(self, state: RunState) -> Steps[list[Offer]]:
        sound = []
        for offer in self.inbox.candidates(state.slot):
            if offer.id not in self.loaded:
                loaded = yield from self._load(state, offer)
                if loaded is None or isinstance(loaded, str):
                    self.inbox.drop(offer, loaded or "missing_payload")
                    continue
                self.loaded[offer.id] = loaded
            sound.append(offer)
        return sound

    def _load(self, state: RunState, offer: Offer) -> Steps[Any]:
        yield from make_resident(self.run, self.arithmetic, state.outputs[offer.fragment], self.recover)
        payload: bytes | None = yield Get(delta_key(*offer.id, offer.payload_digest), MAX_RECORD_BYTES)
        base = state.version(offer.fragment, offer.base)
        if payload is None or base is None:
            return None
        weights = None
        if base != state.outputs[offer.fragment]:
            key = weights_key(base.fragment, base.version, base.epoch, base.weights_digest)
            weights = yield Get(key, MAX_RECORD_BYTES)
        try:
            return self.arithmetic.read_delta(offer, payload, weights)
        except ValueError:  # half a number is none
            return "bad_payload"


class Gullible(IntegerArithmetic):
    """Merges what is not a number."""

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> Any | str:
        return Delta(7, offer, 7.0, 7) if payload == b"delta:nan" else super().read_delta(offer, payload, decoded_base)


class NoReadBack(Syncer):
    """Commits what it has written, without having seen it again."""

    def _publish(self, fragment: int, merged: Merged, version: int, slot: int) -> Steps[FragmentVersion]:
        output = FragmentVersion(fragment, version, slot, self.epoch, digest(merged.state), digest(merged.weights))
        yield Create(state_key(fragment, version, self.epoch, output.state_digest), merged.state)
        yield Create(weights_key(fragment, version, self.epoch, output.weights_digest), merged.weights)
        return output


class StateAlone(Syncer):
    """Commits a version of which it has written the state, and forgotten the weights."""

    def _publish(self, fragment: int, merged: Merged, version: int, slot: int) -> Steps[FragmentVersion]:
        output = FragmentVersion(fragment, version, slot, self.epoch, digest(merged.state), digest(merged.weights))
        yield from write_surely(state_key(fragment, version, self.epoch, output.state_digest), merged.state)
        return output


class NoLastOutcomes(Syncer):
    """Ends the run without a word on what is outstanding."""

    def _finish(self) -> Steps[bool]:
        self.inbox.refuse_all = lambda reason: None  # type: ignore[method-assign]
        return (yield from super()._finish())


class Mute(Inbox):
    """Refuses, and tells nobody: only what is merged gets its outcome."""

    def refuse(self, offer: Offer, reason: str) -> None:
        pass


# -- mirrors, and who serves --------------------------------------------------------------------------------------


class GapInTheMirror(Mirror):
    """Passes over a commit."""

    def _mirror_next(self) -> Steps[None]:
        if self.state.n + 1 != 4:
            return (yield from super()._mirror_next())
        self.state = log.fold(self.run, self.state, (yield from self._of_home(commit_key(4))))
        return None


@dataclass
class WallClockLease(Standby):
    """Takes over when its own wall clock is so far beyond the time that the last commit notes."""

    _started_s: float | None = field(default=None, init=False)

    def wait(self) -> Steps[str | None]:
        started_s: float = yield Now()
        state: RunState = yield from log.read_log(self.run)
        while state.phase == "RUNNING":
            own_s = datetime.fromisoformat(self.claim.started_at).timestamp() + (yield Now()) - started_s
            if state.n >= 0 and own_s - datetime.fromisoformat(state.metrics.updated_at).timestamp() > 5.0:
                return f"the lease of epoch {state.epoch} has expired"
            yield Sleep(0.2)
            state = yield from log.read_log(self.run, state)
        return None
