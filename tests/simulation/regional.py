"""A fleet whose learner l1 lives in a region with a bucket of its own; the syncer's process mirrors and relays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings
from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.log.operations import Operation, Sleep, Steps, There
from diloco_cli.protocol.log.records import RegionStore, RunFormat
from diloco_cli.protocol.regions import RegionLink, RegionStoppedError, home_of, read_after_relays
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from diloco_cli.virtual.world import Actor
from tests.faulty_world import Fault, FaultyWorld, Injected
from tests.histories.client import Client
from tests.simulation.toy import ToyFleet, ToyProcess, make_run

FAR = "eu"
TRIES_AGAIN_S = 0.5
OF_THE_SYNCER = ("syncer", "mirror", "relay")


def regional_run(merges: int = 8, learners: int = 2, **sync: object) -> RunFormat:
    """The first island is at home, the others are far away."""
    run = make_run(learners, merges=merges, **sync)  # type: ignore[arg-type]
    near, *far = run.islands
    return replace(
        run,
        settings=replace(run.settings, data=DataSettings(shards=3)),
        islands=(near, *(replace(island, region=FAR) for island in far)),
        regions=(RegionStore(FAR, "memory://eu/toy"),),
        home_url="memory://home/toy",
    )


class RegionalFleet(ToyFleet):
    """`mirror` and `relay` are threads of the syncer's process: they die with it, and it with them."""

    def __init__(self, run: RunFormat, world: FaultyWorld | None = None) -> None:
        self.far = MemoryStore()
        self.cut_off_until_s = self.fails_until_s = 0.0
        self.failure = Fault.BUSY
        self.far_actors = {island.name for island in run.islands if island.region == FAR}
        self.stops: list[RegionStoppedError] = []
        super().__init__(run, world)
        self.world.store_of = self._store_of
        self.world.held_until_s = self._held_until_s
        self.world.fault_of = self._failing
        self.patience = Client(lambda: 0.5, lambda: self.world.now_s)

    def syncer(self, name: str = "syncer", delay_s: float = 0.0) -> Actor:
        actor = super().syncer(name, delay_s)
        served, leaving = self.served, lambda: actor.ended
        link = RegionLink(self.run, FAR, home_of(served), lambda: bool(self.stops) or leaving(), lambda line: None)
        read_after_relays(served, {FAR: link})
        self.mirror, self.relay = link.mirror, link.relay
        self.threads = [
            self.world.start(what, self.patience.drive(self._thread(steps)), delay_s)
            for what, steps in link.works().items()
        ]
        return actor

    def _start_thread(self, process: ToyProcess, name: str, steps: Steps[Any], delay_s: float = 0.0) -> Actor:
        return super()._start_thread(process, name, self.patience.drive(steps), delay_s)

    def _thread(self, serve: Callable[[], Steps[None]]) -> Steps[str]:
        """Tried again after what only time mends, as in syncer/regions.py."""
        while True:
            try:
                yield from serve()
            except RegionStoppedError as error:
                self.stops.append(error)
                return "stopped"
            except DataCheckError:
                yield Sleep(TRIES_AGAIN_S)
            else:
                return "done"

    def _store_of(self, actor: Actor, operation: Operation) -> Store:
        far = isinstance(operation, There) or actor.name.partition("/")[0] in self.far_actors
        return self.far if far else self.world.store

    def _held_until_s(self, actor: Actor, operation: Operation) -> float:
        """The region, and nothing else; a thread that works between two waits with both."""
        apart = isinstance(operation, There) or actor.name.partition("/")[0] in self.far_actors
        return self.cut_off_until_s if apart else 0.0

    def _failing(self, actor: Actor, operation: Operation) -> Injected | None:
        planned = self.world.faults.pop((actor.name, actor.operations), None)
        if planned is not None:
            return Injected(planned) if isinstance(planned, Fault) else planned
        apart = isinstance(operation, There) or actor.name.partition("/")[0] in self.far_actors
        return Injected(self.failure) if apart and self.world.now_s < self.fails_until_s else None

    def _ended(self, actor: Actor) -> None:
        crashed = actor.result is None and actor.error is None
        if not (crashed and self.restart and actor.name in OF_THE_SYNCER):
            return super()._ended(actor)
        self.restart = False  # its other threads are gone with it; only the process comes back
        self.kill(*OF_THE_SYNCER)
        self.restart = True
        self.syncer(delay_s=0.2)
        return None
