"""A store with a small quota: the syncer collects before its writes wait for a person, in any state of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.errors import NoSpaceError
from diloco_cli.protocol.actors import collection
from diloco_cli.protocol.actors.syncer import NoEvaluator, Syncer, make_room, serving
from diloco_cli.protocol.log.operations import Create, Operation, Put, Sleep, Steps, There, Together
from diloco_cli.protocol.regions import Mirror
from diloco_cli.store.retry import FULL_DISK_PAUSE_S
from diloco_cli.virtual.world import Actor
from tests.faulty_world import Fault, FaultyWorld, Injected
from tests.histories.integers import IntegerArithmetic
from tests.histories.replayer import in_one
from tests.simulation.operated import run_that_keeps, state_of
from tests.simulation.regional import RegionalFleet, regional_run
from tests.simulation.sweeps import check
from tests.simulation.toy import ToyFleet

RUN = run_that_keeps(2, merges=40)
SIZED = ("delta/", "state/", "weights/")
"""Large objects alone find no room: a disk that is full to the last byte is filled by them first."""


class Quota:
    """The store holds at most so many large objects. `holds_up(record)`: the first such commit finds no room until a
    floor has taken its number, `held`."""

    def __init__(self, world: FaultyWorld, quota: int) -> None:
        self.world, self.quota = world, quota
        self.refused: list[str] = []
        self.holds_up: Callable[[dict[str, Any]], bool] = lambda record: False
        self.held = ""

    @property
    def used(self) -> int:
        return sum(len(self.world.store.list(kind, limit=100_000)) for kind in SIZED)

    def fault_of(self, actor: Actor, operation: Operation) -> Injected | None:
        if isinstance(operation, Create) and operation.key.startswith("commit/"):
            if not self.held and self.holds_up(in_one(operation.data)):
                self.held = operation.key
            waits = operation.key == self.held and in_one(operation.data)["kind"] != "gc_floor"
            return Injected(Fault.FULL) if waits and self.world.store.get(self.held) is None else None
        if not isinstance(operation, Create) or not operation.key.startswith(SIZED) or self.used < self.quota:
            return None
        self.refused.append(operation.key.partition("/")[0])
        return Injected(Fault.FULL)


def patient(steps: Steps[Any], room: Callable[[], Steps[object]] | None = None) -> Steps[Any]:
    """As a daemon's store does (store/retry.py): a write without room is repeated, and the syncer makes room before."""
    answer: Any = None
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        if isinstance(operation, Together):
            answer = yield operation
            failed = [place for place, one in enumerate(answer) if isinstance(one, NoSpaceError)]
            for place in failed:
                answer[place] = yield from _repeated(operation.operations[place], room)
        elif isinstance(operation.operation if isinstance(operation, There) else operation, Create | Put):
            answer = yield from _repeated(operation, room)
        else:
            answer = yield operation


def _repeated(operation: Any, room: Callable[[], Steps[object]] | None) -> Steps[Any]:
    while True:
        try:
            return (yield operation)
        except NoSpaceError:
            if room is not None:
                yield from room()
            yield Sleep(FULL_DISK_PAUSE_S)


class FullFleet(ToyFleet):
    """All processes write to a store with a quota. `collects`: whether the syncer makes room."""

    def __init__(self, quota: int, collects: bool = True, run: Any = RUN) -> None:
        world = FaultyWorld()
        self.full = Quota(world, quota)
        world.fault_of = self.full.fault_of
        self.collects = collects
        super().__init__(run, world)

    def syncer(self, name: str = "syncer", delay_s: float = 0.0) -> Actor:
        served = Syncer(
            self.run, self.claim(), IntegerArithmetic(self.run, unfit=self._unfit), NoEvaluator(), lambda: "then",
            self.nonce,
        )  # fmt: skip
        self.served = served
        room = (lambda: make_room(served)) if self.collects else None
        return self.world.start(name, patient(serving(served), room), delay_s)

    def _start_thread(self, process: Any, name: str, steps: Steps[Any], delay_s: float = 0.0) -> Actor:
        return super()._start_thread(process, name, patient(steps), delay_s)


