"""One thread, one virtual clock, one bucket: actors are protocol generators that advance one operation at a time.

An operation on the store is two events, its effect and its answer, and other events may come between them. When an
actor sends an operation, `fault_of` decides whether a fault hits it (`virtual/faulty_calls.py` lists the faults). Of
operations that go together each is a call of its own: they take effect in the order of their latencies, a fault hits
one of them, and an actor that dies leaves the others undone.

`VirtualLanes`: the threads of one simulated process; each performs its steps one after the other, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Any

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
from diloco_cli.store.port import Created, Store, StoreUnavailableError
from diloco_cli.virtual.faulty_calls import Fault, Injected, damaged, halved, refusal_of

LATENCY_S = 0.001  # of one store operation, on the virtual clock

__all__ = ["LATENCY_S", "Actor", "Fault", "World"]


class Call(Struct):
    """An operation on its way: its effect is due at `due_s`; once it is `answered`, its `answer`, or the error
    `thrown` in its place, is. `spared`: no further fault hits it, because one has frozen its actor."""

    operation: Operation
    due_s: float
    answered: bool = False
    answer: Any = None
    thrown: Exception | None = None
    spared: bool = False
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

    @property
    def pending(self) -> Operation | None:
        """The operation whose effect or answer is due first."""
        return min((call for call in self.calls if not call.done), key=_due_of).operation if self.calls else None

    @property
    def held_until_s(self) -> float:
        """When it has all answers, as far as these are on their way."""
        return max((call.due_s for call in self.calls if not call.done), default=self.wake_s)

    @property
    def is_failing(self) -> bool:
        """Whether an error is on its way to it."""
        return any(call.thrown is not None for call in self.calls)


_due_of = attrgetter("due_s")


@dataclass
class World:
    """Advances the actor that is due first; ties go to the one that was started first. `writes` records every create
    that took effect or was refused: the actor, the number of its operation, and the key.

    `latency_s`: from sending a store operation to its effect; `answer_s`: from there to its answer. `fault_of` gives
    the fault of an actor's next operation, `faults` those by the actor's name and the operation's number.
    `held_until_s`: when a call can take effect that was due: the actor cannot reach the store until then (its client
    waits, and tries again), or a link has become slower since the call was sent.
    `timeout_s`: after so long without an answer a client gives up a call. `store_of`: with several buckets, the one
    that this operation of an actor goes to. `checks_uploads`: the stores compare an upload with its checksum and refuse
    damaged bytes. `connections`: so many calls of one set are on their way at a time; None: all.
    """

    store: Store = field(default_factory=MemoryStore)
    faults: dict[tuple[str, int], Fault | Injected] = field(default_factory=dict)
    now_s: float = 0.0
    actors: list[Actor] = field(default_factory=list)
    on_end: Callable[[Actor], None] = lambda actor: None
    writes: list[tuple[str, int, str]] = field(default_factory=list)
    latency_s: Callable[[Actor, Operation], float] = lambda actor, operation: LATENCY_S
    answer_s: Callable[[Actor, Operation], float] | None = None
    fault_of: Callable[[Actor, Operation], Injected | None] | None = None
    held_until_s: Callable[[Actor, Operation], float] | None = None
    timeout_s: float = 0.0
    store_of: Callable[[Actor, Operation], Store] | None = None
    checks_uploads: bool = False
    connections: int | None = None
    _due: list[tuple[float, int, Actor]] = field(default_factory=list)

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
        """End the actor between two of its operations, or between an operation's effect and its answer."""
        if not actor.ended:
            self._end(actor)

    def pause(self, actor: Actor) -> None:
        """Pause the actor between two of its events: before an effect, or between an effect and its answer."""
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
        """Let the call that is due take effect, or be answered; True once all are."""
        if not actor.together:
            (call,) = actor.calls
            if call.answered or self._perform(actor, call):
                call.done = True
                return not actor.ended
            if not actor.ended:
                self._later(actor, call.due_s)
            return False
        due = actor.due
        _, place, call = heappop(due)
        if call.answered or self._perform(actor, call):
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
            actor.calls = [Call(operation, due_s)]
        actor.wake_s = due_s
        heappush(self._due, (due_s, actor.number, actor))

    def _begun(self, actor: Actor, operations: Sequence[Operation]) -> list[Call]:
        """Calls on their way; beyond `connections`, each begins when an earlier one is at its store."""
        free_s = [self.now_s] * (self.connections or len(operations))
        calls = []
        for one in operations:
            calls.append(Call(one, heappop(free_s) + self._wait_s(actor, one)))
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
        """Perform a call's effect. False if it is not answered at once."""
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
        fault = None if call.spared else self._fault(actor, operation)
        call.spared = fault is not None and fault.kind is Fault.PAUSE
        if call.spared:
            actor.paused = True
            return False
        actor.operations += 1
        if fault is not None:
            return self._befall(actor, call, fault)
        call.answer = self._effect(actor, operation)
        return self._answer(actor, call)

    def _fault(self, actor: Actor, operation: Operation) -> Injected | None:
        if self.fault_of is not None:
            return self.fault_of(actor, operation)
        if not self.faults:
            return None
        found = self.faults.pop((actor.name, actor.operations), None)
        return Injected(found) if isinstance(found, Fault) else found

    def _answer(self, actor: Actor, call: Call, extra_s: float = 0.0) -> bool:
        """Send the answer; True if it arrives at once."""
        seconds = extra_s if self.answer_s is None else extra_s + self.answer_s(actor, call.operation)
        if seconds <= 0.0:
            return True
        call.answered, call.due_s = True, self.now_s + seconds
        return False

    def _later(self, actor: Actor, when_s: float) -> None:
        actor.wake_s = when_s
        heappush(self._due, (when_s, actor.number, actor))

    def _befall(self, actor: Actor, call: Call, fault: Injected) -> bool:
        """Perform the call with this fault."""
        operation = call.operation
        match fault.kind:
            case Fault.CRASH:
                self._end(actor)
                return False
            case Fault.CRASH_AFTER:
                self._effect(actor, operation)
                self._end(actor)
                return False
            case Fault.CRASH_LATE:
                self._end(actor)
                self._effect_at(actor, operation, fault.seconds)
                return False
            case Fault.LOST_REQUEST:
                return self._fails(actor, call, StoreUnavailableError("the request was lost"), self.timeout_s)
            case Fault.LOST_ANSWER:
                self._effect(actor, operation)
                return self._fails(actor, call, StoreUnavailableError("the answer was lost"), self.timeout_s)
            case Fault.LATE:
                self._effect_at(actor, operation, fault.seconds)
                return self._fails(actor, call, StoreUnavailableError("no answer yet"), self.timeout_s)
            case Fault.SLOW:
                call.answer = self._effect(actor, operation)
                return self._answer(actor, call, fault.seconds)
            case Fault.TWICE:
                call.answer = self._effect(actor, operation)
                if fault.seconds:
                    self._effect_at(actor, operation, fault.seconds)
                else:
                    call.answer = self._effect(actor, operation)
                return self._answer(actor, call)
            case Fault.TORN_WRITE | Fault.TORN | Fault.FLIPPED if not self._is_refused(operation, fault):
                call.answer = damaged(self._effect(actor, halved(operation, fault)), fault)
                return self._answer(actor, call)
        if fault.kind is Fault.BUSY_AFTER:
            self._effect(actor, operation)
        return self._fails(actor, call, refusal_of(fault), 0.0)

    def _is_refused(self, operation: Operation, fault: Injected) -> bool:
        """Whether the store finds out that an upload was damaged."""
        return self.checks_uploads and fault.kind is Fault.TORN_WRITE and type(operation) is Create

    def _fails(self, actor: Actor, call: Call, error: Exception, after_s: float) -> bool:
        call.thrown = error
        return self._answer(actor, call, after_s)

    def _effect_at(self, actor: Actor, operation: Operation, seconds: float) -> None:
        """The operation takes effect later, also if its actor is dead by then."""
        self.call_at(self.now_s + seconds, lambda: self._effect(actor, operation))

    def _effect(self, actor: Actor, operation: Operation) -> Any:
        store = self.store if self.store_of is None else self.store_of(actor, operation)
        return self._perform_at(store, actor, operation.operation if type(operation) is There else operation)

    def _perform_at(self, store: Store, actor: Actor, operation: Operation) -> Any:
        match operation:
            case Get(key, max_bytes):
                return store.get(key, max_bytes)
            case Create(key, data):
                self.writes.append((actor.name, actor.operations - 1, key))
                answer = store.create(key, data)
                return Created(checked=True) if self.checks_uploads and isinstance(answer, Created) else answer
            case Put(key, data):
                return store.put(key, data)
            case List(prefix, after, limit):
                return store.list(prefix, after, limit)
            case Mend():
                return operation.answer(store)
            case Delete(key):
                self.writes.append((actor.name, actor.operations - 1, key))
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
