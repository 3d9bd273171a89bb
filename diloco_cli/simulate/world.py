"""One thread, one virtual clock, one bucket: actors are protocol generators that advance one operation at a time.

An operation of an actor is its yield; it takes effect when the actor is next advanced, so that anything may happen in
between. Faults are asked for before each store operation, by actor and operation number:

    CRASH         the actor dies before the effect (dying after it is dying before the next operation)
    LOST_ANSWER   the effect happens, the actor sees an exception instead of the answer
    PAUSE         the actor freezes before the effect and stays frozen until `resume`
    TWICE         the effect happens, and the same call is made again, as a client's retry does
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Any

from diloco_cli.protocol.operations import Create, Get, Now, Operation, Put, Sleep, Steps
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import StoreUnavailableError

LATENCY_S = 0.001  # of one store operation, on the virtual clock


class Fault(Enum):
    CRASH = auto()
    LOST_ANSWER = auto()
    PAUSE = auto()
    TWICE = auto()


@dataclass
class Actor:
    """A process, or a thread of one. `result` or `error` is there once it has ended; `operations` counts those on the
    store. `number`: the how many-th of its world."""

    name: str
    steps: Steps[Any]
    number: int = 0
    wake_s: float = 0.0
    answer: Any = None
    pending: Operation | None = None
    operations: int = 0
    paused: bool = False
    ended: bool = False
    result: Any = None
    error: BaseException | None = None


def _usual_latency(actor: Actor, operation: Operation) -> float:
    return LATENCY_S


@dataclass
class World:
    """Advances whoever is due first; ties go to the one that was started first. `writes` notes every create that took
    effect or was refused: who, as its which operation, and the key. `latency_s`: of a store operation.
    `unreachable_until_s`: when an actor's calls to the store go through again (its client waits, and tries again)."""

    store: MemoryStore = field(default_factory=MemoryStore)
    faults: dict[tuple[str, int], Fault] = field(default_factory=dict)
    now_s: float = 0.0
    actors: list[Actor] = field(default_factory=list)
    on_end: Callable[[Actor], None] = lambda actor: None
    writes: list[tuple[str, int, str]] = field(default_factory=list)
    latency_s: Callable[[Actor, Operation], float] = _usual_latency
    unreachable_until_s: Callable[[Actor], float] = lambda actor: 0.0
    _due: list[tuple[float, int, Actor]] = field(default_factory=list)

    def start(self, name: str, steps: Steps[Any], delay_s: float = 0.0) -> Actor:
        actor = Actor(name, steps, len(self.actors), self.now_s + delay_s)
        self.actors.append(actor)
        self._queue(actor)
        return actor

    def call_at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Something that is no process: a fault, a timer."""

        def steps() -> Steps[None]:
            yield Sleep(max(0.0, when_s - self.now_s))
            happen()

        self.start("", steps())

    def run(self, until: Callable[[], bool], within_s: float) -> bool:
        """Go on until the condition holds; False if it does not within so many virtual seconds."""
        deadline_s = self.now_s + within_s
        while not until():
            actor = self._next()
            if actor is None or self.now_s > deadline_s:
                return False
            self.advance(actor)
        return True

    def run_for(self, seconds: float) -> None:
        """Let so much time pass."""
        end_s = self.now_s + seconds
        while (actor := self._next()) is not None and actor.wake_s <= end_s:
            self.advance(actor)
        self.now_s = max(self.now_s, end_s)

    def kill(self, actor: Actor) -> None:
        """It is gone between two of its operations."""
        if not actor.ended:
            self._end(actor)

    def pause(self, actor: Actor) -> None:
        actor.paused = True

    def resume(self, actor: Actor) -> None:
        actor.paused, actor.wake_s = False, max(self.now_s, actor.wake_s)
        self._queue(actor)

    def advance(self, actor: Actor) -> None:
        """Perform the actor's pending operation, hand it the answer, and hold what it asks next."""
        self.now_s = max(self.now_s, actor.wake_s)
        if actor.pending is not None and not self._perform(actor, actor.pending):
            return
        try:
            actor.pending = actor.steps.send(actor.answer)
        except StopIteration as stop:
            self._end(actor, result=stop.value)
        except Exception as error:
            self._end(actor, error=error)
        else:
            actor.wake_s = self.now_s + self._duration_s(actor, actor.pending)
            self._queue(actor)

    def _duration_s(self, actor: Actor, operation: Operation) -> float:
        match operation:
            case Sleep(seconds):
                return seconds
            case Now():
                return 0.0
        return self.latency_s(actor, operation)

    def _queue(self, actor: Actor) -> None:
        heappush(self._due, (actor.wake_s, actor.number, actor))

    def _next(self) -> Actor | None:
        """The first that is due; entries of the dead, the frozen and the rescheduled are dropped."""
        while self._due:
            wake_s, _, actor = self._due[0]
            if not (actor.ended or actor.paused) and wake_s == actor.wake_s:
                return actor
            heappop(self._due)
        return None

    def _perform(self, actor: Actor, operation: Operation) -> bool:
        """False if the actor does not go on from here."""
        fault = None
        if not isinstance(operation, Now | Sleep):
            later_s = self.unreachable_until_s(actor)
            if later_s > self.now_s:
                actor.wake_s = later_s
                self._queue(actor)
                return False
            fault = self.faults.pop((actor.name, actor.operations), None)
            if fault is Fault.PAUSE:
                actor.paused = True
                return False
            actor.operations += 1
        if fault is Fault.CRASH:
            self._end(actor)
            return False
        actor.answer = self._effect(actor, operation)
        if fault is Fault.TWICE:
            actor.answer = self._effect(actor, operation)
        if fault is Fault.LOST_ANSWER:
            self._end(actor, error=StoreUnavailableError("the answer was lost"))
            return False
        return True

    def _effect(self, actor: Actor, operation: Operation) -> Any:
        match operation:
            case Get(key):
                return self.store.get(key)
            case Create(key, data):
                self.writes.append((actor.name, actor.operations - 1, key))
                return self.store.create(key, data)
            case Put(key, data):
                return self.store.put(key, data)
            case Now():
                return self.now_s
        return None

    def _end(self, actor: Actor, result: Any = None, error: BaseException | None = None) -> None:
        actor.steps.close()
        actor.ended, actor.result, actor.error = True, result, error
        self.on_end(actor)
