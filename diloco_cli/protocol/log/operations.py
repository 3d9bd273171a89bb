"""The operations of protocol code. A generator yields one of these and is sent the answer.

| operation      | answer                                   |
|----------------|------------------------------------------|
| Get            | bytes, or None                           |
| Create         | Created or Exists (store/port.py)        |
| Put            | None                                     |
| List           | keys, in lexical order; may lag behind   |
| Mend           | None, or Undeleted |
| Delete         | None, also if there was nothing; Undeleted, where failed ones are not repeated |
| Now            | seconds on the actor's own monotonic clock |
| Sleep          | None                                     |
| There          | the operation's answer, from the other store |
| Together       | the answers of all its operations, in their order; in place of one that failed, its error |

Code that works between two stores (protocol/regions.py) wraps operations on the second one in `There`.

`together` takes several steps at the same time, on one thread. The next operations of all members go out, and when all
answers are there each member goes on to its next one. So nothing depends on the order in which the store works.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import Enum
from typing import Any, TypeVar

from msgspec import Struct

from diloco_cli.errors import StoreError
from diloco_cli.store.port import HOLDER_BYTES, MAX_CONNECTIONS, Created, Store

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
    """Why a deletion or a mend did nothing: the store allows this process none, or failed."""

    REFUSED = "refused"
    FAILED = "failed"


class Mend(Struct, frozen=True):
    """Put the bytes that belong under this key where there are none, or, if `damaged`, over what lies there. Tried once
    (see protocol/log/mending.py)."""

    key: str
    data: bytes
    damaged: bool

    def answer(self, store: Store) -> Undeleted | None:
        """What a store answers: where another process was faster with other bytes, nothing was put back."""
        if not self.damaged:
            return None if isinstance(store.create(self.key, self.data), Created) else Undeleted.FAILED
        store.put(self.key, self.data)
        return None


class Delete(Struct, frozen=True):
    """Only behind a committed floor (see protocol/actors/collection.py)."""

    key: str


class Now(Struct, frozen=True):
    pass


class Sleep(Struct, frozen=True):
    seconds: float


StoreOperation = Get | Create | Put | List | Mend | Delete


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


MAX_AT_ONCE = MAX_CONNECTIONS  # operations
MAX_BYTES_AT_ONCE = MAX_AT_ONCE * HOLDER_BYTES
"""Of objects that are on their way at a time, and of those that members hold between two operations. One that is larger
goes alone."""


def together(
    members: Sequence[Steps[Result]], max_bytes: int = MAX_BYTES_AT_ONCE, grows: bool = False
) -> Steps[list[Result]]:
    """The members' results, in their order. If members fail, the others go on to their ends, unless the process itself
    ends; then the first error in the members' order is raised, one that is not the store's before any that is.

    Who has begun goes on first, so that only as many members hold objects as are on their way. `grows`: members append
    others to `members`, which begin when all of its round have gone on."""
    if len(members) == 1 and not grows:  # most often, as for the log's next commit
        return [(yield from members[0])]
    results: list[Any] = []
    errors: dict[int, Exception] = {}
    asked: dict[int, Operation] = {}

    def send(place: int, answer: Any) -> Steps[None]:
        """Let one member go on to its next operation, or to its end."""
        try:
            while True:
                failed = isinstance(answer, Exception)
                operation = members[place].throw(answer) if failed else members[place].send(answer)
                if not isinstance(operation, (Now, Together)):  # a union would be made anew each time
                    asked[place] = operation
                    return
                answer = yield operation
        except StopIteration as stop:
            results[place] = stop.value
        except Exception as error:
            errors[place] = error

    def begin() -> Steps[None]:
        while len(results) < len(members):
            results.append(None)
            yield from send(len(results) - 1, None)

    yield from begin()
    while asked:
        chosen = _first_portion(asked, max_bytes)
        operations = [asked.pop(place) for place in chosen]
        left = asked.copy()
        asked.clear()
        answers = yield from _performed(operations)
        for at, place in enumerate(chosen):
            answer, answers[at] = answers[at], None  # let go one by one
            yield from send(place, answer)
            del answer
        yield from begin()
        asked.update(left)
    if errors:
        raise _gravest(errors)
    return results


def _gravest(errors: dict[int, Exception]) -> Exception:
    rising = [errors[place] for place in sorted(errors)]
    return next((error for error in rising if not isinstance(error, StoreError)), rising[0])


def together_got(keys: Sequence[str], max_bytes: int) -> Steps[list[bytes | None]]:
    """The objects under these keys, each at most `max_bytes` long."""
    return (yield from together([got(key, max_bytes) for key in keys]))


def got(key: str, max_bytes: int) -> Steps[bytes | None]:
    data: bytes | None = yield Get(key, max_bytes)
    return data


def _performed(operations: list[Any]) -> Steps[list[Any]]:
    if len(operations) > 1:
        return (yield Together(tuple(operations)))  # type: ignore[no-any-return]
    try:
        return [(yield operations[0])]
    except Exception as error:
        return [error]


def _first_portion(asked: dict[int, Operation], max_bytes: int) -> list[int]:
    """The members' places whose operations go next."""
    places: list[int] = []
    left = max_bytes
    for place, operation in asked.items():
        left -= _size_bytes(operation)
        if places and (left < 0 or len(places) == MAX_AT_ONCE):
            break
        places.append(place)
    return places


def _size_bytes(operation: Operation) -> int:
    if isinstance(operation, Get):
        return operation.max_bytes
    if isinstance(operation, There):
        return _size_bytes(operation.operation)
    return len(operation.data) if isinstance(operation, (Create, Put, Mend)) else 0
