"""How a syncer discovers offers: it asks for the next key of every learner and never lists.

`PolledMailbox`: when to look for the offers of one incarnation, and for how long; relays in regions use it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from diloco_cli.protocol.log.commit_log import read_signed
from diloco_cli.protocol.log.keys import incarnation_key, offer_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import Offer, Outcome, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import RecordError, decode
from diloco_cli.protocol.rules.eligibility import is_well_formed, refusal
from diloco_cli.protocol.rules.polling import SHORT_SLOT_S, expected_slot_s, next_request_s
from diloco_cli.signing import learner_signer

MAX_CLAIMS_PER_LOOK = 8  # of one learner's incarnations: a flood must not starve the others
MAX_OFFERS_PER_POLL = 8  # of one learner, for the same reason
MAX_PENDING_ROUNDS = 4  # of offers of one incarnation; an honest learner has at most one a fragment
MAX_OLD_MAILBOXES = 8  # of one learner, beside its newest
RETIRE_S = 120.0
MAX_PORTIONS = 16  # of one mailbox at the run's end: a flood of offers must not delay the end
MAX_OUTCOMES_A_COMMIT = 8192  # some 1 MB: a flood of bad offers must not make a commit longer than a record may be


@dataclass
class PolledMailbox:
    """The offers of one incarnation of one learner, asked for in the order of their numbers: `next_seq` is next.

    `slot_s`: the time between offers as the learner states it; expected_slot_s limits it by the run's pace."""

    learner: str
    incarnation: int
    next_seq: int = 0
    since_s: float = 0.0
    found_s: float | None = None
    slot_s: float = 0.0
    next_request_s: float = 0.0
    asked_s: float = -inf

    def asked(self, now_s: float, usual_slot_s: float) -> None:
        """No further offer is there now: choose when to ask again."""
        self.asked_s = now_s
        self.next_request_s = next_request_s(self.found_s, now_s, expected_slot_s(self.slot_s, usual_slot_s))


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

    `withheld(learner, incarnation, seq)`: whether an offer must not be read yet (see protocol/regions/relays.py)."""

    run: RunFormat
    mailboxes: dict[tuple[str, int], Mailbox] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    withheld: Callable[[str, int, int], bool] = lambda learner, incarnation, seq: False
    _sorted_for: RunState | None = None  # the state for which sort_out was last done, if no offer came since

    def open(self, state: RunState, now_s: float) -> None:
        """Start from the log's state. Every island counts as heard now, because a new syncer cannot know better."""
        for island in state.with_members(self.run).all_islands:
            known = state.learner(island.name)
            self.heard_s[island.name] = now_s
            self._box(island.name, max(1, known.floor)).next_seq = known.next_seq

    def _box(self, learner: str, incarnation: int) -> Mailbox:
        return self.mailboxes.setdefault((learner, incarnation), Mailbox(learner, incarnation))

    def expect(self, learner: str) -> None:
        """Ask for the offers of a learner that was just admitted; it counts as alive once it is heard."""
        self._box(learner, 1)

    def newest_incarnation(self, learner: str) -> int:
        return max((incarnation for name, incarnation in self.mailboxes if name == learner), default=0)

    def look_for_incarnations(self, state: RunState, now_s: float) -> Steps[None]:
        """Look for new incarnations of all islands, also of those that have joined since."""
        for island in state.with_members(self.run).all_islands:
            newest = self.newest_incarnation(island.name)
            for _ in range(MAX_CLAIMS_PER_LOOK):
                key = incarnation_key(island.name, newest + 1)
                claim = yield from read_signed(self.run.keyring, learner_signer(island.name), key)
                if claim is None:
                    break
                newest += 1
                self._box(island.name, newest).since_s = now_s
                if self._is_by(island.name, key, claim):
                    self.heard_s[island.name] = now_s
            if newest > 0:
                self._retire(island.name, self._box(island.name, newest), now_s)

    def _retire(self, learner: str, newest: Mailbox, now_s: float) -> None:
        old = (
            key for key, box in self.mailboxes.items() if key[0] == learner and box is not newest and not box.pending
        )
        for key in replaced(old, newest, now_s):
            del self.mailboxes[key]

    def poll(self, state: RunState, now_s: float, slot_s: float, everywhere: bool = False) -> Steps[bool]:
        """Fetch offers that have appeared. Where slots are long, only from the mailboxes that are due; with
        `everywhere` from all. A mailbox asked at `now_s` is not asked again. False if no mailbox was asked."""
        always = everywhere or slot_s < SHORT_SLOT_S
        boxes = [box for box in self.mailboxes.values() if box.asked_s < now_s]
        due = [box for box in boxes if always or now_s >= box.next_request_s]
        yield from self._fetch(due, state, now_s)
        for box in due:
            box.asked(now_s, slot_s)
        return bool(due)

    def empty(self, state: RunState, now_s: float) -> Steps[None]:
        """Fetch all offers that are there now, of new incarnations too: from each mailbox until it is empty, but at
        most MAX_PORTIONS portions, so that a learner that goes on offering cannot delay the run's end."""
        yield from self.look_for_incarnations(state, now_s)
        left = list(self.mailboxes.values())
        for _ in range(MAX_PORTIONS):
            left = yield from self._fetch(left, state, now_s)
            if not left:
                return

    def _fetch(self, boxes: list[Mailbox], state: RunState, now_s: float) -> Steps[list[Mailbox]]:
        """Fetch a portion from each mailbox, then sort it out to make room. Returns the boxes that may hold more."""
        left = []
        for box in sorted(boxes, key=lambda b: (b.learner, b.incarnation)):
            for _ in range(min(MAX_OFFERS_PER_POLL, MAX_PENDING_ROUNDS * self.run.num_fragments - len(box.pending))):
                if self.withheld(box.learner, box.incarnation, box.next_seq):
                    break
                key = offer_key(box.learner, box.incarnation, box.next_seq)
                data = yield from read_signed(self.run.keyring, learner_signer(box.learner), key)
                if data is None:
                    break
                if self._receive(box, data, key, state):
                    self.heard_s[box.learner] = box.found_s = now_s
            else:
                left.append(box)
        if self._sorted_for is not state:
            self.sort_out(state)
        return left

    def _receive(self, box: Mailbox, data: bytes, key: str, state: RunState) -> bool:
        """Take in one offer's bytes. Whether the learner itself wrote them, well formed or not."""
        seq = box.next_seq
        box.next_seq += 1
        known = state.learner(box.learner)
        if box.incarnation == known.floor and known.has_outcome(seq):
            return True
        if not self._is_by(box.learner, key, data):
            self.outcomes.append(Outcome(box.learner, box.incarnation, seq, 0, "bad_signature"))
            return False
        try:
            offer = decode(Offer, data, key)
            if offer.id != (box.learner, box.incarnation, seq) or not is_well_formed(offer):
                raise RecordError("the offer is not what an honest learner writes under this key", where=key)
        except RecordError:
            self.outcomes.append(Outcome(box.learner, box.incarnation, seq, 0, "bad_record"))
            return True
        self.deliver(offer)
        return True

    def _is_by(self, learner: str, key: str, data: bytes) -> bool:
        return self.run.keyring.authenticates(learner_signer(learner), key, data)

    def deliver(self, offer: Offer) -> None:
        """Take in a well-formed offer."""
        box = self._box(offer.learner, offer.incarnation)
        box.slot_s = offer.timings.slot_s
        box.pending.append(offer)
        self._sorted_for = None

    def sort_out(self, state: RunState) -> None:
        """Give every pending offer that can never be applied its outcome, and forget offers that have one."""
        for key, box in list(self.mailboxes.items()):
            keep: list[Offer] = []
            for offer in box.pending:
                reason = refusal(offer, state, self.run)
                if reason is None:
                    keep.append(offer)
                elif reason != "settled":
                    self.refuse(offer, reason)
            box.pending = keep
            if box.incarnation < state.learner(box.learner).floor and not keep:
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

    def forget(self, offers: list[Offer]) -> None:
        """These offers were applied and need no other outcome."""
        for offer in offers:
            self.mailboxes[(offer.learner, offer.incarnation)].pending.remove(offer)

    def ahead(self, slot: int) -> set[str]:
        """Learners that have offered for later slots."""
        return {box.learner for box in self.mailboxes.values() for offer in box.pending if offer.slot > slot}

    @property
    def outcomes_left(self) -> bool:
        """Whether there are more outcomes than one commit may hold."""
        return len(set(self.outcomes)) > MAX_OUTCOMES_A_COMMIT

    def take_outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes for one commit; those that it cannot hold go with the next."""
        waiting = list(dict.fromkeys(self.outcomes))
        taken, self.outcomes = waiting[:MAX_OUTCOMES_A_COMMIT], waiting[MAX_OUTCOMES_A_COMMIT:]
        return tuple(sorted(taken, key=lambda f: (f.learner, f.incarnation, f.seq)))

    def refuse_all(self, reason: str) -> None:
        for box in self.mailboxes.values():
            for offer in box.pending:
                self.refuse(offer, reason)
            box.pending = []
