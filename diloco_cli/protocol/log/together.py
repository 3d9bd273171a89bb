"""Several steps beside each other: an actor's decisions stay on one thread, its store operations do not wait for each
other.

In rounds: the next operation of every member goes out, and when all answers are there each member goes on to its next
one. So a member waits for the slowest of its round, and nothing depends on the order in which the store works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from diloco_cli.protocol.log.operations import Create, Get, Now, Operation, Put, Steps, There, Together

Result = TypeVar("Result")
MAX_BYTES_AT_ONCE = 256 << 20
"""Of objects that are on their way at a time. One that is larger goes alone."""


def together(members: Sequence[Steps[Result]], max_bytes: int = MAX_BYTES_AT_ONCE) -> Steps[list[Result]]:
    """The members' results, in their order. If members fail, the others go on to their ends; then the error of the
    first one in the members' order is raised."""
    results: list[Any] = [None] * len(members)
    errors: dict[int, Exception] = {}
    asked: dict[int, Operation] = {}

    def send(place: int, answer: Any) -> Steps[None]:
        """Let one member go on to its next operation, or to its end."""
        try:
            while True:
                failed = isinstance(answer, Exception)
                operation = members[place].throw(answer) if failed else members[place].send(answer)
                if not isinstance(operation, Now | Together):
                    asked[place] = operation
                    return
                answer = yield operation
        except StopIteration as stop:
            results[place] = stop.value
        except Exception as error:
            errors[place] = error

    for place in range(len(members)):
        yield from send(place, None)
    while asked:
        now, asked = asked, {}
        for places in _portions(now, max_bytes):
            answers = yield from _performed([now[place] for place in places])
            for place, answer in zip(places, answers, strict=True):
                yield from send(place, answer)
    if errors:
        raise errors[min(errors)]
    return results


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


def _portions(asked: dict[int, Operation], max_bytes: int) -> list[list[int]]:
    """The members' places, in portions that are on their way at a time."""
    portions: list[list[int]] = []
    left = 0
    for place, operation in asked.items():
        size = _size_bytes(operation)
        if not portions or size > left:
            portions.append([])
            left = max(size, max_bytes)
        portions[-1].append(place)
        left -= size
    return portions


def _size_bytes(operation: Operation) -> int:
    match operation:
        case There(inner):
            return _size_bytes(inner)
        case Get(_, max_bytes):
            return max_bytes
        case Create(_, data) | Put(_, data):
            return len(data)
    return 0
