"""Several steps beside each other: an actor's decisions stay on one thread, its store operations do not wait for each
other.

In rounds: the next operations of the members go out, and when all answers are there each of them goes on to its next
one. So a member waits for the slowest of its round, and nothing depends on the order in which the store works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from diloco_cli.errors import StoreError
from diloco_cli.protocol.log.operations import Create, Get, Now, Operation, Put, Steps, There, Together
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES
from diloco_cli.store.port import MAX_CONNECTIONS

Result = TypeVar("Result")
MAX_AT_ONCE = MAX_CONNECTIONS  # operations
MAX_BYTES_AT_ONCE = MAX_AT_ONCE * MAX_RECORD_BYTES
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
    return (yield from together([_got(key, max_bytes) for key in keys]))


def _got(key: str, max_bytes: int) -> Steps[bytes | None]:
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
    return len(operation.data) if isinstance(operation, (Create, Put)) else 0
