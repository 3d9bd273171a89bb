"""The faults of one call to a simulated store. A fault happens between the sending of the call and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from msgspec import structs

from diloco_cli.errors import DilocoError, NoSpaceError
from diloco_cli.protocol.log.operations import Create, Operation
from diloco_cli.store.port import StoreForbiddenError, StoreThrottledError, StoreUnavailableError


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
