"""Which offers are for a slot, and who has passed it by. The run's end looks for all offers that are there, and waits
for nobody who goes on."""

from __future__ import annotations

from itertools import pairwise

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.digests import digest
from diloco_cli.protocol.actors.inbox import (
    FURTHER_SLOTS,
    MAX_FURTHER_SLOTS,
    MAX_OFFERS_PER_POLL,
    MAX_PENDING_ROUNDS,
    MAX_PORTIONS,
    Inbox,
    PolledMailbox,
)
from diloco_cli.protocol.log.claims import claim_incarnation, own_certificate
from diloco_cli.protocol.log.keys import incarnation_key, incarnation_of, offer_key
from diloco_cli.protocol.log.operations import Get, Operation
from diloco_cli.protocol.log.records import encode
from diloco_cli.protocol.log.state import LearnerRecord
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from tests.unit.protocol.log.test_claims import CLAIM, JUNK, KEY_A, KEY_B, A, B
from tests.unit.protocol.played import played
from tests.unit.protocol.records import RUN, applied, genesis, merge, offer


@pytest.fixture
def inbox() -> Inbox:
    inbox = Inbox(RUN)
    inbox.open(genesis(), 0.0)
    return inbox


def emptied(inbox: Inbox, store: MemoryStore, offering: str = "") -> list[str]:
    """The keys that were asked for. `offering` has its next offer out as soon as somebody has looked in vain."""
    asked: list[str] = []

    def answer(operation: Operation) -> bytes | None:
        assert isinstance(operation, Get)
        asked.append(operation.key)
        found = store.get(operation.key)
        if found is None and offering and operation.key.startswith(f"offer/{offering}/"):
            store.create(operation.key, b"{}")
        return found

    played(inbox.empty(genesis(), 1.0), answer)
    return asked


def test_a_flood_does_not_hold_up_the_end(inbox: Inbox) -> None:
    store, most = MemoryStore(), MAX_PORTIONS * MAX_OFFERS_PER_POLL
    for seq in range(most + 5):
        store.create(offer_key("l1", 1, seq), b"{}")
    emptied(inbox, store)
    assert len(inbox.take_outcomes()) == most


def test_refused_offers_make_room_for_those_behind_them(inbox: Inbox) -> None:
    """Well-formed ones wait in the mailbox, which has room for some rounds."""
    store, room = MemoryStore(), MAX_PENDING_ROUNDS * RUN.num_fragments
    stale = replace(offer(genesis(), learner="l1"), payload_digest=digest(b""), base_digest="of another log")
    for seq in range(room + 3):
        store.create(offer_key("l1", 1, seq), encode(replace(stale, seq=seq)))
    emptied(inbox, store)
    assert len(inbox.take_outcomes()) == room + 3


def test_offers_that_are_lost_are_passed_over_together_once_the_first_is_overdue() -> None:
    store, box, clock = (
        MemoryStore(),
        PolledMailbox("l1", 1),
        SystemClock(lambda: 0.0, lambda seconds: None, lambda: None),
    )
    store.create(offer_key("l1", 1, 3), encode(offer(genesis(), learner="l1")))

    def passed_over() -> bool:
        return perform(box.look(RUN.keyring), store, clock).damaged

    box.asked(FURTHER_SLOTS - 1.0, 1.0)
    assert not passed_over()
    box.asked(FURTHER_SLOTS, 1.0)
    for box.next_seq in range(3):
        assert passed_over()
    box.next_seq = 3
    assert perform(box.look(RUN.keyring), store, clock).data is not None


def test_behind_the_number_of_one_who_is_silent_is_looked_ever_less_often() -> None:
    box, looks = PolledMailbox("l1", 1), list[int]()
    for slot in range(300):
        box.asked(float(slot), 1.0)
        looks += [slot] if box.is_overdue else []
        perform(box.look(RUN.keyring), MemoryStore(), SystemClock(lambda: 0.0, lambda seconds: None, lambda: None))
    gaps = [later - earlier for earlier, later in pairwise(looks)]
    assert looks[0] == FURTHER_SLOTS and gaps == [8, 16, 32, 64, 64, 64] and gaps[-1] == MAX_FURTHER_SLOTS


