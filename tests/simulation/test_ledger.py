"""Every range that a learner processed has one outcome in each fragment, or the account does not balance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.histories.ledger import Account, check_outcomes
from tests.histories.replayer import AppliedOffer, Replayer, ViolationError

BATCH = 4
MAX_LOST = 40


def account(steps: int) -> Account:
    """Of one that stepped so many times, on one fragment, from token 0 on."""
    made = Account("l0", 1, [0], [0])
    for step in range(steps):
        made.stepped(step * BATCH, (step + 1) * BATCH)
    return made


def check(*accounts: Account, applied: tuple[AppliedOffer, ...] = ()) -> int:
    return check_outcomes(accounts, cast(Replayer, SimpleNamespace(applied=list(applied))), 1, MAX_LOST)


def merged(start: int, end: int, **other: Any) -> AppliedOffer:
    return AppliedOffer(**{"learner": "l0", "incarnation": 1, "fragment": 0, "start": start, "end": end, **other})


def test_what_was_applied_given_up_or_held_at_the_end_balances() -> None:
    books = account(10)
    books.sent(0, 0, 0, 8)  # applied
    books.kept(0, 8)
    books.sent(0, 1, 8, 16)  # late, and then given up with what came after it
    books.gave_up(0, "replaced", 24)
    lost = check(books, applied=(merged(0, 8),))
    assert lost == 16, "the last four batches went with the incarnation"
    assert books.discarded == {0: [((8, 24), 16, "replaced")]} and books.processed == [(0, 40)]


def test_what_a_late_offer_held_may_be_held_on_and_applied_with_the_next_one() -> None:
    books = account(6)
    books.sent(0, 0, 0, 8)
    books.sent(0, 1, 0, 24)
    books.kept(0, 24)
    check(books, applied=(merged(0, 24),))


def test_what_was_given_up_while_its_offer_was_on_its_way_may_be_applied_all_the_same() -> None:
    books = account(4)
    books.sent(0, 0, 0, 8)
    books.gave_up(0, "replaced", 16)
    check(books, applied=(merged(0, 8),))


def test_each_incarnation_has_its_own_account() -> None:
    second = Account("l0", 2, [8], [8])
    second.stepped(8, 12)
    second.sent(0, 0, 8, 12)
    check(account(4), second, applied=(merged(0, 8), merged(8, 12, incarnation=2)))


def test_what_was_merged_is_in_the_account_of_the_key_that_signed_it() -> None:
    """Of two processes under one number, one of whose keys was revoked."""
    revoked, heir = account(4), account(2)
    revoked.public, heir.public = "old", "new"
    revoked.gave_up(0, "replaced", 16)
    heir.sent(0, 0, 0, 8)
    check(revoked, heir, applied=(merged(0, 8, public="new"),))
    with pytest.raises(ViolationError, match="given up by the learner"):
        check(revoked, heir, applied=(merged(0, 8, public="old"),))


def test_a_range_that_a_predecessor_brought_is_a_gap_in_what_is_processed() -> None:
    books = account(2)
    books.gave_up(0, "a predecessor's offer", 20)
    books.stepped(20, 24)
    books.sent(0, 0, 20, 24)
    check(books, applied=(merged(20, 24),))
    assert books.processed == [(0, 8), (20, 24)]


def test_what_goes_with_an_incarnation_is_bounded() -> None:
    assert check(account(10)) == MAX_LOST
    with pytest.raises(ViolationError, match="invariant loss: l0 1, fragment 0: 44 tokens are lost, more than 40"):
        check(account(11))


def test_giving_up_nothing_is_no_entry() -> None:
    books = account(2)
    books.kept(0, 8)
    books.gave_up(0, "outgrown", 8)
    assert books.discarded == {}


@pytest.mark.parametrize(
    ("applied", "says"),
    [
        ((), r"4 tokens from 0 on was processed, is in no merge"),
        ((merged(4, 8), merged(4, 8)), "applied twice"),
        ((merged(4, 12),), r"4 tokens from 8 on given up by the learner before any offer held it, and yet applied"),
        ((merged(12, 20),), r"4 tokens from 16 on merged, and never processed"),
        ((merged(4, 8, incarnation=2),), "no such process"),
    ],
)
def test_what_has_no_outcome_or_two_shows(applied: tuple[AppliedOffer, ...], says: str) -> None:
    """Four batches: the first two were offered, the third was given up. Of the first nobody says anything more."""
    books = account(4)
    if "in no merge" in says:
        books.kept(0, 4)
    books.sent(0, 0, 4, 8)
    books.gave_up(0, "replaced", 12)
    with pytest.raises(ViolationError, match=says) as broken:
        check(books, applied=applied)
    assert broken.value.invariant == "4"
