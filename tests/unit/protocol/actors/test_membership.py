"""In which order requests to join are read, while others write what are none."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings
from diloco_cli.protocol.actors.membership import JUNK_PER_LOOK, JoinQueue
from diloco_cli.protocol.log.keys import join_key
from diloco_cli.protocol.log.records import Island, Join, encode
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from tests.unit.protocol.records import BATCH, RUN, genesis

STATE = genesis()
ROOMY = replace(RUN, settings=replace(RUN.settings, data=DataSettings(shards=8)))
BEFORE = 20


class Flooded:
    """A queue in whose bucket others write. `look()`: the names of the islands that one look finds."""

    def __init__(self) -> None:
        self.store, self.queue = MemoryStore(), JoinQueue(ROOMY)
        self.junk = 0

    def flood(self, number: int, name: str) -> None:
        for _ in range(number):
            self.junk += 1
            self.store.create(join_key(f"{name}{self.junk:04d}", STATE.epoch, 0), b"junk")

    def request(self, name: str, number: int = 0) -> None:
        join = Join(Island(name, "eu", BATCH, 4, 0.0, 0.0), STATE.epoch, number, "nonce", "then")
        self.store.create(join_key(name, STATE.epoch, number), encode(join))

    def look(self) -> list[str]:
        clock = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)
        return [found.island.name for found in perform(self.queue.look(STATE), self.store, clock)]


@pytest.mark.parametrize("junk", ["a", "z"], ids=["listed before it", "listed after it"])
def test_a_flood_that_goes_on_delays_a_request_by_what_lies_before_it_alone(junk: str) -> None:
    flooded = Flooded()
    flooded.flood(BEFORE, junk)
    flooded.request("newcomer")
    looks = 1
    while "newcomer" not in flooded.look():
        looks += 1
        assert looks <= 1 + BEFORE // (JUNK_PER_LOOK // 2)
        flooded.flood(10 * JUNK_PER_LOOK, junk)


def test_a_request_made_again_behind_a_flood_is_found_at_once() -> None:
    flooded = Flooded()
    flooded.flood(100 * JUNK_PER_LOOK, "a")
    flooded.look()
    flooded.request("newcomer", number=1)
    assert flooded.look() == ["newcomer"]
