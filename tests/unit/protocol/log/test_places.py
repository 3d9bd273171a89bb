"""Claims behind those of a revoked key, which a reader passes by."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.log.epochs import CLAIMS_TRIED
from diloco_cli.protocol.log.keys import incarnation_key, placed_key
from diloco_cli.protocol.log.places import MAX_PLACES, MOST_GAPS, PLACES_PER_LOOK, ClaimWatch, newest_past_gaps
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.signing import Signature, Unsigned
from diloco_cli.store.memory import MemoryStore

GENUINE, THIEFS = b"{}", b"[]"
CLOCK = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)


class Revoking(Unsigned):
    """Some key has been revoked, and what a thief writes is not genuine any more."""

    def __init__(self, revoked: tuple[str, ...] = ("key",)) -> None:
        self.revoked = revoked

    def signature(self, role: str, key: str, data: bytes) -> Signature | None:
        return None if data == THIEFS else Signature()


def watched(claims: dict[int, bytes], keyring: Unsigned) -> int:
    """The newest claim that one look finds beyond 2."""
    store = MemoryStore()
    for number, data in claims.items():
        store.create(incarnation_key("l0", number), data)
    watch = ClaimWatch(keyring, "l0", 2)
    perform(watch.look(), store, CLOCK)
    return watch.newest


@pytest.mark.parametrize("gap", [1, 2, MOST_GAPS])
def test_a_claim_behind_those_of_a_thief_is_found(gap: int) -> None:
    """Seed 97071413: its process started before it could know that the thief's key is revoked."""
    numbers = [*(3 + at for at in range(gap)), 3 + gap, 4 + gap]
    claims = {number: THIEFS if number < 3 + gap else GENUINE for number in numbers}
    assert watched(claims, Revoking()) == 4 + gap
    assert watched(claims, Revoking(())) == 2, "nobody has believed what was never genuine"


def test_a_number_that_nobody_has_taken_is_no_gap() -> None:
    assert watched({4: GENUINE}, Revoking()) == 2


def test_the_next_look_begins_at_the_first_place_of_the_next_number() -> None:
    store = MemoryStore()
    for number, data in ((3, THIEFS), (4, GENUINE)):
        store.create(incarnation_key("l0", number), data)
    watch = ClaimWatch(Revoking(), "l0", 2)
    perform(watch.look(), store, CLOCK)
    store.create(placed_key(incarnation_key("l0", 5), 0), GENUINE)
    perform(watch.look(), store, CLOCK)
    assert watch.newest == 5


def placed(*claims: tuple[int, int, bool]) -> MemoryStore:
    """Of each number, so many objects of a thief, and then perhaps a genuine claim."""
    store = MemoryStore()
    for number, thiefs, genuine in claims:
        for place in range(thiefs + genuine):
            data = THIEFS if place < thiefs else GENUINE
            store.create(placed_key(incarnation_key("l0", number), place), data)
    return store


FULL, LOOKS_OF_A_READER = MAX_PLACES, 40


@pytest.mark.parametrize(
    ("claims", "newest"),
    [
        (((2, 1, False), (3, 1, False), (4, 0, True)), 4),
        (((2, 1, False), (3, PLACES_PER_LOOK, True)), 3),
        (((2, 1, True), (3, FULL, False), (4, 0, True)), 4),
        (((2, FULL, False), (3, 0, True)), 3),
        (((2, FULL - 1, True), (3, 1, False), (4, FULL, False), (5, FULL - 1, True), (6, 0, True), (7, 1, False)), 6),
        (((2, 1, False), (3, 1, True), (4, 1, False), (5, FULL - 1, True), (6, 1, False), (8, 0, True)), 8),
        (((2, 1, False), (3, 1, False)), 1),
    ],
)
def test_a_learner_that_looks_once_comes_as_far_as_a_reader_in_time(
    claims: tuple[tuple[int, int, bool], ...], newest: int
) -> None:
    """Else a learner would train unheard, or end as one whose place is taken."""
    store = placed(*claims)
    watch = ClaimWatch(Revoking(), "l0", 1)
    for _ in range(LOOKS_OF_A_READER):
        perform(watch.look(), store, CLOCK)
    found = perform(newest_past_gaps(Revoking(), "l0", 1), store, CLOCK)
    assert (1 if found is None else found.number) == watch.newest == newest


def test_only_so_many_numbers_are_looked_at_of_one_who_claims_without_end() -> None:
    store = placed(*((number, 1, number % 2 == 1) for number in range(2, 4 * CLAIMS_TRIED)))
    found = perform(newest_past_gaps(Revoking(), "l0", 1), store, CLOCK)
    assert found is not None and found.number <= 2 * CLAIMS_TRIED + 2
