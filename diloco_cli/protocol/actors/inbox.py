"""How a syncer discovers offers: it asks for the next key of every learner and never lists.

`PolledMailbox`: when to look for the offers of one incarnation, and for how long; relays in regions use it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any

from diloco_cli.protocol.log.claims import ClaimWatch, FoundOffer, LearnerKeys, next_offer
from diloco_cli.protocol.log.keys import incarnation_of, key_of, number_of, offer_key
from diloco_cli.protocol.log.operations import Steps, together
from diloco_cli.protocol.log.records import Offer, Outcome, RecordError, RunFormat, decode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.merging import Eligibility, is_well_formed
from diloco_cli.protocol.rules.pacing import SHORT_SLOT_S, guessed_request_s, next_request_s
from diloco_cli.signing import Authenticator

MAX_OFFERS_PER_POLL = 8  # of one learner: a flood must not starve the others
MAX_BYTES_PER_POLL = 1 << 20  # of one learner's offers, for the same reason; the last of a portion may go beyond it
MAX_PENDING_ROUNDS = 4  # of offers of one incarnation; an honest learner has at most one a fragment
MAX_OLD_MAILBOXES = 8  # of one learner, beside its newest
RETIRE_S = 120.0
FURTHER_SLOTS, MAX_FURTHER_SLOTS = 4, 64
MAX_PORTIONS = 16  # of one mailbox at the run's end: a flood of offers must not delay the end
MAX_OUTCOMES_A_COMMIT = 8192  # some 1 MB: a flood of bad offers must not make a commit longer than a record may be


def in_order(outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """As a commit lists them."""
    return tuple(sorted(outcomes, key=lambda one: (one.learner, one.incarnation, one.seq)))


@dataclass
class PolledMailbox:
    """The offers of one incarnation of one learner, asked for in the order of their numbers: `next_seq` is next.
    `further_slots`: after so many without an offer, since it was found or since `further_s`, the next look is at later
    ones, too: this one may be lost."""

    learner: str
    incarnation: int
    next_seq: int = 0
    since_s: float = 0.0
    found_s: float | None = None
    next_request_s: float = 0.0
    looked_in_vain: bool = False
    asked_s: float = -inf
    further_slots: int = FURTHER_SLOTS
    further_s: float = -inf
    is_overdue: bool = False

    def look(self, keyring: Authenticator) -> Steps[FoundOffer]:
        """Look for the next offer."""
        found = yield from next_offer(keyring, self.learner, self.incarnation, self.next_seq, self.is_overdue)
        self.is_overdue = found.damaged  # several may be lost together
        if found.data is not None or found.damaged:
            self.further_slots = FURTHER_SLOTS
        return found

    def asked(self, now_s: float, slot_s: float, is_guess: bool = False) -> None:
        """No further offer is there now: choose when to ask again."""
        self.asked_s = now_s
        since_s = self.since_s if self.found_s is None else self.found_s
        if now_s - max(since_s, self.further_s) >= self.further_slots * slot_s:
            self.is_overdue, self.further_s = True, now_s
            self.further_slots = min(MAX_FURTHER_SLOTS, 2 * self.further_slots)
        guessed_s = guessed_request_s(since_s, now_s, slot_s) if is_guess else inf
        self.next_request_s = min(next_request_s(self.found_s, now_s, slot_s), guessed_s)


def kept_mailboxes(key: int, known: int, newest: int) -> list[int]:
    """The incarnations under this key beyond number `known` whose offers are asked for, when `newest` is the newest."""
    return [incarnation_of(n, key) for n in range(max(known + 1, newest - MAX_OLD_MAILBOXES), newest + 1)]


def replaced(old: Iterable[tuple[str, int]], newest: PolledMailbox, now_s: float) -> list[tuple[str, int]]:
    """Which of one learner's `old` mailboxes are given up, so that requests for the offers of replaced incarnations end
    after a while."""
    kept = MAX_OLD_MAILBOXES if now_s - newest.since_s < RETIRE_S else 0
    rising = sorted(old)
    return rising[: max(0, len(rising) - kept)]


@dataclass
class Mailbox(PolledMailbox):
    """`pending`: offers received that have no outcome yet."""

    pending: list[Offer] = field(default_factory=list)


@dataclass
class Inbox:
    """All pending offers, and when each learner was last heard (seconds on the syncer's clock).

    `withheld(learner, incarnation, seq)`: whether an offer must not be read yet; `claimed(learner)`: the newest
    incarnations that have been seen elsewhere, one a key. See protocol/regions.py. `claims`: where the claims of
    each learner stand, by its keys. `beside(state, offer)`: what is read of an offer that was just found, while the
    next one is looked for (merging.py). `found(offer, now_s, waited)` is told of each, and
    whether the syncer waited for it: it looked in vain since the offer before."""

    run: RunFormat
    mailboxes: dict[tuple[str, int], Mailbox] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    withheld: Callable[[str, int, int], bool] = lambda learner, incarnation, seq: False
    claimed: Callable[[str], Sequence[int]] = lambda learner: ()
    claims: dict[tuple[str, int], ClaimWatch] = field(default_factory=dict)
    beside: Callable[[RunState, Offer], list[Steps[Any]]] = lambda state, offer: []
    found: Callable[[Offer, float, bool], None] = lambda offer, now_s, waited: None
    keys: LearnerKeys = field(init=False)
    _floors: dict[str, int] = field(default_factory=dict)  # of incarnations, in the log as this process began
    _sorted_for: RunState | None = None  # the state for which sort_out was last done, if no offer came since

    def __post_init__(self) -> None:
        self.keys = LearnerKeys(self.run.keyring)

    def open(self, state: RunState, now_s: float) -> None:
        """Start from the log's state. Every island counts as heard now, because a new syncer cannot know better."""
        for island in state.with_members(self.run).all_islands:
            known = state.learner(island.name)
            self.heard_s[island.name], self._floors[island.name] = now_s, known.floor
            named = known.floor or not self.run.keyring.signs
            if named and state.counts(known.floor):  # what a revoked key offered has its outcome, or needs none
                box = self._box(island.name, max(1, known.floor))
                box.next_seq, box.since_s = known.next_seq, now_s

    def _box(self, learner: str, incarnation: int) -> Mailbox:
        return self.mailboxes.setdefault((learner, incarnation), Mailbox(learner, incarnation))

    def expect(self, learners: Iterable[str]) -> None:
        """Ask for the offers of learners that are being admitted; they count as alive once they are heard."""
        for learner in learners if not self.run.keyring.signs else ():
            self._box(learner, 1)

    def look_for_incarnations(self, state: RunState, now_s: float) -> Steps[None]:
        """Look for new incarnations of all islands, also of those that have joined since, under all their keys."""
        islands = state.with_members(self.run).all_islands
        self.keys.keyring = self.run.keyring.without(state.revoked)
        yield from self.keys.look()
        watches = [self._watch(island.name, key, state) for island in islands for key in self.keys.of(island.name)]
        before = [watch.newest for watch in watches]
        beyond = {island.name: number_of(state.learner(island.name).floor) for island in islands}
        for watch in watches:
            beyond[watch.learner] = max(beyond[watch.learner], watch.last)  # strangers' objects use numbers up, too
        yield from together([watch.look(beyond[watch.learner]) for watch in watches])
        for watch, known in zip(watches, before, strict=True):
            self._found(watch.learner, watch.key, known, watch.newest, now_s)
        for island in islands:
            for incarnation in self.claimed(island.name):
                watch = self._watch(island.name, key_of(incarnation), state)
                known, watch.newest = watch.newest, max(watch.newest, number_of(incarnation))
                self._found(island.name, watch.key, known, watch.newest, now_s)
        self._retire(now_s)

    def _found(self, learner: str, key: int, known: int, newest: int, now_s: float) -> None:
        if newest > known:
            self.heard_s[learner] = now_s
        for incarnation in kept_mailboxes(key, known, newest):
            self._box(learner, incarnation).since_s = now_s

    def _watch(self, learner: str, key: int, state: RunState) -> ClaimWatch:
        if (learner, key) not in self.claims:
            floor = max(1, state.learner(learner).floor) if key == 0 else state.learner(learner).floor
            self.claims[learner, key] = ClaimWatch.beside(self.run.keyring, learner, key, floor)
        return self.claims[learner, key]

    def _retire(self, now_s: float) -> None:
        """Give up the mailboxes of replaced incarnations."""
        of_learner: dict[str, list[Mailbox]] = {}
        for box in self.mailboxes.values():
            of_learner.setdefault(box.learner, []).append(box)
        for learner, boxes in of_learner.items():
            newest = max(boxes, key=lambda box: box.incarnation)
            old = [(learner, box.incarnation) for box in boxes if box is not newest and not box.pending]
            for key in replaced(old, newest, now_s):
                del self.mailboxes[key]

    def poll(
        self, state: RunState, now_s: float, slot_s: float, everywhere: bool = False, is_guess: bool = False
    ) -> Steps[bool]:
        """Fetch offers that have appeared. Where slots are long, only from the mailboxes that are due; with
        `everywhere` from all. A mailbox asked at `now_s` is not asked again. False if no mailbox was asked."""
        always = everywhere or slot_s < SHORT_SLOT_S
        boxes = [b for b in self.mailboxes.values() if b.asked_s < now_s]
        due = [box for box in boxes if always or now_s >= box.next_request_s]
        yield from self._fetch(due, state, now_s, slot_s)
        for box in due:
            box.asked(now_s, slot_s, is_guess)
        return bool(due)

    def empty(self, state: RunState, now_s: float) -> Steps[None]:
        """Fetch all offers that are there now, of new incarnations too: from each mailbox until it is empty, but at
        most MAX_PORTIONS portions, so that a learner that goes on offering cannot delay the run's end."""
        yield from self.look_for_incarnations(state, now_s)
        left = list(self.mailboxes.values())
        for _ in range(MAX_PORTIONS):
            left = yield from self._fetch(left, state, now_s, 0.0)
            if not left:
                return

    def _fetch(self, boxes: list[Mailbox], state: RunState, now_s: float, slot_s: float) -> Steps[list[Mailbox]]:
        """Fetch a portion from each mailbox, at the same time, then sort them out to make room. Returns the boxes that
        may hold more."""
        boxes = sorted(boxes, key=lambda b: (b.learner, b.incarnation))
        members: list[Steps[Any]] = []
        members += [self._fetch_portion(box, state, now_s, slot_s, members if slot_s else None) for box in boxes]
        if slot_s and boxes:  # what was found for this slot before it was due
            newest = {offer.learner: offer for offer in self.pending() if offer.slot == state.slot}
            members += chain.from_iterable(self.beside(state, offer) for offer in newest.values())
        more = yield from together(members, grows=True)
        if self._sorted_for is not state:
            self.sort_out(state)
        return [box for box, holds_more in zip(boxes, more, strict=False) if holds_more]

    def _fetch_portion(
        self, box: Mailbox, state: RunState, now_s: float, slot_s: float, members: list[Steps[Any]] | None
    ) -> Steps[bool]:
        """Fetch some offers of one mailbox; True if there may be more. With `members` no merge waits for many looks:
        what is read of the first offer that is not late joins them, and the offer behind it is the last one."""
        num_bytes, num_known, is_last = 0, len(box.pending), False
        for _ in range(min(MAX_OFFERS_PER_POLL, MAX_PENDING_ROUNDS * self.run.num_fragments - num_known)):
            if self.withheld(box.learner, box.incarnation, box.next_seq):
                return False
            found = yield from box.look(self.run.keyring)
            if found.data is None and not found.damaged:
                box.looked_in_vain = True
                return False
            before = len(box.pending)
            self._receive(box, found.data, state)
            if len(box.pending) > before:
                self.found(box.pending[-1], now_s, box.looked_in_vain)
            box.looked_in_vain = False
            self.heard_s[box.learner] = box.found_s = now_s
            num_bytes += len(found.data or b"")
            if num_bytes > MAX_BYTES_PER_POLL or is_last:
                break
            if members is not None and len(box.pending) > num_known and box.pending[-1].slot >= state.slot:
                is_last = True
                members += self.beside(state, box.pending[-1])
        return True

    def _receive(self, box: Mailbox, data: bytes | None, state: RunState) -> None:
        """Take in one offer's bytes, which the learner itself has written, well formed or not; None: they are damaged
        for good."""
        seq = box.next_seq
        box.next_seq += 1
        known = state.learner(box.learner)
        if box.incarnation < self._floors.get(box.learner, 0):
            return  # a syncer before has told its outcome, and nobody waits for it
        if box.incarnation == known.floor and known.has_outcome(seq):
            return
        if data is None:
            self.outcomes.append(Outcome(box.learner, box.incarnation, seq, 0, "bad_signature"))
            return
        key = offer_key(box.learner, box.incarnation, seq)
        try:
            offer = decode(Offer, data, key)
            if offer.id != (box.learner, box.incarnation, seq) or not is_well_formed(offer):
                raise RecordError("the offer is not what an honest learner writes under this key", where=key)
        except RecordError:
            self.outcomes.append(Outcome(box.learner, box.incarnation, seq, 0, "bad_record"))
            return
        self.deliver(offer)

    def deliver(self, offer: Offer) -> None:
        """Take in a well-formed offer."""
        box = self._box(offer.learner, offer.incarnation)
        box.pending.append(offer)
        self._sorted_for = None

    def sort_out(self, state: RunState) -> None:
        """Give every pending offer that can never be applied its outcome, and forget offers that have one."""
        eligibility = Eligibility(state, self.run)
        for key, box in list(self.mailboxes.items()):
            keep: list[Offer] = []
            for offer in box.pending:
                reason = eligibility.refusal(offer)
                if reason is None:
                    keep.append(offer)
                elif reason != "settled":
                    self.refuse(offer, reason)
            box.pending = keep
            is_over = box.incarnation < state.learner(box.learner).floor or not state.counts(box.incarnation)
            if is_over and not keep:
                del self.mailboxes[key]
        self._sorted_for = state

    def refuse(self, offer: Offer, reason: str) -> None:
        self.outcomes.append(Outcome(*offer.id, offer.fragment, reason))

    def drop(self, offer: Offer, reason: str) -> None:
        """Refuse one pending offer: its payload is bad, or a newer offer of the learner takes its place."""
        box = self.mailboxes[(offer.learner, offer.incarnation)]
        box.pending.remove(offer)
        self.refuse(offer, reason)

    def candidates(self, slot: int) -> list[Offer]:
        """The newest pending offer per learner for a slot, sorted by learner; older ones are superseded."""
        newest: dict[str, Offer] = {}
        for box in self.mailboxes.values():
            for offer in list(box.pending):
                if offer.slot != slot:
                    continue
                rival = newest.get(offer.learner, offer)
                older, newer = sorted((rival, offer), key=lambda o: (o.incarnation, o.seq))
                if older is not newer:
                    self.drop(older, "superseded")
                newest[offer.learner] = newer
        return [newest[name] for name in sorted(newest)]

    def forget(self, offers: Iterable[Offer]) -> None:
        """These offers have their outcome in the log."""
        for offer in offers:
            self.mailboxes[(offer.learner, offer.incarnation)].pending.remove(offer)

    def pending(self) -> Iterator[Offer]:
        """All offers received that have no outcome yet."""
        return chain.from_iterable(box.pending for box in self.mailboxes.values())

    def ahead(self, slot: int) -> set[str]:
        """Learners that have offered for later slots."""
        return {offer.learner for offer in self.pending() if offer.slot > slot}

    @property
    def outcomes_left(self) -> bool:
        """Whether there are more outcomes than one commit may hold."""
        return len(set(self.outcomes)) > MAX_OUTCOMES_A_COMMIT

    def take_outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes for one commit; those that it cannot hold go with the next."""
        waiting = list(dict.fromkeys(self.outcomes))
        taken, self.outcomes = waiting[:MAX_OUTCOMES_A_COMMIT], waiting[MAX_OUTCOMES_A_COMMIT:]
        return in_order(taken)

    def give_back(self, outcomes: Iterable[Outcome]) -> None:
        """These were taken for a commit that did not come into the log: a floor took its number."""
        self.outcomes[:0] = outcomes

    def refuse_all(self, reason: str) -> None:
        for box in self.mailboxes.values():
            for offer in box.pending:
                self.refuse(offer, reason)
            box.pending = []
