"""A simulated process's way to the store: what the real stores and `store/retry.py` do, one event at a time.

The wire below knows HTTP's words only: a create that finds the key taken is told so and nothing more (`Exists` without
the bytes), whoever wrote them. So here, as in `store/gcs.py`, every doubtful create is settled by reading back, and
every call that may help is repeated after the product's own pauses (`store/retry.py`, which is synchronous and so
cannot itself be driven by a virtual clock; `tests/unit/simulate/test_client.py` compares the two).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from diloco_cli.errors import NoSpaceError, StoreError
from diloco_cli.protocol.operations import Create, Get, Now, Operation, Put, Sleep, Steps, There
from diloco_cli.store.port import Created, Exists, StoreUnavailableError, holder_bytes
from diloco_cli.store.retry import is_retryable, pause_s

Result = TypeVar("Result")


class Client:
    """Of one process. `jitter` gives uniform numbers in [0, 1)."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter

    def drive(self, steps: Steps[Result]) -> Steps[Result]:
        """Protocol code on this client: its operations go out, their settled answers come back."""
        answer: Any = None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            kind = type(operation)
            if kind is Now or kind is Sleep:
                answer = yield operation
            elif kind is Get:
                try:
                    answer = yield operation
                except (StoreError, NoSpaceError) as error:
                    answer = yield from self._again(operation, error)
            elif kind is Put or (isinstance(operation, There) and type(operation.operation) is Put):
                yield from self.put(operation)
                answer = None
            else:
                answer = yield from self._persist(operation)

    def put(self, operation: Operation) -> Steps[None]:
        """Once: a hint that cannot be written must not hold up the work."""
        try:
            yield operation
        except (StoreError, NoSpaceError) as error:
            if not isinstance(error, NoSpaceError) and not is_retryable(error):
                raise

    def create(self, operation: Create) -> Steps[Created | Exists]:
        """One try: the key is ours, or somebody else's, or nobody knows (StoreUnavailableError)."""
        try:
            answer: Created | Exists = yield operation
            if isinstance(answer, Created):
                return answer
        except StoreUnavailableError as doubt:
            return (yield from self.settle(operation, doubt))
        return (yield from self.settle(operation, StoreUnavailableError("412, and then nothing there")))

    def settle(self, operation: Create, doubt: StoreUnavailableError) -> Steps[Created | Exists]:
        """Somebody else's success, or our own whose answer was lost, or no success at all: only reading tells."""
        holder: bytes | None = yield Get(operation.key, holder_bytes(operation.data))
        if holder is None:
            raise doubt
        return Created() if holder == operation.data else Exists(holder)

    def _once(self, operation: Operation) -> Steps[Any]:
        if isinstance(operation, There):
            return (yield from _over_there(self._once(operation.operation)))
        if isinstance(operation, Create):
            return (yield from self.create(operation))
        return (yield operation)

    def _persist(self, operation: Operation) -> Steps[Any]:
        try:
            return (yield from self._once(operation))
        except (StoreError, NoSpaceError) as error:
            return (yield from self._again(operation, error))

    def _again(self, operation: Operation, error: StoreError | NoSpaceError) -> Steps[Any]:
        """Until it goes through: a background loop never gives up. A full disk is worth waiting for, too."""
        attempts = 0
        while True:
            if not isinstance(error, NoSpaceError) and not is_retryable(error):
                raise error
            attempts += 1
            yield Sleep(pause_s(attempts, error, self._jitter()))
            try:
                return (yield from self._once(operation))
            except (StoreError, NoSpaceError) as again:
                error = again


def _over_there(steps: Steps[Result]) -> Steps[Result]:
    """The same calls, to the other one of two stores, whose errors they hear."""
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            operation = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        assert not isinstance(operation, Now | Sleep | There)
        try:
            answer, error = (yield There(operation)), None
        except (StoreError, NoSpaceError) as raised:
            error = raised
