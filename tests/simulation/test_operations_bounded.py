"""Store operations are counted: per slot and learner, per commit, and as a run grows old."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import Link, RunSettings, SyncSettings, TrainSettings
from diloco_cli.forecast.fleet import SimulatedFleet
from diloco_cli.forecast.stand_ins import Sizes
from diloco_cli.protocol.log.operations import Operation, Together
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.protocol.rules.pacing import MAX_REQUESTS
from diloco_cli.virtual.world import Actor
from tests.faulty_world import FaultyWorld
from tests.simulation.toy import run_of

FRAGMENTS = 4
BATCH = 100
NAMES = ("l0", "l1", "l2")
SLOTS = pytest.mark.parametrize("slot_s", [2.0, 10.0, 60.0])
SIZES = Sizes((1e6,) * FRAGMENTS, (1e6,) * FRAGMENTS, 0.0)


@dataclass(frozen=True)
class CountedOperations:
    """One operation on the store: when, by whom (`syncer` or a learner), and which: `get offer`, `create commit`."""

    at_s: float
    who: str
    verb: str
    kind: str
    key: str


@dataclass
class CountedWorld(FaultyWorld):
    """Notes every operation on the store as it is asked for."""

    asked: list[CountedOperations] = field(default_factory=list)

    def _hold(self, actor: Actor, operation: Operation) -> None:
        for one in operation.operations if isinstance(operation, Together) else (operation,):
            key = getattr(one, "key", None)
            if key is not None:
                verb = type(one).__name__.lower()
                counted = CountedOperations(self.now_s, actor.name or "fault", verb, key.partition("/")[0], key)
                self.asked.append(counted)
        super()._hold(actor, operation)


def make_run(slot_s: float, slots: int) -> RunFormat:
    """Three islands a little unlike each other, ten steps a slot."""
    every, step_s = 10 * FRAGMENTS, slot_s / 10
    settings = RunSettings(
        name="counted",
        train=TrainSettings(tokens=10 * slots * BATCH * len(NAMES), batch_tokens=BATCH),
        sync=replace(SyncSettings(every=every, fragments=FRAGMENTS, mixing="rebase"), codec="bf16"),
    )
    islands = (
        Island(name, "here", BATCH, every, 0.0, step_s * (1 + 0.004 * i), link=Link(1e9, 1e9, 0.01))
        for i, name in enumerate(NAMES)
    )
    return run_of(settings, islands, elements=10)


@cache
def played(slot_s: float, slots: int = 60) -> tuple[list[CountedOperations], list[float]]:
    """(every operation, when each slot was merged)."""
    world = CountedWorld()
    fleet = SimulatedFleet(make_run(slot_s, slots), SIZES, {}, world=world, latency_s=0.02)
    fleet.run_for(2 * slots * slot_s)
    assert fleet.state.phase == "FINISHED" and fleet.state.metrics.skips == 0
    merged = [a.at_s for a in world.asked if (a.verb, a.kind) == ("create", "commit")]
    return world.asked, merged


def max_in_a_slot(asked: Iterable[CountedOperations], slot_s: float) -> int:
    """Once everybody has joined."""
    times = sorted(a.at_s for a in asked if a.at_s > 2 * slot_s)
    return max(sum(t <= u < t + slot_s for u in times) for t in times)


@SLOTS
def test_each_learners_offers_and_the_log_are_looked_for_a_few_times_a_slot(slot_s: float) -> None:
    """At most `MAX_REQUESTS` in any stretch of a slot, those that find nothing behind an offer included."""
    asked, merged = played(slot_s)
    for name in NAMES:
        gets = [a for a in asked if a.verb == "get"]
        by_the_syncer = [a for a in gets if a.who == "syncer" and a.key.startswith(f"offer/{name}/")]
        by_the_learner = [a for a in gets if a.who == name and a.kind == "commit"]
        for looks in (by_the_syncer, by_the_learner):
            assert max_in_a_slot(looks, slot_s) <= MAX_REQUESTS
            assert len(looks) <= (MAX_REQUESTS - 1) * len(merged), "on average"


@SLOTS
def test_what_was_published_is_found_within_a_twentieth_of_a_slot(slot_s: float) -> None:
    """On average over the run, from the offer's creation to the syncer's request that finds it; half a second is the
    syncer's own turn."""
    asked, _ = played(slot_s)
    published = {a.key: a.at_s for a in asked if (a.verb, a.kind) == ("create", "offer")}
    found: dict[str, float] = {}
    for look in asked:
        if look.who == "syncer" and published.get(look.key, look.at_s) < look.at_s:
            found.setdefault(look.key, look.at_s)
    waits = [found[key] - at_s for key, at_s in published.items() if key in found]
    assert len(waits) >= 0.9 * len(published)
    assert sum(waits) / len(waits) <= slot_s / 20 + 0.05
    assert sum(wait <= slot_s / 20 + 0.55 for wait in waits) >= 0.9 * len(waits)


def test_a_commit_costs_six_operations_of_its_own_with_its_versions() -> None:
    """State and weights written and read back, the commit; once in `SNAPSHOT_EVERY` commits a snapshot and its hint.
    Payloads of learners, and the looking for offers and requests, are apart."""
    asked, merged = played(10.0, 200)
    apart = {"offer", "delta", "incarnation", "request", "heartbeat"}
    own = Counter(
        (a.verb, a.kind)
        for a in asked
        if a.who == "syncer" and a.kind not in apart and (a.verb, a.kind) != ("get", "commit")
    )
    assert own["create", "commit"] == len(merged)
    assert own.total() <= 6 * len(merged)
    assert own["create", "snapshot"] <= len(merged) // 64 + 1


def test_operations_do_not_grow_with_the_age_of_a_run() -> None:
    asked, merged = played(2.0, 520)
    counts = [sum(first <= a.at_s < last for a in asked) for first, last in _stretches(merged, (10, 500), 20)]
    assert counts[1] <= 1.1 * counts[0]


def _stretches(merged: list[float], starts: tuple[int, ...], length: int) -> list[tuple[float, float]]:
    """From so many merges on, for so many more."""
    return [(merged[start], merged[start + length]) for start in starts]
