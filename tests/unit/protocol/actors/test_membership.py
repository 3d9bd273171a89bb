"""Which requests to join a look finds."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings
from diloco_cli.protocol.actors import membership
from diloco_cli.protocol.actors.membership import MAX_JOINS_PER_LOOK, JoinQueue
from diloco_cli.protocol.log.keys import join_key
from diloco_cli.protocol.log.records import Island, Join, encode
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from tests.unit.protocol.records import BATCH, RUN, genesis

STATE = genesis()
ROOMY = replace(RUN, settings=replace(RUN.settings, data=DataSettings(shards=8)))


class StoreThatCountsReads(MemoryStore):
    gets = 0

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        self.gets += 1
        return super().get(key, max_bytes)


class Queue:
    """A queue and its bucket. `look()`: the names of the islands that one look finds."""

    def __init__(self) -> None:
        self.store, self.queue = StoreThatCountsReads(), JoinQueue(ROOMY)

    def request(self, name: str, epoch: int = STATE.epoch, number: int = 0, says: str = "") -> None:
        join = Join(Island(says or name, "eu", BATCH, 4, 0.0, 0.0), epoch, number, "nonce", "then")
        self.store.create(join_key(name, epoch, number), encode(join))

    def look(self) -> list[str]:
        clock = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)
        return [found.island.name for found in perform(self.queue.look(STATE), self.store, clock)]


@pytest.mark.parametrize("page", [1, 7, 1000])
def test_a_look_reads_some_and_all_are_read_by_turns(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "PAGE", page)
    queue, names = Queue(), [f"n{number:02d}" for number in range(2 * MAX_JOINS_PER_LOOK)]
    for name in names:
        queue.request(name, epoch=STATE.epoch + 1)  # which does not count
        queue.request(name)
    found: list[str] = []
    while len(found) < len(names):
        before = queue.store.gets
        found += queue.look()
        assert queue.store.gets - before <= MAX_JOINS_PER_LOOK
    assert found == names
    queue.request("a")
    assert "a" in [name for _ in range(3) for name in queue.look()], "after the last one it begins anew"


def test_what_is_no_request_of_that_island_to_this_syncer_is_none() -> None:
    queue = Queue()
    queue.store.create(join_key("junk", STATE.epoch, 0), b"junk")
    queue.request("liar", says="another")
    for epoch in (STATE.epoch - 1, STATE.epoch + 1):
        queue.request("another", epoch=epoch)
    queue.request("l0")  # a member
    assert queue.look() == []
    queue.request("junk", number=1)
    assert queue.look() == ["junk"]
