"""Calls that depend on each other, counted in virtual time where each takes a second and nothing else takes any."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import commit_key, delta_key, offer_key
from diloco_cli.protocol.log.operations import MAX_AT_ONCE, Create, Get, Operation, Steps, Together
from diloco_cli.protocol.log.records import decode
from diloco_cli.virtual.world import Actor
from tests.faulty_world import Fault, FaultyWorld
from tests.simulation.toy import ToyFleet, make_run


def operations(*keys: str) -> Together:
    return Together(tuple(Create(key, b"data") for key in keys))


def asks(operation: Operation, found: list[Any]) -> Steps[None]:
    found.append((yield operation))


def test_operations_that_go_together_take_the_time_of_the_slowest() -> None:
    world, found = FaultyWorld(latency_s=lambda actor, call: {"a": 1.0, "b": 3.0, "c": 2.0}[call.key]), list[Any]()
    world.start("x", asks(operations("a", "b", "c"), found))
    world.run_for(2.5)
    assert world.store.list("") == ["a", "c"] and not found
    world.run_for(1.0)
    assert world.store.list("") == ["a", "b", "c"] and len(found[0]) == 3


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_actor_that_dies_leaves_the_later_ones_undone(number: int) -> None:
    latency = {"a": 1.0, "b": 3.0, "c": 2.0}
    world = FaultyWorld(latency_s=lambda actor, call: latency[call.key], faults={("x", number): Fault.CRASH_AFTER})
    actor = world.start("x", asks(operations("a", "b", "c"), []))
    world.run_for(10.0)
    assert actor.ended and world.store.list("") == sorted(["a", "c", "b"][: number + 1])


def test_a_fault_hits_one_of_them_and_the_others_have_their_answers() -> None:
    world, found = FaultyWorld(faults={("x", 1): Fault.BUSY}), list[Any]()
    world.start("x", asks(operations("a", "b", "c"), found))
    world.run_for(1.0)
    assert [isinstance(answer, Exception) for answer in found[0]] == [False, True, False]
    assert world.store.list("") == ["a", "c"]


def test_a_paused_actor_makes_the_rest_of_its_calls_when_it_goes_on() -> None:
    world, found = FaultyWorld(faults={("x", 1): Fault.PAUSE}), list[Any]()
    actor = world.start("x", asks(operations("a", "b", "c"), found))
    world.run_for(1.0)
    assert actor.paused and world.store.list("") == ["a"] and not found
    world.resume(actor)
    world.run_for(1.0)
    assert world.store.list("") == ["a", "b", "c"] and len(found[0]) == 3


class Timed(FaultyWorld):
    """Notes when the syncer last created or read each object."""

    def __init__(self, checks_uploads: bool) -> None:
        super().__init__(
            checks_uploads=checks_uploads, latency_s=lambda actor, call: 1.0 if actor.name == "syncer" else 0.001
        )
        self.created_s: dict[str, float] = {}
        self.read_s: dict[str, float] = {}

    def _effect(self, actor: Actor, operation: Operation) -> Any:
        if actor.name == "syncer" and isinstance(operation, Create | Get):
            times = self.created_s if isinstance(operation, Create) else self.read_s
            times[operation.key] = self.now_s
        return super()._effect(actor, operation)


def merges_of(world: Timed) -> list[Commit]:
    keys = world.store.list("commit/", limit=1000)
    found = [decode(Commit, world.store.get(key) or b"", key) for key in keys]
    return [commit for commit in found if commit.kind == "merge"]


@pytest.mark.parametrize("checks_uploads", [False, True])
@pytest.mark.parametrize("learners", [1, 8, MAX_AT_ONCE // 2, MAX_AT_ONCE])
def test_a_merge_takes_as_many_calls_in_turn_however_many_learners_there_are(
    learners: int, checks_uploads: bool
) -> None:
    """From the first of a merge's offers that is read to the commit: the others with it; payloads, and the look behind
    the offers, in two portions where these are more than may go at a time; state and weights are written, then read
    back, where the store does not check them; the commit."""
    world, portions = Timed(checks_uploads), 2.0 if 2 * learners > MAX_AT_ONCE else 1.0
    written = 2.0 if checks_uploads else 3.0
    fleet = ToyFleet(make_run(learners=learners, merges=30, quorum=learners), world).start()
    assert world.run(lambda: fleet.served.state.merges >= 3, 2000.0)
    merge = merges_of(world)[0]
    ids = [(one.learner, one.incarnation, one.seq) for one in merge.inputs]
    payloads = [delta_key(*one, item.payload_digest) for one, item in zip(ids, merge.inputs, strict=True)]
    at_s, read_s = world.created_s[commit_key(merge.n)], world.read_s
    assert len(ids) == learners
    assert at_s - min(read_s[offer_key(*one)] for one in ids) == portions + written
    assert at_s - min(read_s[key] for key in payloads) == written
