"""The relay of a region alone, between two buckets: what it carries home, what it gives up, and what it costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from msgspec import structs

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings
from diloco_cli.digests import digest
from diloco_cli.protocol.log.keys import delta_key, incarnation_key, join_key, offer_key
from diloco_cli.protocol.log.operations import Operation, There
from diloco_cli.protocol.log.records import (
    MAX_RECORD_BYTES,
    Island,
    Join,
    Offer,
    RegionStore,
    RunFormat,
    Timings,
    decode,
    encode,
)
from diloco_cli.protocol.regions import Relay
from diloco_cli.protocol.rules.pacing import MAX_REQUESTS
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Exists
from diloco_cli.virtual.world import LATENCY_S, Actor
from tests.faulty_world import FaultyWorld
from tests.unit.protocol.records import BATCH, RUN, genesis
from tests.unit.protocol.records import offer as make_offer

PACE_S = 4.0


def far_run() -> RunFormat:
    near = RUN.islands[0]
    islands = (near, replace(near, name="l1", region="eu"), replace(near, name="l2", region="eu"))
    settings = replace(RUN.settings, data=DataSettings(shards=8))
    return replace(RUN, settings=settings, islands=islands, regions=(RegionStore("eu", "memory://eu"),))


@dataclass(frozen=True)
class Asked:
    at_s: float
    there: bool
    verb: str
    key: str


class LaggingStore(MemoryStore):
    """Its listings do not show `hidden` yet."""

    hidden: frozenset[str] = frozenset()

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        return [key for key in super().list(prefix, after, limit) if key not in self.hidden]


class DamagedOnce(MemoryStore):
    """Once `verb` is named, its next answer with bytes comes damaged."""

    verb = ""

    def create(self, key: str, data: bytes) -> Created | Exists:
        answer = super().create(key, data)
        if self.verb == "create":  # which finds its own bytes there, and cannot know them
            self.verb = ""
            return Exists(data[::-1])
        return answer

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        data = super().get(key, max_bytes)
        if self.verb == "get" and data is not None:
            self.verb, data = "", data[::-1]
        return data


class RelayBench:
    """A relay at work, and its operations."""

    def __init__(self) -> None:
        self.run, self.far, self.asked = far_run(), LaggingStore(), list[Asked]()
        self.world = FaultyWorld(latency_s=self._noted, store_of=self._store_of)
        self.home, self.state, self.told = self.world.store, genesis(far_run()), list[str]()
        self.start_anew()

    def start_anew(self) -> None:
        """Another process; with nothing but the buckets."""
        for actor in self.world.actors:
            self.world.kill(actor)
        self.relay = Relay(self.run, "eu", lambda: self.state, lambda: PACE_S, tell=self.told.append)
        self.go_on()

    def go_on(self) -> None:
        """As syncer/regions.py does after an error."""
        self.actor = self.world.start("relay", self.relay.serve())

    def count(self, since_s: float, until_s: float) -> Counter[tuple[str, str]]:
        return Counter((a.verb, a.key.partition("/")[0]) for a in self.asked if since_s <= a.at_s < until_s)

    def incarnation(self, learner: str, number: int, claim: bytes = b"claim") -> None:
        self.far.create(incarnation_key(learner, number), claim)

    def offer(self, learner: str, incarnation: int, seq: int, slot_s: float = PACE_S) -> Offer:
        payload = f"{learner}-{incarnation}-{seq}".encode()
        made = make_offer(
            self.state, 0, learner=learner, incarnation=incarnation, seq=seq, payload_digest=digest(payload),
            payload_bytes=len(payload), timings=Timings(0.1, slot_s),
        )  # fmt: skip
        self.far.create(delta_key(*made.id, made.payload_digest), payload)
        self.far.create(offer_key(*made.id), encode(made))
        return made

    def request(self, name: str, number: int = 0, region: str = "eu") -> None:
        island = Island(name, region, BATCH, 4, 0.0, 0.0)
        key = join_key(name, self.state.epoch, number)
        self.far.create(key, encode(Join(island, self.state.epoch, number, f"nonce of {name}", "then")))

    def joins_at_home(self) -> list[str]:
        return [decode(Join, self.home.get(key) or b"", key).island.name for key in self.home.list("join/")]

    def _noted(self, actor: Actor, operation: Operation) -> float:
        there = isinstance(operation, There)
        inner = operation.operation if isinstance(operation, There) else operation
        key = str(getattr(inner, "key", getattr(inner, "prefix", "")))
        self.asked.append(Asked(self.world.now_s, there, type(inner).__name__.lower(), key))
        return LATENCY_S

    def _store_of(self, actor: Actor, operation: Operation) -> MemoryStore:
        return self.far if isinstance(operation, There) else self.home  # type: ignore[return-value]


@pytest.mark.parametrize("claimed_s", [0.0, 1e-9, 0.5, PACE_S, 1e3, 1e6, 1e9])
def test_a_learners_word_on_its_pace_neither_hides_its_offers_nor_costs_more(claimed_s: float) -> None:
    bench = RelayBench()
    bench.incarnation("l1", 1)
    bench.offer("l1", 1, 0, claimed_s)
    bench.world.run_for(10 * PACE_S)
    second = bench.offer("l1", 1, 1, claimed_s)
    assert bench.world.run(lambda: bench.home.get(offer_key(*second.id)) is not None, 4 * PACE_S + 1.0)
    began_s = bench.world.now_s
    bench.world.run_for(40 * PACE_S)
    count = bench.count(began_s, bench.world.now_s)
    assert 10 <= count["get", "offer"] <= 2 * MAX_REQUESTS * 40
    assert count["get", "incarnation"] == 2 * 40, "two learners, once a slot"
    assert count["list", "join"] == 40
    assert sum(count.values()) <= (2 * MAX_REQUESTS + 3 + 4) * 40


def test_a_request_that_a_listing_showed_late_is_found_behind_a_later_one() -> None:
    bench = RelayBench()
    bench.request("early")
    bench.request("late")
    bench.far.hidden = frozenset({join_key("early", 1, 0)})
    bench.world.run_for(2 * PACE_S)
    assert bench.joins_at_home() == ["late"]
    bench.far.hidden = frozenset()
    bench.world.run_for(2 * PACE_S)
    assert bench.joins_at_home() == ["early", "late"]


def test_a_request_is_carried_under_its_key_also_by_the_next_process() -> None:
    bench = RelayBench()
    bench.request("newcomer")
    bench.world.run_for(2 * PACE_S)
    bench.start_anew()
    bench.world.run_for(2 * PACE_S)
    key = join_key("newcomer", 1, 0)
    assert bench.home.list("join/") == [key] and bench.home.get(key) == bench.far.get(key)


def test_requests_to_another_region_of_members_or_of_an_earlier_epoch_stay_where_they_are() -> None:
    bench = RelayBench()
    bench.request("l1")
    bench.request("stranger", region="elsewhere")
    bench.state = structs.replace(bench.state, epoch=0)
    bench.request("left")
    bench.state = genesis(far_run())
    bench.world.run_for(3 * PACE_S)
    assert bench.joins_at_home() == []


@pytest.mark.parametrize("kind", ["incarnation", "offer", "delta", "too large"])
def test_other_bytes_at_home_stop_one_mailbox_and_nobody_else(kind: str) -> None:
    bench = RelayBench()
    bench.incarnation("l1", 1, b"x" * (MAX_RECORD_BYTES + 1) if kind == "too large" else b"claim")
    bench.incarnation("l2", 1)
    spoiled = bench.offer("l1", 1, 0)
    taken = {
        "incarnation": incarnation_key("l1", 1),
        "offer": offer_key(*spoiled.id),
        "delta": delta_key(*spoiled.id, spoiled.payload_digest),
    }
    if kind in taken:
        bench.home.create(taken[kind], b"somebody else's")
    for seq in range(3):
        bench.offer("l2", 1, seq)
    bench.world.run_for(5 * PACE_S)
    assert not bench.actor.ended and all(bench.home.get(offer_key("l2", 1, seq)) for seq in range(3))
    assert list(bench.relay.unheard) == [("l1", 1)] and bench.relay.withheld("l1", 1, 0)
    assert len(bench.told) == 1 and "l1 is not heard" in bench.told[0] and "start l1 again" in bench.told[0]
    assert bench.home.get(offer_key(*spoiled.id)) in (None, b"somebody else's")
    bench.incarnation("l1", 2)
    heard = bench.offer("l1", 2, 0)
    bench.world.run_for(2 * PACE_S)
    assert bench.home.get(offer_key(*heard.id)) is not None and not bench.relay.withheld("l1", 2, 0)
    bench.world.run_for(150.0)
    assert bench.relay.unheard == {}, "what was replaced long ago is no news"


@pytest.mark.parametrize("verb", ["get", "create"])
def test_one_damaged_answer_from_home_silences_nobody(verb: str) -> None:
    bench, home = RelayBench(), DamagedOnce()
    bench.home = home
    bench.incarnation("l1", 1)
    for seq in range(3):
        bench.offer("l1", 1, seq)
    bench.world.run_for(3 * PACE_S)
    home.verb = verb
    bench.start_anew()  # as after a takeover: what home holds is compared
    bench.world.run_for(3 * PACE_S)
    assert not home.verb, "an answer was damaged"
    assert not bench.relay.unheard and not bench.told and not bench.relay.withheld("l1", 1, 2)
