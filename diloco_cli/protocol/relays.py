"""What the learners of a region write in its bucket is carried to the home bucket, where the syncer finds it.

    a region's bucket                      home bucket
    incarnation/<learner>/<i>       ->     the same bytes under the same key, create-once
    delta/..., then offer/...       ->     the same, in the order of their numbers
    beat/<learner>                  ->     overwritten, when it has changed
    request/<r>, if of kind join    ->     request/<home's next number>

So a merge never waits for a region: an offer counts once it is at home, and everything that a replay needs lies there.

Only learners that FORMAT or a membership commit binds to this region are asked for. `withheld` keeps the syncer from
what lies at home in such a learner's name and was not seen in its region's bucket: offers from elsewhere do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_cli.protocol.beats import LearnerBeat
from diloco_cli.protocol.eligibility import is_well_formed
from diloco_cli.protocol.inbox import MAX_CLAIMS_PER_LOOK, MAX_OFFERS_PER_POLL, MAX_PENDING_ROUNDS, RETIRE_S
from diloco_cli.protocol.keys import beat_key, delta_key, incarnation_key, offer_key
from diloco_cli.protocol.loading import read_payload
from diloco_cli.protocol.mirrors import HeadOf, stopped
from diloco_cli.protocol.operations import Create, Get, List, Now, Put, Sleep, Steps, There, there
from diloco_cli.protocol.polling import next_request_s, watch_every_s
from diloco_cli.protocol.records import Offer, Request, RunFormat
from diloco_cli.protocol.requests import ask, signer_of
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.wire import MAX_RECORD_BYTES, RecordError, decode
from diloco_cli.store.port import Created

POLL_BOUNDS_S = (0.02, 0.5)
BEATS_EVERY_S = 3.0
LARGEST_BEAT_BYTES = 1 << 16
LAST_WORDS_S = 4.0
MOST_REQUESTS = 16  # to join, carried at once


@dataclass
class Box:
    """The offers of one incarnation of one learner. `next_seq`: all before it are at home, or have their fate.

    `compares`: until the first offer that is not at home yet; then there are no later ones."""

    learner: str
    incarnation: int
    next_seq: int = 0
    since_s: float = 0.0
    found_s: float | None = None
    slot_s: float = 0.0
    next_request_s: float = 0.0
    compares: bool = True


@dataclass
class Relay:
    """Of one region, for as long as one syncer process serves. Raises RegionStoppedError where home holds other bytes
    under a learner's key than its region."""

    run: RunFormat
    region: str
    head: HeadOf
    leaving: Callable[[], bool] = lambda: False
    boxes: dict[tuple[str, int], Box] = field(default_factory=dict)
    offers: int = 0
    _beats: dict[str, bytes] = field(default_factory=dict)
    _after_request: str = ""

    def serve(self) -> Steps[None]:
        next_rare_s = next_beats_s = yield Now()
        while not self.leaving():
            if self.head().n < 0:  # the log says where each learner stands
                yield Sleep(POLL_BOUNDS_S[1])
                continue
            now_s: float = yield Now()
            if now_s >= next_rare_s:
                next_rare_s = now_s + watch_every_s(self._slot_s())
                yield from self._incarnations(now_s)
                yield from self._requests()
            if now_s >= next_beats_s:
                next_beats_s = now_s + BEATS_EVERY_S
                yield from self._carry_beats()
            if not (yield from self._carry_offers(now_s)):
                low, high = POLL_BOUNDS_S
                yield Sleep(min(high, max(low, self._slot_s() / 20)))
        yield from self._last_words()

    def _last_words(self) -> Steps[None]:
        """Learners hear of the end through their own bucket, and say goodbye there: for `status`, within reason."""
        began_s: float = yield Now()
        while (yield Now()) - began_s < LAST_WORDS_S:
            yield from self._carry_beats()
            if all(_has_left(beat) for beat in self._beats.values()):
                return
            yield Sleep(POLL_BOUNDS_S[1])

    def withheld(self, learner: str, incarnation: int, seq: int) -> bool:
        """Whether an offer that lies at home has not been seen in its learner's own bucket (yet)."""
        box = self.boxes.get((learner, incarnation))
        return box is None or seq >= box.next_seq

    def is_bound_here(self, learner: str) -> bool:
        island = self.head().with_members(self.run).island(learner)
        return island is not None and island.region == self.region

    def _slot_s(self) -> float:
        return min((box.slot_s for box in self.boxes.values() if box.slot_s > 0), default=0.0)

    def _learners(self, state: RunState) -> list[str]:
        return [island.name for island in state.with_members(self.run).everybody if island.region == self.region]

    # -- incarnations, beats, requests ----------------------------------------------------------------------------

    def _incarnations(self, now_s: float) -> Steps[None]:
        state = self.head()
        for name in self._learners(state):
            floor = max(1, state.learner(name).floor)
            newest = max((number for learner, number in self.boxes if learner == name), default=floor - 1)
            for _ in range(MAX_CLAIMS_PER_LOOK):
                claim = yield There(Get(incarnation_key(name, newest + 1)))
                if claim is None:
                    break
                newest += 1
                yield from self._carry(incarnation_key(name, newest), claim)
                known = state.learner(name)
                first = known.next_seq if newest == known.floor else 0
                self.boxes[name, newest] = Box(name, newest, first, since_s=now_s)
            self._retire(name, floor, newest, now_s)

    def _retire(self, name: str, floor: int, newest: int, now_s: float) -> None:
        """Nobody looks for ever after the offers of a process that was replaced long ago."""
        replaced = newest > 0 and (name, newest) in self.boxes and now_s - self.boxes[name, newest].since_s >= RETIRE_S
        old = [
            key for key in self.boxes
            if key[0] == name and key[1] != newest and (key[1] < floor or replaced)
        ]  # fmt: skip
        for key in old:
            del self.boxes[key]

    def _carry_beats(self) -> Steps[None]:
        """Hints, as they are: whoever reads them at home judges them."""
        for name in self._learners(self.head()):
            beat = yield There(Get(beat_key(name)))
            if beat is not None and len(beat) <= LARGEST_BEAT_BYTES and beat != self._beats.get(name):
                self._beats[name] = beat
                yield Put(beat_key(name), beat)

    def _requests(self) -> Steps[None]:
        """Islands that want to join here; each asks at home once. Where they stand in line is home's matter."""
        keys: list[str] = yield There(List("request/", self._after_request, MOST_REQUESTS))
        for key in keys:
            data = yield There(Get(key))
            self._after_request = key
            try:
                request = decode(Request, data or b"", key)
            except RecordError:
                continue
            island, keyring = request.island, self.run.keyring
            if not keyring.is_genuine(signer_of(request.kind, island), key, data or b""):
                continue  # at home it gets another key, and there nobody could tell
            if request.kind != "join" or island is None or island.region != self.region:
                continue
            if self.head().with_members(self.run).island(island.name) is None:
                yield from ask(self.head(), "join", request.nonce, request.time, island=island, keyring=keyring)

    # -- offers ---------------------------------------------------------------------------------------------------

    def _carry_offers(self, now_s: float) -> Steps[bool]:
        """What has appeared in the mailboxes whose time it is; True if there was anything."""
        found_any = False
        for key in sorted(self.boxes):
            box = self.boxes[key]
            if now_s < box.next_request_s:
                continue
            for _ in range(MAX_OFFERS_PER_POLL):
                if not (yield from self._carry_offer(box)):
                    break
                box.found_s, found_any = now_s, True
            box.next_request_s = next_request_s(box.found_s, now_s, box.slot_s)
        return found_any

    def _carry_offer(self, box: Box) -> Steps[bool]:
        known = self.head().learner(box.learner)
        settled = known.next_seq if box.incarnation == known.floor else 0
        box.next_seq = max(box.next_seq, settled)
        if box.next_seq - settled >= MAX_PENDING_ROUNDS * self.run.num_fragments:
            return False  # a flood must not fill the home bucket
        key = offer_key(box.learner, box.incarnation, box.next_seq)
        data = yield There(Get(key))
        if data is None or len(data) > MAX_RECORD_BYTES:
            return False
        at_home = (yield Get(key)) if box.compares else None
        box.compares = at_home is not None
        if at_home is None:
            yield from self._carry_payload(box, data, key)
            yield from self._carry(key, data)
        elif at_home != data:
            raise stopped(key)
        box.next_seq, self.offers = box.next_seq + 1, self.offers + 1
        return True

    def _carry_payload(self, box: Box, data: bytes, key: str) -> Steps[None]:
        """Only what an honest offer names; the syncer finds out what is wrong with any other."""
        try:
            offer = decode(Offer, data, key)
        except RecordError:
            return
        if offer.id != (box.learner, box.incarnation, box.next_seq) or not is_well_formed(offer):
            return
        box.slot_s = offer.timings.slot_s
        payload = yield from there(read_payload(offer))
        if isinstance(payload, bytes):
            yield from self._carry(delta_key(*offer.id, offer.payload_digest), payload)

    def _carry(self, key: str, data: bytes) -> Steps[None]:
        answer = yield Create(key, data)
        if not isinstance(answer, Created) and answer.data != data:
            raise stopped(key)


def _has_left(beat: bytes) -> bool:
    try:
        return decode(LearnerBeat, beat, "beat").state in ("DONE", "FAILED")
    except RecordError:
        return True  # nothing to wait for
