"""How far one looks for the newest claim: few looks at any number of claims, and bounded where claims lie apart."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.errors import TryAgainError
from diloco_cli.protocol.log.claims import REACH, claim_epoch, newest_epoch
from diloco_cli.protocol.log.keys import epoch_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import ProcessClaim
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Exists
from tests.unit.protocol.records import RUN, genesis

CLAIM = ProcessClaim(0, "mine", "host", 1, "then", "test")


class CountingLooks(MemoryStore):
    """`everywhere`: each number is claimed by others."""

    def __init__(self, everywhere: bool = False) -> None:
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
        return Exists(b"{}") if self.everywhere else super().create(key, data)


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


def test_one_who_takes_each_number_first_ends_the_claim_with_words() -> None:
    with pytest.raises(TryAgainError, match="64 epochs in a row"):
        CountingLooks(everywhere=True).perform(claim_epoch(RUN, CLAIM, genesis()))
