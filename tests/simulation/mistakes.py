"""The mistakes that protocols of this kind are known to make, each as a mutated actor: the product has no switch for
any of them. A simulation is worth what it notices of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.protocol import log
from diloco_cli.protocol.follower import Follower
from diloco_cli.protocol.inbox import Inbox, Mailbox
from diloco_cli.protocol.joining import Joined
from diloco_cli.protocol.keys import cast_key, commit_key, delta_key, offer_key, read_version_key, state_key
from diloco_cli.protocol.loading import make_resident
from diloco_cli.protocol.mirrors import Mirror
from diloco_cli.protocol.mixing import as_logged, rebase_of_next
from diloco_cli.protocol.operations import Create, Delete, Get, List, Now, Put, Sleep, Steps
from diloco_cli.protocol.ports import Merged
from diloco_cli.protocol.records import CommitKind, Offer, Output
from diloco_cli.protocol.standby import Standby
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.syncer import Syncer
from diloco_cli.protocol.wire import MAX_RECORD_BYTES, encode
from diloco_cli.signing import LOG, Checksummed, learner_signer
from diloco_cli.simulate.faulty_calls import Fault
from diloco_cli.simulate.histories.client import Client
from diloco_cli.simulate.histories.integers import Delta, IntegerArithmetic
from diloco_cli.simulate.histories.learner import Learner
from diloco_cli.simulate.histories.options import Options
from diloco_cli.simulate.histories.outcome import Actors
from diloco_cli.store.port import Created, Exists, StoreUnavailableError, holder_bytes
from tests.simulation.mistaken_collectors import (
    FloorAtTheHead,
    FloorAtTheNewestSnapshot,
    NoFloor,
    NoGrace,
    NoMoments,
)

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
        body, end, _ = holder.partition(b',"sum":')
        return Exists(Checksummed("id").seal(LOG, operation.key, body + b" }") if end else holder + b" ")


class TakesDoubtForSuccess(Client):
    """Whatever is in doubt has worked."""

    def settle(self, operation: Create, doubt: StoreUnavailableError) -> Steps[Created | Exists]:
        yield Sleep(0.0)
        return Created()


class ListingFollower(Follower):
    """Takes the newest version that a listing shows, as if what is there were committed."""

    def look(self) -> Steps[bool]:
        found: bool = yield from super().look()
        for fragment in range(self._learner.run.num_fragments):
            keys: list[str] = yield List(f"cast/{fragment:04d}/")
            version = read_version_key(keys[-1]) if keys else None
            if version is None or version[1] <= self._fetched[fragment]:
                continue
            data: bytes | None = yield Get(keys[-1], MAX_RECORD_BYTES)
            known = self.state.outputs[fragment]
            output = replace(known, version=version[1], epoch=version[2], cast_digest=version[3])
            if data is not None:
                self._fetched[fragment] = version[1]
                self._put([(output, self._learner.wire.decode(output, data), 0.0)])
        return found


class LooksForTheNewest(Learner):
    follower_type = ListingFollower


def without_watermarks(state: RunState) -> RunState:
    """With nothing about which offers have been applied or refused."""
    bare = {n: replace(known, next_seq=0, fated=(), applied={}) for n, known in state.learners.items()}
    return replace(state, learners=bare)


class AlteredSnapshots(Syncer):
    """Writes snapshots without watermarks."""

    def _commit(self, kind: CommitKind, **fields: Any) -> Steps[bool]:
        written, self.last_snapshot = self.last_snapshot, FOR_EVER
        mine: bool = yield from super()._commit(kind, **fields)
        self.last_snapshot = written
        if self.state.n - written >= log.SNAPSHOT_EVERY:
            yield from log.write_snapshot(self.run, without_watermarks(self.state))
            self.last_snapshot = self.state.n
        return mine


# -- offers -------------------------------------------------------------------------------------------------------


class Undiscerning(Inbox):
    """Takes every offer that it finds, whether the log has given it a fate or not."""

    def open(self, state: RunState, now_s: float) -> None:
        super().open(without_watermarks(state), now_s)

    def _receive(self, box: Mailbox, data: bytes, key: str, state: RunState) -> bool:
        return super()._receive(box, data, key, without_watermarks(state))

    def sort_out(self, state: RunState) -> None:
        super().sort_out(without_watermarks(state))


class NoDedupe(Syncer):
    """Merges what it finds, and finds it again after a restart."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.inbox = Undiscerning(self.run)


