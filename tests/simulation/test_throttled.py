"""A store that takes 50 calls a second, in virtual time: the pace falls to that, and learners share it evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from diloco_cli.protocol.log.operations import Now, Operation, Put, Sleep, Steps
from diloco_cli.store.wrappers import CallPace
from diloco_cli.virtual.world import Actor
from tests.faulty_world import Fault, FaultyCall, FaultyWorld, Injected
from tests.histories.client import Client
from tests.histories.learner import LearnerProfile
from tests.simulation.test_calls_in_turn import asks, operations
from tests.simulation.toy import ToyFleet, make_run

ALLOWED, BURST = 50.0, 10.0  # calls a second; at once
CALL_S, LEARNERS, STEP_S = 0.02, 8, 0.5


class ThrottlingWorld(FaultyWorld):
    """Calls beyond the allowed rate are refused. Each process has a client of its own, and a pace by the product's rule
    (store/throttle.py), for which each of its calls waits by itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(fault_of=self._too_many, **options)
        self.paces: dict[str, CallPace] = {}
        self.clients: dict[str, Client] = {}
        self.taken, self.refused = Counter[int](), Counter[int]()
        self.saved, self.saved_at_s = BURST, 0.0

    def start(self, name: str, steps: Steps[Any], delay_s: float = 0.0) -> Actor:
        process = _process(name)
        if process not in self.clients:
            self.paces[process] = CallPace(LEARNERS if process == "syncer" else 1)
            self.clients[process] = Client(lambda: 0.5, lambda: self.now_s)
        return super().start(name, self.clients[process].drive(steps), delay_s)

    def _begun(self, actor: Actor, operations: Sequence[Operation]) -> list[FaultyCall]:
        free_s = [self.now_s] * (self.connections or len(operations))
        calls = []
        for one in operations:
            start_s = heappop(free_s)
            calls.append(FaultyCall(one, start_s + self._turn_s(actor, one, start_s)))
            heappush(free_s, calls[-1].due_s)
        return calls

    def _wait_s(self, actor: Actor, operation: Operation) -> float:
        return self._turn_s(actor, operation, self.now_s)

    def _turn_s(self, actor: Actor, operation: Operation, start_s: float) -> float:
        if isinstance(operation, Sleep | Now):
            return super()._wait_s(actor, operation)
        return self.paces[_process(actor.name)].wait_s(start_s) + CALL_S

    def _too_many(self, actor: Actor, operation: Operation) -> Injected | None:
        pace = self.paces[_process(actor.name)]
        self.saved = min(BURST, self.saved + ALLOWED * (self.now_s - self.saved_at_s))
        self.saved_at_s = self.now_s
        if self.saved >= 1.0:
            self.saved -= 1.0
            self.taken[int(self.now_s)] += 1
            pace.went_well()
            return None
        self.refused[int(self.now_s)] += 1
        if not isinstance(operation, Put):
            pace.refused(self.now_s)
        return Injected(Fault.RATE_LIMITED)


def _process(actor: str) -> str:
    return actor.partition("/")[0]


def played(seconds: float, **options: Any) -> tuple[ToyFleet, ThrottlingWorld]:
    """Slots of a second, in which learners and syncer would make twice as many calls."""
    world = ThrottlingWorld(**options)
    fleet = ToyFleet(make_run(learners=LEARNERS, merges=100_000), world)
    fleet.profile |= {f"l{number}": LearnerProfile(STEP_S) for number in range(LEARNERS)}
    fleet.start()
    world.run_for(seconds)
    return fleet, world


def goes_at_the_allowed_pace(seconds: float, alike: float) -> None:
    """With one connection each, and with as many as there are calls, which must not be worse. `alike`: how many times
    as often as another one a learner is merged at most."""
    merges = []
    for connections in (1, None):
        fleet, world = played(seconds, connections=connections)
        merged = Counter(item["learner"] for record in fleet.records() for item in record.get("inputs", ()))
        taken, refused = sum(world.taken.values()), sum(world.refused.values())
        assert len(merged) == LEARNERS and max(merged.values()) <= alike * min(merged.values()), merged
        assert taken > 0.8 * ALLOWED * seconds and refused < 0.1 * taken
        assert world.paces["syncer"].limit is not None and fleet.kinds().count("skip") <= seconds / 30
        merges.append(fleet.served.state.merges)
    assert seconds / 4 < merges[0] <= 1.05 * merges[1], merges


def test_the_pace_falls_to_what_is_allowed_and_learners_share_it() -> None:
    goes_at_the_allowed_pace(240.0, alike=1.6)


def test_a_run_goes_to_its_end_with_one_connection() -> None:
    fleet = ToyFleet(make_run(learners=3, merges=6), FaultyWorld(connections=1)).start()
    fleet.finish()
    assert fleet.served.state.merges >= 6 and not fleet.errors()


def test_with_one_connection_calls_of_a_set_take_as_long_as_one_after_the_other() -> None:
    """With two, the third begins when the first is done."""
    took_s = []
    for connections in (1, 2, None):
        world = FaultyWorld(latency_s=lambda actor, call: 1.0, connections=connections)
        actor = world.start("x", asks(operations("a", "b", "c"), []))
        assert world.run(lambda actor=actor: actor.ended, 10.0)  # type: ignore[misc]
        took_s.append(world.now_s)
    assert took_s == [3.0, 2.0, 1.0]
