"""Simulated processes: threads that end together, on one clock, with one client of the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any

from diloco_cli.protocol.actors.learner import Learner
from diloco_cli.protocol.actors.syncer import Syncer, make_room
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import OfferId, ProcessClaim
from diloco_cli.store.retry import MAX_PAUSE_S
from diloco_cli.virtual.world import Actor
from tests.faulty_world import FaultyWorld, held_until_s, is_failing
from tests.histories.client import Client
from tests.histories.replayer import numbered, plain
from tests.histories.stream import Stream

START = datetime(2000, 1, 1, tzinfo=UTC)  # of the virtual clock: histories carry no real date
MAX_OFFSET_S = 1e6
MAX_DRIFT = 0.2  # of a process's own clock
MakeClient = Callable[[Callable[[], float], Callable[[], float]], Client]


@dataclass
class Thread:
    """The thread that an actor belongs to. `stream`: its own random draws."""

    process: Process
    stream: Stream


@dataclass
class Process:
    """The `number`-th process of a role. `status`: its exit status, None while it lives or after a crash. For a
    learner, `incarnation`: the one that it has joined as, 0 before; `offered`: its newest offer, of `offers` in all;
    `offered_of`: the number of merges when it last offered each fragment, and the time; `heard_merges`: the number of
    merges when it last offered or was excused from it; `heard_s`: when the next merge came. `serves`, `learner`: the
    product's actor, once it has begun."""

    role: str
    number: int
    world: FaultyWorld
    seed: int
    make_client: MakeClient
    walls: int = 0
    started_s: float = 0.0
    ended: bool = False
    status: int | None = None
    threads: list[Actor] = field(default_factory=list)
    wall_s: float = 0.0
    nonces: int = 0
    threads_started: int = 0
    heard_s: float = 0.0
    heard_merges: int = 0
    offered_of: dict[int, tuple[int, float]] = field(default_factory=dict)
    incarnation: int = 0
    offered: OfferId | None = None
    offers: int = 0
    free_s: float = 0.0
    ended_s: float = inf
    serves: Syncer | None = None
    learner: Learner | None = None

    def __post_init__(self) -> None:
        self.name = f"{self.role}.{self.number}"
        draw = Stream(self.seed, f"clock of {self.name}")
        self.clock_s = draw.between(0.0, MAX_OFFSET_S)
        self.clock_rate = 1.0 + MAX_DRIFT * draw.between(-1.0, 1.0)
        self.wall_s = MAX_OFFSET_S * Stream(self.seed, f"wall {self.walls} of {self.name}").between(-1.0, 1.0)
        self.started_s = self.world.now_s

    def start(self, steps: Steps[Any], thread: str = "", delay_s: float = 0.0) -> Actor:
        """Start one more thread; the end of the first thread ends the process."""
        stream = Stream(self.seed, f"calls of {self.name}{thread}")
        client = self.make_client(stream.uniform, lambda: self.clock_rate * self.world.now_s)
        if not thread:
            client.make_room = self._make_room
        actor = self.world.start(self.name + thread, client.drive(steps), delay_s)
        actor.owner, actor.clock_s, actor.clock_rate = Thread(self, stream), self.clock_s, self.clock_rate
        self.threads.append(actor)
        return actor

    def _make_room(self) -> Steps[bool]:
        return (yield from make_room(self.serves)) if self.serves is not None else False

    def start_threads(self, threads: list[Steps[Any]]) -> None:
        for steps in threads:
            self.threads_started += 1
            self.start(steps, f"/{self.threads_started}")

    def said(self, key: str, data: bytes, merges: int) -> None:
        """The process has created this object."""
        kind = key.partition("/")[0]
        self.heard_merges = merges
        if kind == "incarnation":
            self.incarnation = numbered(key)[1]
        elif kind == "offer":
            self.offered = numbered(key)
            self.offers += 1
            self.offered_of[plain(data)["fragment"]] = merges, self.world.now_s

    def held_until_s(self) -> float:
        """When no thread waits any more for a call with a fault; an error that is still on its way takes one more pause
        of the client."""
        pauses_s = (MAX_PAUSE_S / actor.clock_rate if is_failing(actor) else 0.0 for actor in self.threads)
        waits = zip(self.threads, pauses_s, strict=True)
        return max((held_until_s(actor) + pause_s for actor, pause_s in waits if not actor.ended), default=0.0)

    @property
    def operations(self) -> int:
        """The number of store operations so far."""
        return sum(actor.operations for actor in self.threads)

    @property
    def frozen(self) -> bool:
        return any(actor.paused for actor in self.threads)

    def pause(self) -> None:
        for actor in self.threads:
            self.world.pause(actor)

    def resume(self) -> None:
        for actor in self.threads:
            if actor.paused and not actor.ended:
                self.world.resume(actor)

    def end(self, status: int | None) -> None:
        """End all threads of the process at once."""
        self.ended, self.status, self.ended_s = True, status, self.world.now_s
        for actor in self.threads:
            self.world.kill(actor)

    def end_with(self, steps: Steps[Any], thread: str) -> None:
        """Nothing of the process goes on but these steps."""
        before, self.threads = self.threads, []
        self.ended = True  # nobody hears of the others' end
        for actor in before:
            self.world.kill(actor)
        self.ended = False
        self.start(steps, thread)

    def nonce(self) -> str:
        self.nonces += 1
        return f"{self.name}-{self.nonces}".rjust(32, "0")

    def claim(self) -> ProcessClaim:
        return ProcessClaim(0, self.nonce(), self.role, self.number, self.time_text(), "simulated")

    def time_text(self) -> str:
        """This process's wall clock, which may be off by days, and jump."""
        at = START + timedelta(seconds=MAX_OFFSET_S * 2 + self.wall_s + self.world.now_s)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