def test_what_an_older_incarnation_offered_has_no_second_outcome_from_the_next_syncer() -> None:
    """Number 1 of two keys at once: the log keeps the outcomes of the greater incarnation alone."""
    newer = replace(LearnerRecord(), floor=2)
    inbox, store = Inbox(RUN), MemoryStore()
    inbox.open(replace(genesis(), learners={"l1": newer}), 0.0)
    store.create(offer_key("l1", 1, 0), encode(offer(genesis(), learner="l1")))
    store.create(offer_key("l1", 1, 1), b"{}")
    inbox.expect(["l1"])
    assert offer_key("l1", 1, 1) in emptied(inbox, store) and inbox.take_outcomes() == ()


def test_a_new_keys_claim_is_found_at_once_behind_a_number_that_a_stranger_has_used_up() -> None:
    """A learner's process goes past that number too, whichever key it lies below."""
    store, clock = MemoryStore(), SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)
    state = replace(genesis(), learners={"l0": replace(LearnerRecord(), floor=incarnation_of(1, KEY_A))})
    perform(claim_incarnation(A, "l0", CLAIM), store, clock)
    store.create(*(own_certificate(B, "learner/l0") or ("", b"")))  # left there before its machine begins
    store.create(incarnation_key("l0", incarnation_of(2, KEY_A)), JUNK)
    inbox = Inbox(replace(RUN, keyring=A))
    inbox.open(state, 0.0)
    perform(inbox.look_for_incarnations(state, 0.0), store, clock)
    claimed = perform(claim_incarnation(B, "l0", CLAIM), store, clock).incarnation
    assert claimed == incarnation_of(3, KEY_B)
    perform(inbox.look_for_incarnations(state, 1.0), store, clock)
    perform(inbox.look_for_incarnations(state, 2.0), store, clock)
    assert ("l0", claimed) in inbox.mailboxes


def test_what_a_relay_has_yet_to_bring_is_not_asked_for(inbox: Inbox) -> None:
    inbox.withheld = lambda learner, incarnation, seq: learner == "l1"
    assert emptied(inbox, MemoryStore())[2:] == [offer_key("l0", 1, 0)]


# -- the slot that is due -------------------------------------------------------------------------------------------


def test_an_offer_is_a_candidate_for_the_slot_that_it_names_and_for_no_other(inbox: Inbox) -> None:
    mine, later = offer(genesis(), learner="l1", slot=0), offer(genesis(), slot=2)
    for made in (mine, later):
        inbox.deliver(made)
    assert [inbox.candidates(slot) for slot in range(4)] == [[mine], [], [later], []]
    assert inbox.outcomes == []


def test_of_two_offers_for_one_slot_the_newer_one_counts_and_the_older_is_superseded(inbox: Inbox) -> None:
    """Of another incarnation, or of a learner that says two things; the order in which they came does not matter."""
    older, newer, other = (
        offer(genesis(), seq=7), offer(genesis(), incarnation=2, seq=0), offer(genesis(), learner="l1")
    )  # fmt: skip
    for made in (newer, other, older):
        inbox.deliver(made)
    assert inbox.candidates(0) == [newer, other]
    assert [(outcome.incarnation, outcome.seq, outcome.reason) for outcome in inbox.take_outcomes()] == [
        (1, 7, "superseded")
    ]
    assert inbox.candidates(0) == [newer, other] and inbox.outcomes == []


def test_who_has_offered_for_later_slots_is_ahead(inbox: Inbox) -> None:
    for made in (offer(genesis(), slot=2), offer(genesis(), learner="l1", slot=0), offer(genesis(), 1, learner="l1")):
        inbox.deliver(made)
    assert [inbox.ahead(slot) for slot in range(4)] == [{"l0", "l1"}, {"l0"}, set(), set()]


def test_what_the_log_has_passed_gets_its_outcome_when_it_is_sorted_out(inbox: Inbox) -> None:
    state = genesis()
    for made in (offer(state), offer(state, 1, seq=1), offer(state, slot=2, seq=2)):
        inbox.deliver(made)
    state = merge(state, applied("l1"))
    inbox.sort_out(state)
    assert [(outcome.seq, outcome.reason) for outcome in inbox.take_outcomes()] == [(0, "late")]
    assert [offer.seq for slot in (1, 2) for offer in inbox.candidates(slot)] == [1, 2]
