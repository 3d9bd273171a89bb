"""Claims behind those of a revoked key, which a reader passes by."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.log.keys import incarnation_key, placed_key
from diloco_cli.protocol.log.places import MAX_PLACES, MOST_GAPS, ClaimWatch, look_beyond
from diloco_cli.runtime.driver import SystemClock, perform
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


def test_a_learner_that_looks_once_comes_as_far_as_a_reader_that_looks_for_ever() -> None:
    store = MemoryStore()
    for number, data in ((3, GENUINE), (4, THIEFS), (5, THIEFS), (6, GENUINE), (7, GENUINE), (8, THIEFS)):
        for place in range(MAX_PLACES - 1 if data == GENUINE else 0):
            store.create(placed_key(incarnation_key("l0", number), place), THIEFS)
        store.create(placed_key(incarnation_key("l0", number), MAX_PLACES - 1 if data == GENUINE else 0), data)
    newest = perform(look_beyond(Revoking(), "l0", 2), store, CLOCK)
    assert newest is not None and newest.number == 7
    assert perform(look_beyond(Revoking(), "l0", 7), store, CLOCK) is None
