"""The run's end looks for all offers that are there, and waits for nobody who goes on."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.inbox import Inbox
from diloco_cli.protocol.keys import incarnation_key, offer_key
from diloco_cli.protocol.mailboxes import MAX_OFFERS_PER_POLL
from diloco_cli.protocol.operations import Get
from diloco_cli.store.memory import MemoryStore
from tests.unit.protocol.records import RUN, genesis


@pytest.fixture
def inbox() -> Inbox:
    inbox = Inbox(RUN)
    inbox.open(genesis(), 0.0)
    return inbox


def emptied(inbox: Inbox, store: MemoryStore, offering: str = "") -> list[str]:
    """The keys that were asked for. `offering` has its next offer out as soon as somebody has looked in vain."""
    asked, answer, steps = [], None, inbox.empty(genesis(), 1.0)
    try:
        while True:
            operation = steps.send(answer)
            assert isinstance(operation, Get)
            asked.append(operation.key)
            answer = store.get(operation.key)
            if answer is None and offering and operation.key.startswith(f"offer/{offering}/"):
                store.create(operation.key, b"{}")
    except StopIteration:
        return asked


def test_whatever_lies_there_gets_a_fate(inbox: Inbox) -> None:
    store, backlog = MemoryStore(), 2 * MAX_OFFERS_PER_POLL + 3
    store.create(incarnation_key("l0", 2), b"{}")
    store.create(offer_key("l0", 2, 0), b"{}")
    for seq in range(backlog):
        store.create(offer_key("l1", 1, seq), b"{}")
    asked = emptied(inbox, store)
    fates = [(fate.learner, fate.incarnation, fate.seq) for fate in inbox.take_fates()]
    assert fates == [("l0", 2, 0), *(("l1", 1, seq) for seq in range(backlog))]
    assert asked.count(offer_key("l0", 1, 0)) == 1, "a mailbox that was found empty is not asked again"


def test_a_learner_that_goes_on_offering_does_not_hold_up_the_end(inbox: Inbox) -> None:
    store = MemoryStore()
    asked = emptied(inbox, store, offering="l1")
    assert asked == [
        *(incarnation_key(name, 2) for name in ("l0", "l1")),
        *(offer_key(name, 1, 0) for name in ("l0", "l1")),
    ]
