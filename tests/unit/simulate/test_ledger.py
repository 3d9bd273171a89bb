"""Every range that a learner processed has one fate in each fragment, or the account does not balance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from diloco_cli.simulate.histories.ledger import Account, check_fates
from diloco_cli.simulate.histories.replayer import Applied, Replayer, ViolationError

BATCH = 4


def account(steps: int) -> Account:
    """Of one that stepped so many times, on one fragment."""
    made = Account("l0", 1, BATCH, [0])
    for step in range(steps):
        made.stepped(step * BATCH)
    return made


def check(*accounts: Account, applied: tuple[Applied, ...] = ()) -> None:
    check_fates(accounts, cast(Replayer, SimpleNamespace(applied=list(applied))), 1)


def merged(start: int, end: int, **other: Any) -> Applied:
    return Applied(**{"learner": "l0", "incarnation": 1, "fragment": 0, "start": start, "end": end, **other})


def test_what_was_applied_refused_given_up_or_lost_balances() -> None:
    books = account(10)
    books.sent(0, 0, 0, 8)  # applied
    books.sent(0, 1, 8, 16)  # refused, or never published
    books.gave_up(0, 24, "replaced")
    check(books, applied=(merged(0, 8),))  # and the last four batches went with the incarnation
    assert books.discarded == {0: [((16, 24), "replaced")]} and books.processed == [(0, 40)]


def test_a_range_that_a_predecessor_brought_is_a_gap_in_what_is_processed() -> None:
    books = account(2)
    books.gave_up(0, 8, "a predecessor's offer", goes_on_at=20)
    books.stepped(20)
    books.sent(0, 0, 20, 24)
    check(books, applied=(merged(20, 24),))
    assert books.processed == [(0, 8), (20, 24)]


@pytest.mark.parametrize(
    ("applied", "says"),
    [
        ((merged(4, 8),), r"\[0\] was processed, is in no offer"),
        ((merged(4, 8), merged(4, 8)), "applied twice"),
        ((merged(4, 12),), "given up by the learner, and yet applied"),
        ((merged(12, 20),), r"\[16\] merged, and never processed"),
        ((merged(4, 8, incarnation=2),), "no such process"),
    ],
)
def test_what_has_no_fate_or_two_shows(applied: tuple[Applied, ...], says: str) -> None:
    """Four batches: the second was offered, the third given up; of the first nobody says anything."""
    books = account(4)
    if "no offer" not in says:
        books.gave_up(0, 4, "replaced")
    books.sent(0, 0, 4, 8)
    books.gave_up(0, 12, "replaced")
    with pytest.raises(ViolationError, match=says) as broken:
        check(books, applied=applied)
    assert broken.value.invariant == "4"
