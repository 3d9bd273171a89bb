"""A store that takes 50 calls a second, in virtual time: the pace falls to that, and learners share it evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from diloco_cli.histories.client import Client
from diloco_cli.histories.ports import LearnerProfile
from diloco_cli.protocol.log.operations import Now, Operation, Put, Sleep, Steps, Together
from diloco_cli.protocol.log.together import together
from diloco_cli.store.port import StoreThrottledError, StoreUnavailableError
from diloco_cli.store.throttle import CallPace
from diloco_cli.virtual.faulty_calls import Fault, Injected
from diloco_cli.virtual.world import Actor, World
from tests.simulation.test_calls_in_turn import asks, operations
from tests.simulation.toy import ToyFleet, make_run

ALLOWED, BURST = 50.0, 10.0  # calls a second; at once
LEARNERS, STEP_S, SECONDS = 8, 0.5, 600.0


class PacedClient(Client):
    """With each call does what `ThrottledStore` does."""

    def __init__(self, pace: CallPace, now_s: Callable[[], float]) -> None:
        super().__init__(lambda: 0.5, now_s)
        self.pace, self.now_s = pace, now_s

    def drive(self, steps: Steps[Any]) -> Steps[Any]:
        driven, answer, error = super().drive(steps), None, None
        while True:
            try:
                sent = driven.send(answer) if error is None else driven.throw(error)
            except StopIteration as stop:
                return stop.value
            answer = error = None
            try:
                answer = yield from self._paced(sent)
            except StoreUnavailableError as raised:
                error = raised

    def _paced(self, operation: Operation) -> Steps[Any]:
        if isinstance(operation, Sleep | Now):
            return (yield operation)
        if isinstance(operation, Together):
            return (yield from together([self._caught(one) for one in operation.operations]))
        yield Sleep(self.pace.wait_s(self.now_s()))
        try:
            answer = yield operation
        except StoreThrottledError as error:
            if not isinstance(operation, Put):
                self.pace.refused(self.now_s(), error.retry_after_s)
            raise
        self.pace.went_well()
        return answer

    def _caught(self, operation: Operation) -> Steps[Any]:
        try:
            return (yield from self._paced(operation))
        except StoreUnavailableError as error:
            return error


class ThrottlingWorld(World):
    """Calls beyond the allowed rate are refused; each process has a client of its own, with the product's rule."""

    def __init__(self, **options: Any) -> None:
        super().__init__(fault_of=self._too_many, latency_s=lambda actor, call: 0.02, **options)
        self.paces: dict[str, CallPace] = {}
        self.clients: dict[str, Client] = {}
        self.taken, self.refused = Counter[int](), Counter[int]()
        self.saved, self.saved_at_s = BURST, 0.0

    def start(self, name: str, steps: Steps[Any], delay_s: float = 0.0) -> Actor:
        process = name.partition("/")[0]
        if process not in self.clients:
            pace = self.paces[process] = CallPace(LEARNERS if process == "syncer" else 1)
            self.clients[process] = PacedClient(pace, lambda: self.now_s)
        return super().start(name, self.clients[process].drive(steps), delay_s)

    def _too_many(self, actor: Actor, operation: Operation) -> Injected | None:
        self.saved = min(BURST, self.saved + ALLOWED * (self.now_s - self.saved_at_s))
        self.saved_at_s = self.now_s
        if self.saved < 1.0:
            self.refused[int(self.now_s)] += 1
            return Injected(Fault.RATE_LIMITED)
        self.saved -= 1.0
        self.taken[int(self.now_s)] += 1
        return None


def played(seconds: float, **options: Any) -> tuple[ToyFleet, ThrottlingWorld]:
    """Slots of a second, in which learners and syncer would make twice as many calls."""
    world = ThrottlingWorld(**options)
    fleet = ToyFleet(make_run(learners=LEARNERS, merges=100_000), world)
    fleet.profile |= {f"l{number}": LearnerProfile(STEP_S) for number in range(LEARNERS)}
    fleet.start()
    world.run_for(seconds)
    return fleet, world


def test_the_pace_falls_to_what_is_allowed_and_learners_share_it() -> None:
    """With one connection each, and with as many as there are calls. The second makes about half as many merges, as
    learners then spend more calls on looks for the next commit: still to be mended."""
    for connections in (1, None):
        fleet, world = played(SECONDS, connections=connections)
        merged = Counter(item["learner"] for record in fleet.records() for item in record.get("inputs", ()))
        taken, refused = sum(world.taken.values()), sum(world.refused.values())
        assert len(merged) == LEARNERS and max(merged.values()) <= 1.1 * min(merged.values()), merged
        used = 0.8 if connections is None else 0.6  # one connection cannot always make as many
        assert used * ALLOWED * SECONDS < taken <= ALLOWED * SECONDS + BURST and refused < 0.1 * taken
        assert world.paces["syncer"].limit is not None and fleet.kinds().count("skip") <= 2
        assert fleet.served.state.merges > 30


def test_a_run_goes_to_its_end_with_one_connection() -> None:
    fleet = ToyFleet(make_run(learners=3, merges=6), World(connections=1)).start()
    fleet.finish()
    assert fleet.served.state.merges >= 6 and not fleet.errors()


def test_with_one_connection_calls_of_a_set_take_as_long_as_one_after_the_other() -> None:
    """With two, the third begins when the first is done."""
    took_s = []
    for connections in (1, 2, None):
        world = World(latency_s=lambda actor, call: 1.0, connections=connections)
        actor = world.start("x", asks(operations("a", "b", "c"), []))
        assert world.run(lambda actor=actor: actor.ended, 10.0)  # type: ignore[misc]
        took_s.append(world.now_s)
    assert took_s == [3.0, 2.0, 1.0]