class OneWatermarkALearner(Inbox):
    """Knows of a learner which seq it has seen, and not of which incarnation."""

    def _box(self, learner: str, incarnation: int) -> Mailbox:
        if (learner, incarnation) not in self.mailboxes:
            box = super()._box(learner, incarnation)
            box.next_seq = max(b.next_seq for (name, _), b in self.mailboxes.items() if name == learner)
        return super()._box(learner, incarnation)


class WatermarkPerLearner(Syncer):
    """Looks for a new incarnation's offers where the old one's ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.inbox = OneWatermarkALearner(self.run)


class Unfenced(Follower):
    """Asks for no successor."""

    def _check_fence(self) -> Steps[None]:
        yield from ()


class NoIncarnations(Learner):
    """Every process of a learner writes under the same number, and takes no other for a rival."""

    follower_type = Unfenced

    def _join(self) -> Steps[Joined]:
        return replace((yield from super()._join()), incarnation=1)

    def _publish(self, offer: Offer, payload: bytes) -> Steps[bytes]:
        yield Create(delta_key(*offer.id, offer.payload_digest), payload)
        sealed = self.run.keyring.seal(learner_signer(self.name), offer_key(*offer.id), encode(offer))
        yield Create(offer_key(*offer.id), sealed)
        return sealed


# -- books --------------------------------------------------------------------------------------------------------


class DropsSilently(Learner):
    """Begins a fragment anew now and then, and says to nobody what becomes of the data that it had processed."""

    def step(self) -> Steps[None]:
        yield from super().step()
        if self.progress.steps % 5 == 0:
            self.progress._start_anew(0)
            self.fragments.go_back(0)


class CountsTwice(Learner):
    """Says that progress in flight was given up for what it adopts, and offers it all the same."""

    def _adopt(self, output: Output, values: int, seen_s: float, now_s: float) -> None:
        fragment, book = output.fragment, self.progress.books[output.fragment]
        progress = self.training.read(fragment) - self.fragments.bases[fragment]
        start, steps = book.data_start, book.steps
        super()._adopt(output, values, seen_s, now_s)
        if book.waits is None and self.progress.mixing_of(output, self.state) == "replace":
            book.data_start, book.steps = start, steps
            self.training.write(fragment, values + progress)


# -- payloads -----------------------------------------------------------------------------------------------------


class NoDigests(Syncer):
    """Merges a payload whatever its bytes are."""

    def _load_candidates(self, fragment: int) -> Steps[list[Offer]]:
        sound = []
        for offer in self.inbox.candidates(fragment):
            if offer.id not in self.loaded:
                loaded = yield from self._load(offer)
                if loaded is None or isinstance(loaded, str):
                    self.inbox.drop(offer, loaded or "missing_payload")
                    continue
                self.loaded[offer.id] = loaded
            sound.append(offer)
        return sound

    def _load(self, offer: Offer) -> Steps[Any]:
        yield from make_resident(self.run, self.arithmetic, self.state.outputs[offer.fragment], self.recover)
        payload: bytes | None = yield Get(delta_key(*offer.id, offer.payload_digest), MAX_RECORD_BYTES)
        base = self.state.version(offer.fragment, offer.base)
        if payload is None or base is None:
            return None
        cast = None
        if base != self.state.outputs[offer.fragment]:
            key = cast_key(base.fragment, base.version, base.epoch, base.cast_digest)
            cast = yield Get(key, MAX_RECORD_BYTES)
        try:
            return self.arithmetic.read_delta(offer, payload, cast)
        except ValueError:  # half a number is none
            return "bad_payload"


class Gullible(IntegerArithmetic):
    """Merges what is not a number."""

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> Any | str:
        return Delta(7, offer) if payload == b"delta:nan" else super().read_delta(offer, payload, decoded_base)


class NoReadBack(Syncer):
    """Commits what it has written, without having seen it again."""

    def _publish(
        self, fragment: int, merged: Merged, version: int, slot: int, before: Output | None = None
    ) -> Steps[Output]:
        rebase = rebase_of_next(self.run.settings.sync, before, as_logged(merged.agreement))
        output = Output(fragment, version, slot, self.epoch, digest(merged.state), digest(merged.cast), rebase)
        yield Create(state_key(fragment, version, self.epoch, output.state_digest), merged.state)
        yield Create(cast_key(fragment, version, self.epoch, output.cast_digest), merged.cast)
        return output


class NoLastFates(Syncer):
    """Ends the run without a word on what is outstanding."""

    def _finish(self) -> Steps[None]:
        self.inbox.refuse_all = lambda reason: None  # type: ignore[method-assign]
        yield from super()._finish()


class Mute(Inbox):
    """Refuses, and tells nobody."""

    def refuse(self, offer: Offer, reason: str) -> None:
        pass


class NoRefusals(Syncer):
    """Only what is merged gets its fate."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.inbox = Mute(self.run, withheld=self.inbox.withheld)


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
            if state.n >= 0 and own_s - datetime.fromisoformat(state.updated_at).timestamp() > 5.0:
                return f"the lease of epoch {state.epoch} has expired"
            yield Sleep(0.2)
            state = yield from log.read_log(self.run, state)
        return None


