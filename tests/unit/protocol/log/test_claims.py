"""Which process is which incarnation, under which key, and which epoch a syncer has, at few looks whatever others have
written."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.errors import TryAgainError
from diloco_cli.protocol.log.claims import (
    CLAIMS_TRIED,
    LISTS_EVERY,
    REACH,
    STRANGERS_PASSED,
    ClaimWatch,
    LearnerKeys,
    OccupiedError,
    claim_epoch,
    claim_incarnation,
    newest_epoch,
    next_offer,
)
from diloco_cli.protocol.log.keys import (
    epoch_key,
    fingerprint,
    incarnation_key,
    incarnation_of,
    key_of,
    number_of,
    offer_key,
)
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import ProcessClaim
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.signing import Checksummed, Keyring, Secret
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Exists
from tests.unit.protocol.records import RUN, genesis

CLAIM = ProcessClaim(0, "mine", "host", 1, "then", "test")
OPERATOR = Secret("an operator's secret of this test, long enough", "here")
SUMS = Checksummed("run")
JUNK = b"{}"


def keyring_of(number: int) -> Keyring:
    """A machine with a key of its own that the operator has certified for l0."""
    return Secret(OPERATOR.certified("run", {"learner/l0": f"{number:064x}"}), "here").keyring("run")


A, B = keyring_of(1), keyring_of(2)
KEY_A, KEY_B = (fingerprint(keyring.public("learner/l0")) for keyring in (A, B))


class CountingLooks(MemoryStore):
    """`everywhere`: each number is claimed by others, with these bytes."""

    def __init__(self, everywhere: bytes | None = None) -> None:
        super().__init__()
        self.looks, self.everywhere = 0, everywhere

    def perform(self, steps: Steps[Any]) -> Any:
        self.looks = 0
        return perform(steps, self, SystemClock(lambda: 0.0, lambda seconds: None, lambda: None))

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        self.looks += 1
        return super().get(key, max_bytes)

    def create(self, key: str, data: bytes) -> Created | Exists:
        self.looks += 1
        return super().create(key, data) if self.everywhere is None else Exists(self.everywhere)


class ClaimBucket(CountingLooks):
    def claimed(self, keyring: Any, floor: int = 0) -> int:
        return int(self.perform(claim_incarnation(keyring, "l0", CLAIM, floor)).incarnation)


def test_an_incarnation_tells_its_number_and_its_key_and_a_later_one_is_greater() -> None:
    assert incarnation_of(7, 0) == number_of(7) == 7 and key_of(7) == 0
    one = incarnation_of(7, KEY_A)
    assert (number_of(one), key_of(one)) == (7, KEY_A)
    assert incarnation_of(6, KEY_B) < one < incarnation_of(8, KEY_B) and one < 1 << 53
    assert offer_key("l0", one, 3) == f"offer/l0/{KEY_A:08x}/00000007/0000000003.json"


@pytest.mark.parametrize("dead", [0, 1, 2, 1000, 4097])
def test_the_first_free_number_is_claimed_by_few_looks_behind_any_number_of_dead_ones(dead: int) -> None:
    store = ClaimBucket()
    for number in range(1, dead + 1):
        store.create(incarnation_key("l0", number), SUMS.sign("learner/l0", incarnation_key("l0", number), b'{"a":1}'))
    place = store.perform(claim_incarnation(SUMS, "l0", CLAIM))
    assert place.incarnation == dead + 1 and place.earlier == tuple(range(1, dead + 1))
    assert store.looks <= 8 + 4 * max(1, dead).bit_length() + STRANGERS_PASSED


def test_a_number_is_above_those_of_all_keys_of_the_learner_and_of_the_floor() -> None:
    store = ClaimBucket()
    assert [store.claimed(A), store.claimed(A)] == [incarnation_of(1, KEY_A), incarnation_of(2, KEY_A)]
    place = store.perform(claim_incarnation(B, "l0", CLAIM))
    assert place.incarnation == incarnation_of(3, KEY_B)
    assert place.earlier == (incarnation_of(1, KEY_A), incarnation_of(2, KEY_A))
    assert store.claimed(A, incarnation_of(9, KEY_B)) == incarnation_of(10, KEY_A)
    assert store.claimed(A) == incarnation_of(11, KEY_A), "behind a number that another key's claims left free"


def test_what_a_revoked_key_has_claimed_is_not_looked_at() -> None:
    store = ClaimBucket()
    for _ in range(5):
        store.claimed(A)
    revoked = B.without([A.public("learner/l0")])
    assert store.claimed(revoked) == incarnation_of(1, KEY_B)
    keys = LearnerKeys(revoked)
    store.perform(keys.look())
    assert keys.of("l0") == [KEY_B]


def test_a_key_cannot_take_the_numbers_of_another_one() -> None:
    store = ClaimBucket()
    mine = incarnation_key("l0", incarnation_of(1, KEY_A))
    store.create(mine, B.sign("learner/l0", mine, b'{"a":1}'))
    assert not A.authenticates("learner/l0", mine, store.get(mine) or b"")
    assert store.claimed(A) == incarnation_of(2, KEY_A), "it is no claim, and in nobody's way"


def test_a_watch_finds_the_first_claim_of_a_key_wherever_it_is_and_later_ones() -> None:
    store, watch = ClaimBucket(), ClaimWatch.beside(A, "l0", KEY_B, incarnation_of(4, KEY_A))
    assert store.perform(watch.look()) is None
    store.claimed(B, incarnation_of(6, KEY_A))
    assert store.perform(watch.look(beyond=6)) == watch.newest == 7
    store.claimed(B)
    assert store.perform(watch.look(7)) == 8 and store.perform(watch.look(8)) is None
    store.claimed(B, incarnation_of(20, KEY_A))
    assert [store.perform(watch.look()) for _ in range(LISTS_EVERY)].count(21) == 1, "by a listing, now and then"


def test_strangers_objects_use_numbers_up_and_are_no_claims() -> None:
    store, watch = ClaimBucket(), ClaimWatch(SUMS, "l0", 0, 0)
    for number in (1, 2):
        store.create(incarnation_key("l0", number), JUNK)
    assert store.perform(watch.look()) is None and watch.newest == 0
    assert store.claimed(SUMS) == 3
    assert store.perform(watch.look()) == 3


def test_claims_that_lie_apart_drive_a_number_on_by_a_bounded_way() -> None:
    store = ClaimBucket()
    for power in range(53):  # at all distances that doubling steps ask for
        store.create(incarnation_key("l0", 1 << power), JUNK)
    assert store.claimed(SUMS) <= REACH + 1 and store.looks <= 4 * REACH.bit_length() + 2 * STRANGERS_PASSED


def test_one_who_takes_each_number_first_ends_the_claim_with_words() -> None:
    store = ClaimBucket(JUNK)
    with pytest.raises(OccupiedError, match=f"{CLAIMS_TRIED} numbers first"):
        store.claimed(SUMS)


def test_an_offer_that_its_learner_did_not_write_is_damaged_once_the_next_one_is_there() -> None:
    store, key = ClaimBucket(), offer_key("l0", 1, 1)
    store.create(offer_key("l0", 1, 0), JUNK)
    found = store.perform(next_offer(SUMS, "l0", 1, 0))
    assert found.data is None and not found.damaged
    store.create(key, SUMS.sign("learner/l0", key, b'{"a":1}'))
    assert store.perform(next_offer(SUMS, "l0", 1, 0)).damaged
    assert store.perform(next_offer(SUMS, "l0", 1, 1)).data is not None


@pytest.mark.parametrize("dead", [0, 1, 2, 1000, 4097])
def test_the_first_free_epoch_is_claimed_by_few_looks_behind_any_number_of_dead_ones(dead: int) -> None:
    store = CountingLooks()
    for epoch in range(1, dead + 1):
        store.create(epoch_key(genesis().epoch + epoch), b"{}")
    assert store.perform(claim_epoch(RUN, CLAIM, genesis())) == genesis().epoch + dead + 1
    assert store.looks <= 1 + 4 * max(1, dead).bit_length()


def test_the_newest_epoch_that_is_claimed_is_found() -> None:
    store = CountingLooks()
    for epoch in range(1, 8):
        store.create(epoch_key(epoch), b"%d" % epoch)
    assert store.perform(newest_epoch(0)) == (7, b"7") and store.perform(newest_epoch(7)) is None


def test_epochs_that_lie_apart_drive_a_number_on_by_a_bounded_way() -> None:
    store = CountingLooks()
    for power in range(53):  # at all distances that doubling steps ask for
        store.create(epoch_key((1 << power) + genesis().epoch), b"{}")
    assert store.perform(claim_epoch(RUN, CLAIM, genesis())) <= genesis().epoch + 2 * REACH


def test_one_who_takes_each_epoch_first_ends_the_claim_with_words() -> None:
    with pytest.raises(TryAgainError, match="64 epochs in a row"):
        CountingLooks(b"{}").perform(claim_epoch(RUN, CLAIM, genesis()))
