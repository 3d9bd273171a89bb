"""What the parts of a history (nemesis, supervisor, region, liveness) know of it and of each other. None of them
imports the history itself, so they can be read one by one."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import Island, Offer, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.virtual.world import World
from tests.histories.client import Bucket
from tests.histories.monitor import Monitor
from tests.histories.options import Options
from tests.histories.outcome import Actors
from tests.histories.processes import Process
from tests.histories.stream import Stream
from tests.histories.witness import Beliefs


class Processes(Protocol):
    """Of a SimulatedSupervisor."""

    processes: list[Process]

    def living(self, role: str) -> list[Process]: ...
    def new_process(self, role: str) -> Process: ...
    def start_syncer(self, delay_s: float = 0.0) -> None: ...
    def start_learner(self, name: str, delay_s: float = 0.0) -> None: ...
    def as_learner(self, name: str, run: RunFormat) -> RunFormat: ...
    def learner_steps(self, process: Process, run: RunFormat) -> Steps[RunState]: ...
    def crashed(self, process: Process) -> None: ...
    def revive(self, role: str) -> None: ...
    def freeze(self, process: Process, for_s: float) -> None: ...


class Interventions(Protocol):
    """Of a Nemesis."""

    joiners: dict[str, Island]
    keys_made: Counter[str]
    stopped: bool

    def start(self, role: str) -> None: ...
    def readmit_nobody(self) -> None: ...
    def crash(self, role: str) -> None: ...
    def unfit(self, offer: Offer) -> str | None: ...
    def leaves(self, name: str) -> bool: ...
    def share(self, name: str) -> float: ...
    def poison(self, name: str) -> int | str | None: ...
    def corrupts(self, name: str) -> bool: ...
    def harms(self, name: str) -> bool: ...
    def paused(self) -> None: ...
    def lengthens(self, name: str) -> float: ...


class Apart(Protocol):
    """Of a Region."""

    bucket: Bucket
    residents: set[str]
    mirrored: int

    def serve(self, process: Process, served: Syncer) -> Steps[RunState]: ...


class HealthyPhase(Protocol):
    """Of a Healthy."""

    def left(self, process: Process, error: BaseException | None) -> None: ...


class Scene(Protocol):
    """Of a History."""

    seed: int
    walls: int
    changes: int
    roles: list[str]
    options: Options
    actors: Actors
    run: RunFormat
    bucket: Bucket
    monitor: Monitor
    beliefs: Beliefs
    draw: Stream

    @property
    def world(self) -> World: ...
    @property
    def nemesis(self) -> Interventions: ...
    @property
    def supervisor(self) -> Processes: ...
    @property
    def region(self) -> Apart | None: ...
    @property
    def healthy(self) -> HealthyPhase | None: ...
    def note(self, text: str) -> None: ...
