"""One thread, one virtual clock, one bucket: actors are protocol generators that advance one operation at a time.

Of operations that go together each is a call of its own: they take effect in the order of their latencies, and an
actor that dies leaves the others undone.

`VirtualLanes`: the threads of one simulated process; each performs its steps one after the other, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar

from msgspec import Struct

from diloco_cli.protocol.actors.learner import Lane
from diloco_cli.protocol.log.operations import (
    Create,
    Delete,
    Get,
    List,
    Mend,
    Now,
    Operation,
    Put,
    Sleep,
    Steps,
    There,
    Together,
)
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Store

LATENCY_S = 0.001  # of one store operation, on the virtual clock


class Call(Struct):
    """An operation on its way, which is due at `due_s`; once it is done, its `answer`, or the error `thrown` in its
    place."""

    operation: Operation
    due_s: float
    answer: Any = None
    thrown: Exception | None = None
    done: bool = False


@dataclass(slots=True)
class Actor:
    """A process, or a thread of one. `result` or `error` is set once it has ended; `operations` counts those on the
    store. `number`: its place in the order of starts. Its own clock shows `clock_s` + `clock_rate` x the world's time.

    `calls`: those that it waits for, several where operations go `together`; the first one is due at `wake_s`. `due`:
    those of several that are not done, as a heap.
    `owner`: an object that its starter attaches.
    """

    name: str
    steps: Steps[Any]
    number: int = 0
    wake_s: float = 0.0
    calls: list[Call] = field(default_factory=list)
    together: bool = False
    due: list[tuple[float, int, Call]] = field(default_factory=list)
    operations: int = 0
    paused: bool = False
    ended: bool = False
    result: Any = None
    error: BaseException | None = None
    clock_s: float = 0.0
    clock_rate: float = 1.0
    owner: Any = None


@dataclass
class World:
    """Advances the actor that is due first; ties go to the one that was started first.

    `latency_s`: from sending a store operation to its answer. `held_until_s`: when a call can take effect that was due:
    the actor cannot reach the store until then (its client waits, and tries again), or a link has become slower since
    the call was sent. `checks_uploads`: the store compares an upload with its checksum. `connections`: so many calls of
    one set are on their way at a time; None: all.
    """

    store: Store = field(default_factory=MemoryStore)
    now_s: float = 0.0
    actors: list[Actor] = field(default_factory=list)
    on_end: Callable[[Actor], None] = lambda actor: None
    latency_s: Callable[[Actor, Operation], float] = lambda actor, operation: LATENCY_S
    held_until_s: Callable[[Actor, Operation], float] | None = None
    checks_uploads: bool = False
    connections: int | None = None
    _due: list[tuple[float, int, Actor]] = field(default_factory=list)
    call_type: ClassVar[type[Call]] = Call

    def start(self, name: str, steps: Steps[Any], delay_s: float = 0.0) -> Actor:
        actor = Actor(name, steps, len(self.actors), self.now_s + delay_s)
        self.actors.append(actor)
        self._later(actor, actor.wake_s)
        return actor

    def call_at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Call a function at a time: a fault, a timer."""

        def steps() -> Steps[None]:
            yield Sleep(max(0.0, when_s - self.now_s))
            happen()

        self.start("", steps())

    def run(self, until: Callable[[], bool], within_s: float) -> bool:
        """Go on until the condition holds; False if it does not within `within_s` virtual seconds."""
        deadline_s = self.now_s + within_s
        while not until():
            actor = self.next_due()
            if actor is None or self.now_s > deadline_s:
                return False
            self.advance(actor)
        return True

    def run_for(self, seconds: float) -> None:
        """Let `seconds` pass."""
        end_s = self.now_s + seconds
        while (actor := self.next_due()) is not None and actor.wake_s <= end_s:
            self.advance(actor)
        self.now_s = max(self.now_s, end_s)

    def kill(self, actor: Actor) -> None:
        """End the actor between two of its events."""
        if not actor.ended:
            self._end(actor)

    def pause(self, actor: Actor) -> None:
        """Pause the actor between two of its events."""
        actor.paused = True

    def resume(self, actor: Actor) -> None:
        actor.paused = False
        self._later(actor, max(self.now_s, actor.wake_s))

    def advance(self, actor: Actor) -> None:
        """Perform the actor's call that is due; once it has all answers, hand them in, and hold what it asks next."""
        self.now_s = max(self.now_s, actor.wake_s)
        if actor.calls and not self._goes_on(actor):
            return
        try:
            operation = self._sent(actor)
            while type(operation) is Now and not actor.paused:  # reading a clock is no event: it takes no time
                operation = actor.steps.send(actor.clock_s + actor.clock_rate * self.now_s)
        except StopIteration as stop:
            self._end(actor, result=stop.value)
        except Exception as error:
            self._end(actor, error=error)
        else:
            self._hold(actor, operation)

    def _sent(self, actor: Actor) -> Operation:
        """Hand in the answers; the operation that the actor asks for next."""
        calls, actor.calls = actor.calls, []
        if actor.together:
            actor.together = False
            return actor.steps.send([call.thrown or call.answer for call in calls])
        if not calls:
            return actor.steps.send(None)
        call = calls[0]
        return actor.steps.send(call.answer) if call.thrown is None else actor.steps.throw(call.thrown)

    def _goes_on(self, actor: Actor) -> bool:
        """Perform the call that is due; True once all are done."""
        if not actor.together:
            (call,) = actor.calls
            if self._perform(actor, call):
                call.done = True
                return not actor.ended
            if not actor.ended:
                self._later(actor, call.due_s)
            return False
        due = actor.due
        _, place, call = heappop(due)
        if self._perform(actor, call):
            call.done = True
        else:
            heappush(due, (call.due_s, place, call))
        if due and not actor.ended:
            self._later(actor, due[0][0])
        return not due and not actor.ended

    def _hold(self, actor: Actor, operation: Operation) -> None:
        """Hold operations until their effects are due, or a sleep is over."""
        if type(operation) is Together:
            actor.together = True
            actor.calls = self._begun(actor, operation.operations)
            actor.due = [(call.due_s, place, call) for place, call in enumerate(actor.calls)]
            heapify(actor.due)
            due_s = actor.due[0][0] if actor.due else self.now_s
        else:
            due_s = self.now_s + self._wait_s(actor, operation)
            actor.calls = [self.call_type(operation, due_s)]
        actor.wake_s = due_s
        heappush(self._due, (due_s, actor.number, actor))

    def _begun(self, actor: Actor, operations: Sequence[Operation]) -> list[Call]:
        """Calls on their way; beyond `connections`, each begins when an earlier one is at its store."""
        free_s = [self.now_s] * (self.connections or len(operations))
        calls = []
        for one in operations:
            calls.append(self.call_type(one, heappop(free_s) + self._wait_s(actor, one)))
            heappush(free_s, calls[-1].due_s)
        return calls

    def _wait_s(self, actor: Actor, operation: Operation) -> float:
        kind = type(operation)
        if kind is Sleep:
            seconds: float = operation.seconds  # type: ignore[union-attr]
            return seconds / actor.clock_rate if seconds > 0.0 else 0.0
        return 0.0 if kind is Now else self.latency_s(actor, operation)

    def next_due(self) -> Actor | None:
        """The first actor that is due; entries of dead, frozen and rescheduled actors are dropped."""
        due = self._due
        while due:
            wake_s, _, actor = due[0]
            if wake_s == actor.wake_s and not (actor.ended or actor.paused):
                return actor
            heappop(due)
        return None

    def _perform(self, actor: Actor, call: Call) -> bool:
        """Perform a call. False if it is not done yet."""
        operation = call.operation
        if type(operation) is Sleep:
            return True
        if type(operation) is Now:
            call.answer = actor.clock_s + actor.clock_rate * self.now_s
            return True
        later_s = 0.0 if self.held_until_s is None else self.held_until_s(actor, operation)
        if later_s > self.now_s:
            call.due_s = later_s
            return False
        return self._arrives(actor, call)

    def _arrives(self, actor: Actor, call: Call) -> bool:
        """The call is at the store. False if it is not done yet."""
        actor.operations += 1
        call.answer = self._effect(actor, call.operation)
        return True

    def _later(self, actor: Actor, when_s: float) -> None:
        actor.wake_s = when_s
        heappush(self._due, (when_s, actor.number, actor))

    def _effect(self, actor: Actor, operation: Operation) -> Any:
        return self._perform_at(self.store, actor, operation.operation if type(operation) is There else operation)

    def _perform_at(self, store: Store, actor: Actor, operation: Operation) -> Any:
        match operation:
            case Get(key, max_bytes):
                return store.get(key, max_bytes)
            case Create(key, data):
                answer = store.create(key, data)
                return Created(checked=True) if self.checks_uploads and isinstance(answer, Created) else answer
            case Put(key, data):
                return store.put(key, data)
            case List(prefix, after, limit):
                return store.list(prefix, after, limit)
            case Mend():
                return operation.answer(store)
            case Delete(key):
                return store.delete(key)
        raise TypeError(f"{type(operation).__name__} is no operation on the store")

    def _end(self, actor: Actor, result: Any = None, error: BaseException | None = None) -> None:
        actor.steps.close()
        actor.ended, actor.result, actor.error = True, result, error
        self.on_end(actor)


class VirtualLanes:
    """`begin` starts an actor of the process. A lane's actor ends with its last steps; the next ones get a new one."""

    def __init__(self, begin: Callable[[Steps[Any]], object]) -> None:
        self._begin = begin
        self._waiting: dict[Lane, deque[Steps[Any]]] = {}

    def start(self, lane: Lane, steps: Steps[Any]) -> None:
        if lane in self._waiting:
            self._waiting[lane].append(steps)
            return
        self._waiting[lane] = deque([steps])
        self._begin(self._work(lane))

    def _work(self, lane: Lane) -> Steps[bool]:
        waiting = self._waiting[lane]
        while waiting:
            yield from waiting.popleft()
        del self._waiting[lane]
        return True
