"""The operations of protocol code. A generator yields one of these and is sent the answer.

| operation      | answer                                   |
|----------------|------------------------------------------|
| Get            | bytes, or None                           |
| Create         | Created or Exists (store/port.py)        |
| Put            | None                                     |
| List           | keys, in lexical order; may lag behind   |
| Delete         | None, also if there was nothing; Undeleted, where failed ones are not repeated |
| Now            | seconds on the actor's own monotonic clock |
| Sleep          | None                                     |
| There          | the operation's answer, from the other store |
| Together       | the answers of all its operations, in their order; in place of one that failed, its error |

Code that works between two stores (protocol/regions/) wraps operations on the second one in `There`. Operations that do
not depend on each other are on their way at the same time: see `together` (protocol/log/together.py).
"""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import Any, TypeVar

from msgspec import Struct

Result = TypeVar("Result")


class Get(Struct, frozen=True):
    """Of an object longer than `max_bytes`, `max_bytes` + 1 bytes are read: the length shows that it is too long. Every
    read has a bound, because any process with credentials may have written the object."""

    key: str
    max_bytes: int


class Create(Struct, frozen=True):
    key: str
    data: bytes


class Put(Struct, frozen=True):
    """For hints only."""

    key: str
    data: bytes


class List(Struct, frozen=True):
    """At most `limit` keys with the prefix, beyond `after`. A listing is a hint: no commit depends on it."""

    prefix: str
    after: str = ""
    limit: int = 1000


class Undeleted(Enum):
    """Why a deletion did nothing: the store allows this process none, or failed."""

    REFUSED = "refused"
    FAILED = "failed"


class Delete(Struct, frozen=True):
    """Only behind a committed floor (see protocol/actors/collection.py)."""

    key: str


class Now(Struct, frozen=True):
    pass


class Sleep(Struct, frozen=True):
    seconds: float


StoreOperation = Get | Create | Put | List | Delete


class There(Struct, frozen=True):
    """An operation on the second of two stores: the bucket of a region."""

    operation: StoreOperation


class Together(Struct, frozen=True):
    """Operations at the same time, in any order. All end before the answer, also if one of them fails."""

    operations: tuple[StoreOperation | There | Sleep, ...]


Operation = StoreOperation | Now | Sleep | There | Together
Steps = Generator[Operation, Any, Result]


def there(steps: Steps[Result]) -> Steps[Result]:
    """Performs protocol code that was written for one store on the second one."""
    answer: Any = None
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        answer = yield _there(operation)


def _there(operation: Any) -> Any:
    if isinstance(operation, Together):
        return Together(tuple(map(_there, operation.operations)))
    return operation if isinstance(operation, Now | Sleep | There) else There(operation)