@pytest.fixture(autouse=True)
def rare_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn no floor is due before the store is full."""
    monkeypatch.setattr(collection, "FLOORS_APART", 1000)
    monkeypatch.setattr(collection, "IDLE_S", 10.0)


def test_a_full_store_heals_itself_and_without_collection_it_does_not() -> None:
    healed, stuck = FullFleet(64).start(), FullFleet(64, collects=False).start()
    healed.finish(within_s=300.0)
    assert healed.full.refused and check(healed).kinds[-1] == "finish"
    reasons = [record["reason"] for record in healed.records() if record["kind"] == "gc_floor"]
    assert any("no space is left" in reason for reason in reasons)
    stuck.world.run_for(5.0)
    assert stuck.full.refused and "finish" not in stuck.kinds()


def test_a_run_whose_learners_find_no_room_and_that_pauses_for_its_quorum_collects() -> None:
    """The syncer itself has nothing to write: it cannot see that the others find no room."""
    fleet = FullFleet(1000).start()
    fleet.until_commits(30)
    fleet.full.quota = 0
    merges = fleet.kinds().count("merge")
    fleet.world.run_for(3.0)
    paused = fleet.kinds().count("merge")
    assert paused <= merges + 2 and "gc_floor" not in fleet.kinds()
    fleet.full.quota = 64
    fleet.finish(within_s=300.0)
    assert "gc_floor" in fleet.kinds()


def test_outcomes_that_a_commit_was_to_bring_come_with_the_next_one_when_a_floor_has_its_number() -> None:
    fleet = FullFleet(1000)
    fleet._unfit = lambda offer: "not_finite" if offer.learner == "l0" and offer.seq % 4 == 3 else None
    fleet.full.holds_up = lambda record: record["n"] > 30 and record["kind"] == "merge" and bool(record["outcomes"])
    fleet.start().finish(within_s=300.0)
    floor = fleet.records()[int(fleet.full.held.partition("/")[2].split(".")[0])]
    assert floor["kind"] == "gc_floor" and check(fleet).kinds[-1] == "finish"
    assert has_no_holes(fleet)


def test_a_finish_whose_number_a_floor_takes_is_written_behind_it() -> None:
    fleet = FullFleet(1000)
    fleet.full.holds_up = lambda record: record["kind"] == "finish"
    fleet.start().finish(within_s=300.0)
    assert fleet.full.held and check(fleet).kinds[-2:] == ["gc_floor", "finish"]
    assert has_no_holes(fleet)


class FullRegion(RegionalFleet):
    """The region's bucket holds so many weights, and the mirror makes room there if it `collects`."""

    def __init__(self, quota: int, collects: bool) -> None:
        settings = replace(regional_run(merges=40).settings, retention=RUN.settings.retention)
        super().__init__(replace(regional_run(merges=40), settings=settings))
        self.quota, self.refused = quota, 0
        self.world.fault_of = self._full
        room = self._room if collects else None
        self.patience.drive = lambda steps: patient(steps, room)  # type: ignore[method-assign]

    def _room(self) -> Steps[object]:
        return self.mirror.make_room()

    def _full(self, actor: Actor, operation: Operation) -> Injected | None:
        one = operation.operation if isinstance(operation, There) else None
        if not isinstance(one, Create) or not one.key.startswith("weights/"):
            return None
        is_full = len(self.far.list("weights/")) >= self.quota
        self.refused += is_full
        return Injected(Fault.FULL) if is_full else None


@pytest.mark.parametrize("collects", [True, False])
def test_a_regions_full_bucket_heals_though_its_mirror_never_rests(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "FLOORS_APART", 4)
    monkeypatch.setattr(Mirror, "_rest", lambda mirror: iter([Sleep(0.05)]))  # as where there is always more to copy
    fleet = FullRegion(20, collects).start()
    over = fleet.world.run(fleet.ended, 120.0)
    assert fleet.refused and over == collects
    if over:
        assert fleet.far.list("commit/") == fleet.world.store.list("commit/")


def has_no_holes(fleet: FullFleet) -> bool:
    """Whether no offer was passed over: every number up to a learner's last outcome has one."""
    return not any(known.settled for known in state_of(fleet).learners.values())
