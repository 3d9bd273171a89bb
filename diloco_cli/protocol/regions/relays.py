"""Relays carry what the learners of a region write in its bucket to the home bucket, where the syncer reads it.

    a region's bucket                      home bucket
    incarnation/<learner>/<i>       ->     the same bytes under the same key, create-once
    delta/..., then offer/...       ->     the same, in the order of their numbers
    heartbeat/<learner>             ->     overwritten, when it has changed
    join/<learner>/...              ->     the same bytes under the same key, create-once

So a merge never waits for a region: an offer counts once it is at home, and the home bucket has all that a replay
needs. A relay asks only for learners that FORMAT or a membership commit binds to its region, at the syncer's pace: a
learner's stated pace can neither hide its offers nor cost more requests. `withheld` keeps the syncer from reading an
offer of such a learner at home that was not seen in its region's bucket: another process may have written it. If home
holds other bytes under a learner's key, the relay gives up that mailbox alone, and `unheard` says why; the learner's
next incarnation has keys of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diloco_cli.protocol.actors.inbox import (
    MAX_OFFERS_PER_POLL,
    MAX_PENDING_ROUNDS,
    PolledMailbox,
    kept_mailboxes,
    replaced,
)
from diloco_cli.protocol.actors.membership import JoinQueue
from diloco_cli.protocol.actors.merging import read_payload
from diloco_cli.protocol.log.claims import ClaimWatch, LearnerKeys
from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES, LearnerHeartbeat
from diloco_cli.protocol.log.keys import (
    delta_key,
    heartbeat_key,
    incarnation_key,
    incarnation_of,
    key_of,
    number_of,
    offer_key,
)
from diloco_cli.protocol.log.operations import Create, Get, Now, Put, Sleep, Steps, There, there, together
from diloco_cli.protocol.log.records import Offer, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, RecordError, create_signed, decode, read_signed
from diloco_cli.protocol.regions.mirrors import HeadOf
from diloco_cli.protocol.rules.eligibility import has_possible_size, is_well_formed
from diloco_cli.protocol.rules.pacing import POLL_BOUNDS_S, pause_s, watch_every_s
from diloco_cli.signing import learner_signer
from diloco_cli.store.port import Created

HEARTBEATS_EVERY_S = 3.0
LAST_WORDS_S = 4.0

OTHER_BYTES = "the home bucket holds other bytes than the region's"

PaceOf = Callable[[], float]
"""How long a slot takes, as the syncer of this process measures it."""
Tell = Callable[[str], None]


@dataclass
class Box(PolledMailbox):
    """All offers before `next_seq` are at home, or have their outcome. `compares`: until the first offer that is not at
    home yet, because then home has no later ones either."""

    compares: bool = True


@dataclass
class Relay:
    """The relay of one region in one syncer process. `tell` is called with texts for people; `unheard`: these texts by
    the incarnation whose mailbox was given up; `_opened`: the number up to which mailboxes were opened, by key."""

    run: RunFormat
    region: str
    head: HeadOf
    pace: PaceOf
    leaving: Callable[[], bool] = lambda: False
    tell: Tell = lambda line: None
    boxes: dict[tuple[str, int], Box] = field(default_factory=dict)
    unheard: dict[tuple[str, int], str] = field(default_factory=dict)
    claims: dict[tuple[str, int], ClaimWatch] = field(default_factory=dict)
    offers: int = 0
    _heartbeats: dict[str, bytes] = field(default_factory=dict)
    _opened: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.joins, self.keys = JoinQueue(self.run), LearnerKeys(self.run.keyring)

    def serve(self) -> Steps[None]:
        next_rare_s = next_heartbeats_s = yield Now()
        while not self.leaving():
            if self.head().n < 0:  # the log says where each learner stands
                yield Sleep(POLL_BOUNDS_S[1])
                continue
            now_s: float = yield Now()
            if now_s >= next_rare_s:
                next_rare_s = now_s + watch_every_s(self.pace())
                yield from self._incarnations(now_s)
                yield from self._joins()
            if now_s >= next_heartbeats_s:
                next_heartbeats_s = now_s + HEARTBEATS_EVERY_S
                yield from self._carry_heartbeats()
            if not (yield from self._carry_offers(now_s)):
                yield Sleep(pause_s(self.pace()))
        yield from self._last_words()

    def _last_words(self) -> Steps[None]:
        """Carry the learners' last heartbeats, which they write after the run's end, for LAST_WORDS_S at most."""
        began_s: float = yield Now()
        while (yield Now()) - began_s < LAST_WORDS_S:
            yield from self._carry_heartbeats()
            if all(_has_left(heartbeat) for heartbeat in self._heartbeats.values()):
                return
            yield Sleep(POLL_BOUNDS_S[1])

    def withheld(self, learner: str, incarnation: int, seq: int) -> bool:
        """Whether an offer that lies at home has not been seen in its learner's own bucket (yet)."""
        box = self.boxes.get((learner, incarnation))
        return box is None or seq >= box.next_seq

    def _learners(self, state: RunState) -> list[str]:
        return [island.name for island in state.with_members(self.run).all_islands if island.region == self.region]

    # -- incarnations, heartbeats, requests ----------------------------------------------------------------------------

    def _incarnations(self, now_s: float) -> Steps[None]:
        """Look for new incarnations, and carry home the claims of those whose offers are asked for, and their keys."""
        state = self.head()
        self.keys.keyring = self.run.keyring.without(state.revoked)
        for certificate in (yield from there(self.keys.look())):
            yield Create(*certificate)
        learners = self._learners(state)
        watches = [self._watch(name, key, state) for name in learners for key in self.keys.of(name)]
        beyond = {name: number_of(state.learner(name).floor) for name in learners}
        for watch in watches:
            beyond[watch.learner] = max(beyond[watch.learner], watch.newest)
        yield from there(together([watch.look(beyond[watch.learner]) for watch in watches]))
        for watch in watches:
            floor, of = state.learner(watch.learner), (watch.learner, watch.key)
            known, self._opened[of] = self._opened[of], watch.newest
            for incarnation in kept_mailboxes(watch.key, known, watch.newest):
                next_seq = floor.next_seq if incarnation == floor.floor else 0
                box = Box(watch.learner, incarnation, next_seq, now_s)
                yield from self._carry_claim(box)
                self.boxes[box.learner, box.incarnation] = box
        self._retire(state, now_s)

    def _watch(self, learner: str, key: int, state: RunState) -> ClaimWatch:
        if (learner, key) not in self.claims:
            floor = state.learner(learner).floor
            watch = self.claims[learner, key] = ClaimWatch.beside(self.run.keyring, learner, key, floor)
            self._opened[learner, key] = watch.newest - (floor > 0 and key_of(floor) == key)  # the floor's opens, too
        return self.claims[learner, key]

    def _carry_claim(self, box: Box) -> Steps[None]:
        key = incarnation_key(box.learner, box.incarnation)
        claim = yield from there(self._read(box, key))
        if claim is not None and self._is_record(box, key, claim):
            yield from self._carry_record(box, key, claim)

    def claimed(self, learner: str) -> tuple[int, ...]:
        """The newest incarnation of a learner under each of its keys that was seen in its own bucket."""
        state, found = self.head(), list(self.claims.items())  # the syncer's thread asks
        newest = (incarnation_of(watch.newest, key) for (name, key), watch in found if name == learner and watch.newest)
        return tuple(incarnation for incarnation in newest if state.counts(incarnation))

    def _retire(self, state: RunState, now_s: float) -> None:
        """Give up the mailboxes of incarnations that are replaced, settled, or under a revoked key."""
        for learner in {name for name, _ in self.boxes}:
            boxes = [box for box in self.boxes.values() if box.learner == learner]
            newest, floor = max(boxes, key=lambda box: box.incarnation), state.learner(learner).floor
            gone = {box.incarnation for box in boxes if box.incarnation < floor or not state.counts(box.incarnation)}
            left = [(learner, box.incarnation) for box in boxes if box is not newest and box.incarnation not in gone]
            for key in {(learner, incarnation) for incarnation in gone} | set(replaced(left, newest, now_s)):
                del self.boxes[key]
                self.unheard.pop(key, None)

    def _carry_heartbeats(self) -> Steps[None]:
        """Copy heartbeats unchecked: they are hints, and readers at home check them."""
        yield from together([self._carry_heartbeat(name) for name in self._learners(self.head())])

    def _carry_heartbeat(self, name: str) -> Steps[None]:
        heartbeat = yield There(Get(heartbeat_key(name), MAX_HEARTBEAT_BYTES))
        if heartbeat is None or len(heartbeat) > MAX_HEARTBEAT_BYTES or heartbeat == self._heartbeats.get(name):
            return
        yield Put(heartbeat_key(name), heartbeat)
        self._heartbeats[name] = heartbeat

    def _joins(self) -> Steps[None]:
        """Carry requests to join this region. Home reads them as if they had been written there."""
        for found in (yield from there(self.joins.look(self.head()))):
            if found.island.region == self.region:
                yield Create(found.key, found.data)

    # -- offers ---------------------------------------------------------------------------------------------------

    def _carry_offers(self, now_s: float) -> Steps[bool]:
        """Carry new offers of the mailboxes that are due; True if there were any."""
        due = [
            box for key, box in sorted(self.boxes.items()) if key not in self.unheard and now_s >= box.next_request_s
        ]
        return any((yield from together([self._carry_portion(box, now_s) for box in due])))

    def _carry_portion(self, box: Box, now_s: float) -> Steps[bool]:
        found_any = False
        for _ in range(MAX_OFFERS_PER_POLL):
            if not (yield from self._carry_offer(box, now_s)):
                break
            box.found_s, found_any = now_s, True
        box.asked(now_s, self.pace())
        return found_any

    def _carry_offer(self, box: Box, now_s: float) -> Steps[bool]:
        known = self.head().learner(box.learner)
        settled = known.next_seq if box.incarnation == known.floor else 0
        box.next_seq = max(box.next_seq, settled)
        if box.next_seq - settled >= MAX_PENDING_ROUNDS * self.run.num_fragments:
            return False  # a flood must not fill the home bucket
        key = offer_key(box.learner, box.incarnation, box.next_seq)
        found = yield from there(box.look(self.run.keyring))
        if found.damaged:
            yield from self._carry_damaged(key)
        elif found.data is None or not (yield from self._carry_sound(box, key, found.data)):
            return False
        box.next_seq += 1
        self.offers += 1
        return True

    def _carry_sound(self, box: Box, key: str, data: bytes) -> Steps[bool]:
        """Carry a genuine offer home, unless it is there; False if that failed."""
        if not self._is_record(box, key, data):
            return False
        at_home = (yield from self._read(box, key)) if box.compares else None
        box.compares = at_home is not None
        if at_home is None:
            return (yield from self._carry_payload(box, data, key)) and (yield from self._carry_record(box, key, data))
        return at_home == data or (yield from self._agree_on_record(box, key))

    def _read(self, box: Box, key: str) -> Steps[bytes | None]:
        signer = learner_signer(box.learner)
        data = yield from read_signed(self.run.keyring, signer, key)
        return data if data is not None and self.run.keyring.authenticates(signer, key, data) else None

    def _carry_damaged(self, key: str) -> Steps[None]:
        """Only at home can such an offer get its outcome."""
        data = yield There(Get(key, MAX_RECORD_BYTES))
        if data is not None:
            yield Create(key, data)

    def _carry_payload(self, box: Box, data: bytes, key: str) -> Steps[bool]:
        """Carry an offer's payload if the offer is well formed; the syncer refuses any other. False if home has other
        bytes under the payload's key, or if the offer must be read again."""
        try:
            offer = decode(Offer, data, key)
        except RecordError:  # the offer is bad, or the read damaged it, and then it must not be carried home
            return bool(data == (yield There(Get(key, MAX_RECORD_BYTES))))
        if offer.id != (box.learner, box.incarnation, box.next_seq) or not is_well_formed(offer):
            return True
        if not has_possible_size(offer, self.run):
            return True
        box.slot_s = offer.timings.slot_s
        if offer.payload_bytes == 0:
            return True
        payload = yield from there(read_payload(offer))
        if not isinstance(payload, bytes):
            return True
        return (yield from self._carry(box, delta_key(*offer.id, offer.payload_digest), payload))

    def _carry_record(self, box: Box, key: str, data: bytes) -> Steps[bool]:
        """Write a claim or an offer at home; False if home holds another one of its learner."""
        at_home = yield from create_signed(self.run.keyring, learner_signer(box.learner), key, data)
        return at_home == data or (yield from self._agree_on_record(box, key))

    def _agree_on_record(self, box: Box, key: str) -> Steps[bool]:
        same = (yield from self._read(box, key)) == (yield from there(self._read(box, key)))
        return same or self._give_up(box, f"{key}: {OTHER_BYTES}")

    def _carry(self, box: Box, key: str, data: bytes) -> Steps[bool]:
        """Write the bytes at home; False if home holds other bytes under the key."""
        answer = yield Create(key, data)
        if isinstance(answer, Created) or answer.data == data:
            return True
        return (yield from self._agree(box, key, len(data)))

    def _agree(self, box: Box, key: str, max_bytes: int) -> Steps[bool]:
        """Bytes that differ once may have been damaged in the read; if they differ twice, a person must look."""
        same = (yield Get(key, max_bytes)) == (yield There(Get(key, max_bytes)))
        return same or self._give_up(box, f"{key}: {OTHER_BYTES}")

    def _is_record(self, box: Box, key: str, data: bytes) -> bool:
        return len(data) <= MAX_RECORD_BYTES or self._give_up(box, f"{key}: it is larger than any record")

    def _give_up(self, box: Box, why: str) -> bool:
        """Stop carrying this mailbox's offers and tell why: only a person can find the cause."""
        text = f"{why}; find out who wrote it, then start {box.learner} again: its next incarnation has keys of its own"
        self.unheard[box.learner, box.incarnation] = text
        self.tell(f"{box.learner} is not heard: {text}")
        return False


def withheld_by(relays: Mapping[str, Relay], run: RunFormat, head: HeadOf) -> Callable[[str, int, int], bool]:
    """Inbox.withheld for a run with regions: whether the region's relay has not seen a learner's offer yet. `relays` by
    region."""

    def withheld(learner: str, incarnation: int, seq: int) -> bool:
        island = head().with_members(run).island(learner)
        relay = None if island is None else relays.get(island.region)
        return relay is not None and relay.withheld(learner, incarnation, seq)

    return withheld


def claimed_by(relays: Mapping[str, Relay], run: RunFormat, head: HeadOf) -> Callable[[str], tuple[int, ...]]:
    """Inbox.claimed for a run with regions."""

    def claimed(learner: str) -> tuple[int, ...]:
        island = head().with_members(run).island(learner)
        relay = None if island is None else relays.get(island.region)
        return () if relay is None else relay.claimed(learner)

    return claimed


def _has_left(heartbeat: bytes) -> bool:
    try:
        return decode(LearnerHeartbeat, heartbeat, "heartbeat").state in ("DONE", "FAILED")
    except RecordError:
        return True  # nothing to wait for
