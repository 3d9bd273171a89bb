"""The product's virtual world (virtual/world.py), whose calls to the store may fail.

An operation on the store is two events, its effect and its answer, and other events may come between them. When the
call arrives, `fault_of` decides whether a fault hits it. Of operations that go together a fault hits one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from msgspec import structs

from diloco_cli.errors import DilocoError, NoSpaceError
from diloco_cli.protocol.log.operations import Create, Delete, Operation, There
from diloco_cli.store.port import Store, StoreForbiddenError, StoreThrottledError, StoreUnavailableError
from diloco_cli.virtual.world import Actor, Call, World


class Fault(Enum):
    """The value is its text in a history's trace."""

    CRASH = "dies before the effect"
    CRASH_AFTER = "dies after the effect, before the answer"
    CRASH_LATE = "dies; what it had sent takes effect later"
    LOST_REQUEST = "the request is lost"
    LOST_ANSWER = "the answer is lost"
    LATE = "no answer in time; the request takes effect later"
    SLOW = "the answer is slow"
    TWICE = "the request arrives twice"
    PAUSE = "freezes before the effect"
    CONFLICT = "409, without effect"
    BUSY = "503, without effect"
    BUSY_AFTER = "503, after the effect"
    RATE_LIMITED = "429, without effect"
    FORBIDDEN = "403"
    FULL = "no space left"
    TORN_WRITE = "half of it is stored, and the answer says that all is"
    TORN = "the bytes read are cut short"
    FLIPPED = "the bytes read have a flipped bit"


OF_READS = frozenset({Fault.TORN, Fault.FLIPPED})
OF_READ_BACK = frozenset({Fault.TORN_WRITE})  # of objects that their writer reads back, or their reader checks


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault, and for how long it delays an effect or an answer (if it delays one). For a flipped bit `seconds` is
    not a time but its place, as a share of the bytes."""

    kind: Fault
    seconds: float = 0.0


def refusal_of(fault: Injected) -> DilocoError:
    """The error that the store's client gets."""
    match fault.kind:
        case Fault.FORBIDDEN:
            return StoreForbiddenError("403 (simulated)")
        case Fault.FULL:
            return NoSpaceError("no space left (simulated)")
        case Fault.RATE_LIMITED:
            return StoreThrottledError("429 (simulated)")
    return StoreUnavailableError(f"{fault.kind.value} (simulated)")


def halved(operation: Operation, fault: Injected) -> Operation:
    """A create with a part of its bytes, as after a bad disk or an interrupted upload; other operations unchanged."""
    if fault.kind is not Fault.TORN_WRITE or not isinstance(operation, Create):
        return operation
    return structs.replace(operation, data=operation.data[: len(operation.data) // 2])


def damaged(answer: Any, fault: Injected) -> Any:
    """Bytes with one flipped bit, as over a bad network; any other answer is unchanged."""
    if fault.kind not in OF_READS or not isinstance(answer, bytes) or not answer:
        return answer
    if fault.kind is Fault.TORN:
        return answer[: len(answer) // 2]
    place = min(len(answer) - 1, int(fault.seconds * len(answer)))
    flipped = answer[place] ^ 1 << place % 7  # the lower bits: text stays text, digits often digits
    return answer[:place] + bytes([flipped]) + answer[place + 1 :]


class FaultyCall(Call):
    """`answered`: its effect is past, and its answer, or its error, is on its way. `spared`: no further fault hits it,
    because one has frozen its actor."""

    answered: bool = False
    spared: bool = False


@dataclass
class FaultyWorld(World):
    """`fault_of` gives the fault of an actor's next operation, `faults` those by the actor's name and the operation's
    number. `latency_s`: here from sending an operation to its effect; `answer_s`: from there to its answer.
    `timeout_s`: after so long without an answer a client gives up a call. `store_of`: with several buckets, the one
    that this operation of an actor goes to. `checks_uploads`: the stores refuse damaged bytes, too. `writes` records
    every create that took effect or was refused: the actor, the number of its operation, and the key. `under_way`: what
    takes effect after its answer, or its actor's end.
    """

    faults: dict[tuple[str, int], Fault | Injected] = field(default_factory=dict)
    fault_of: Callable[[Actor, Operation], Injected | None] | None = None
    answer_s: Callable[[Actor, Operation], float] | None = None
    timeout_s: float = 0.0
    store_of: Callable[[Actor, Operation], Store] | None = None
    writes: list[tuple[str, int, str]] = field(default_factory=list)
    under_way: list[Operation] = field(default_factory=list)
    call_type: ClassVar[type[Call]] = FaultyCall

    def _perform(self, actor: Actor, call: FaultyCall) -> bool:
        return call.answered or super()._perform(actor, call)

    def _arrives(self, actor: Actor, call: FaultyCall) -> bool:
        fault = None if call.spared else self._fault(actor, call.operation)
        call.spared = fault is not None and fault.kind is Fault.PAUSE
        if call.spared:
            actor.paused = True
            return False
        actor.operations += 1
        if fault is not None:
            return self._befall(actor, call, fault)
        call.answer = self._effect(actor, call.operation)
        return self._answer(actor, call)

    def _fault(self, actor: Actor, operation: Operation) -> Injected | None:
        if self.fault_of is not None:
            return self.fault_of(actor, operation)
        if not self.faults:
            return None
        found = self.faults.pop((actor.name, actor.operations), None)
        return Injected(found) if isinstance(found, Fault) else found

    def _answer(self, actor: Actor, call: FaultyCall, extra_s: float = 0.0) -> bool:
        """Send the answer; True if it arrives at once."""
        seconds = extra_s if self.answer_s is None else extra_s + self.answer_s(actor, call.operation)
        if seconds <= 0.0:
            return True
        call.answered, call.due_s = True, self.now_s + seconds
        return False

    def _befall(self, actor: Actor, call: FaultyCall, fault: Injected) -> bool:
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

    def _fails(self, actor: Actor, call: FaultyCall, error: Exception, after_s: float) -> bool:
        call.thrown = error
        return self._answer(actor, call, after_s)

    def _effect_at(self, actor: Actor, operation: Operation, seconds: float) -> None:
        """The operation takes effect later, also if its actor is dead by then."""

        def arrive() -> None:
            self.under_way.remove(operation)
            self._effect(actor, operation)

        self.under_way.append(operation)
        self.call_at(self.now_s + seconds, arrive)

    def _effect(self, actor: Actor, operation: Operation) -> Any:
        store = self.store if self.store_of is None else self.store_of(actor, operation)
        return self._perform_at(store, actor, operation.operation if type(operation) is There else operation)

    def _perform_at(self, store: Store, actor: Actor, operation: Operation) -> Any:
        if type(operation) is Create or type(operation) is Delete:
            self.writes.append((actor.name, actor.operations - 1, operation.key))
        return super()._perform_at(store, actor, operation)


def held_until_s(actor: Actor) -> float:
    """When it has all answers, as far as these are on their way."""
    return max((call.due_s for call in actor.calls if not call.done), default=actor.wake_s)


def is_failing(actor: Actor) -> bool:
    """Whether an error is on its way to it."""
    return any(call.thrown is not None for call in actor.calls)