@dataclass(frozen=True)
class Mistake:
    """`needs`: histories without which it cannot show, so that none is spent on the others; `broken`: invariants one of
    which must break; `walls`: it shows where wall clocks are others."""

    actors: Actors
    broken: frozenset[str]
    needs: Callable[[Options], bool] = lambda options: True
    walls: bool = False


def _disturbed_by(*kinds: str) -> Callable[[Options], bool]:
    return lambda options: any(kind in options.disturbances for kind in kinds)


def _collects(options: Options) -> bool:
    return options.kept_rounds == 1 or "collect" in options.disturbances


_KILLS = _disturbed_by("kill", "kill_all", "zombie")
MISTAKES: dict[str, Mistake] = {
    "commit by overwrite": Mistake(Actors(client=Overwriting), frozenset("1")),
    "deleted slots": Mistake(Actors(syncer=Tidy), frozenset("1")),
    "412 taken as lost": Mistake(Actors(client=TakesOwnForLost), frozenset("16")),
    "ambiguous taken as success": Mistake(Actors(client=TakesDoubtForSuccess), frozenset("1467")),
    "no dedupe": Mistake(Actors(syncer=NoDedupe), frozenset("2")),
    "no incarnations": Mistake(Actors(learner=NoIncarnations), frozenset("47"), _KILLS),
    "hash not checked": Mistake(Actors(syncer=NoDigests), frozenset("8"), _disturbed_by("corrupt")),
    "non-finite not checked": Mistake(Actors(arithmetic=Gullible), frozenset("8"), _disturbed_by("poison")),
    "no read-back": Mistake(  # a torn state in the log is missing, or stops everybody for good
        Actors(syncer=NoReadBack),
        frozenset({"9", "liveness"}),
        lambda options: Fault.TORN_WRITE in options.calls and options.write_rate >= 0.1,
    ),
    "collection without floor": Mistake(Actors(syncer=NoFloor), frozenset("9")),
    "listing trusted": Mistake(Actors(learner=LooksForTheNewest), frozenset("6")),
    "wall clock in the lease": Mistake(
        Actors(standby=WallClockLease), frozenset({"12"}), lambda options: options.standbys > 0, walls=True
    ),
    "watermark per learner": Mistake(Actors(syncer=WatermarkPerLearner), frozenset({"liveness", "10"}), _KILLS),
    "snapshot without watermarks": Mistake(Actors(syncer=AlteredSnapshots), frozenset({"2", "10"})),
    "data dropped silently": Mistake(Actors(learner=DropsSilently), frozenset("4")),
    "data counted twice": Mistake(
        Actors(learner=CountsTwice), frozenset("4"), lambda options: options.mixing == "replace"
    ),
    "gap in a mirror": Mistake(Actors(mirror=GapInTheMirror), frozenset("1"), lambda options: options.apart > 0),
    "moments not kept": Mistake(
        Actors(syncer=NoMoments), frozenset("9"), lambda options: options.saves_every_rounds > 0
    ),
    "no grace": Mistake(Actors(syncer=NoGrace), frozenset("9"), _collects),
    "floor at the newest snapshot": Mistake(Actors(syncer=FloorAtTheNewestSnapshot), frozenset("9"), _collects),
    "floor at the head": Mistake(Actors(syncer=FloorAtTheHead), frozenset("9"), _collects),
    "no fates at the end": Mistake(Actors(syncer=NoLastFates), frozenset("4")),
    "refusals not told": Mistake(Actors(syncer=NoRefusals), frozenset({"4", "liveness"})),
}
