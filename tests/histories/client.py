"""A simulated process's store client: the product's retry policy (`store/retry.py`), one event at a time.

The simulated store answers as HTTP does: a create of a taken key gets `Exists` without the bytes, also if the same
process wrote them. So here, as in `store/gcs.py`, every doubtful create is settled by reading back.

`Bucket`: the simulated bucket.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from diloco_cli.errors import DataCheckError, FencedError, NoSpaceError, RefusedError, StoreError
from diloco_cli.protocol.log.operations import (
    Create,
    Get,
    Mend,
    Now,
    Operation,
    Put,
    Sleep,
    Steps,
    There,
    Together,
    Undeleted,
    together,
)
from diloco_cli.store.bucket import settled
from diloco_cli.store.port import (
    Created,
    Exists,
    ObjectStat,
    StoreUnavailableError,
    beginning,
    check_key,
    check_prefix,
    holder_bytes,
)
from diloco_cli.store.retry import Patience, kind_of

Result = TypeVar("Result")


class Client:
    """The client of one process. `jitter` gives uniform numbers in [0, 1), `now_s` the time on its own clock.
    `make_room`: what a syncer does while a write of its turn waits for room."""

    def __init__(self, jitter: Callable[[], float], now_s: Callable[[], float]) -> None:
        self._patience = Patience(jitter, now_s)
        self.make_room: Callable[[], Steps[object]] | None = None
        self._is_making_room = False

    def drive(self, steps: Steps[Result]) -> Steps[Result]:
        """Perform protocol code on this client: it sends the operations and hands in their settled answers."""
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
            elif kind is Get:  # most operations are: without a generator of their own
                try:
                    answer = yield operation
                except (StoreError, NoSpaceError) as error:
                    answer = yield from self._persist(operation, error)
            elif isinstance(operation, Together):
                answer = yield from self._all_answered(operation)
            else:
                answer = yield from self._perform(operation)

    def _all_answered(self, operation: Together) -> Steps[list[Any]]:
        """The answers, or errors in their place. Reads that all succeed at once need no more than that."""
        if any(type(one) is not Get for one in operation.operations):
            return (yield from together([self._answered(one) for one in operation.operations]))
        answers: list[Any] = yield operation
        if any(isinstance(answer, Exception) for answer in answers):
            pairs = zip(operation.operations, answers, strict=True)
            return (yield from together([self._settled(one, answer) for one, answer in pairs]))
        return answers

    def _perform(self, operation: Operation) -> Steps[Any]:
        if type(operation) is Sleep:
            return (yield operation)
        if type(operation) is Mend:
            return (yield from self._mended(operation))
        if type(operation) is Put or (isinstance(operation, There) and type(operation.operation) is Put):
            return (yield from self._put(operation))
        return (yield from self._persist(operation))

    def _answered(self, operation: Operation) -> Steps[Any]:
        """The answer, or the error in its place."""
        try:
            return (yield from self._perform(operation))
        except (StoreError, NoSpaceError) as error:
            return error

    def _settled(self, operation: Operation, answer: Any) -> Steps[Any]:
        """The answer to a read, or the one to its repetitions if that is an error, or the error that is left."""
        if not isinstance(answer, Exception):
            return answer
        try:
            return (yield from self._persist(operation, answer))  # type: ignore[arg-type]
        except (StoreError, NoSpaceError) as error:
            return error

    def _mended(self, operation: Operation) -> Steps[Undeleted | None]:
        try:
            answer: Undeleted | None = yield operation
        except (StoreError, NoSpaceError):
            return Undeleted.FAILED
        return answer

    def _put(self, operation: Operation) -> Steps[None]:
        """One try only: a hint that cannot be written must not delay the work."""
        try:
            yield operation
        except (StoreError, NoSpaceError) as error:
            if kind_of(error) == "lasting":
                raise

    def _persist(self, operation: Operation, failed: StoreError | NoSpaceError | None = None) -> Steps[Any]:
        """Retry as the product does; each pause is a sleep."""
        attempts = 0
        while True:
            if failed is None:
                try:
                    return (yield from self._once(operation))
                except (StoreError, NoSpaceError) as error:
                    failed = error
            attempts += 1
            pause_s = self._patience.pause_s(attempts, failed)
            if isinstance(failed, NoSpaceError) and type(operation) is Create:
                yield from self._make_room(failed)
            yield Sleep(pause_s)
            failed = None

    def _make_room(self, full: NoSpaceError) -> Steps[None]:
        if self._is_making_room:
            raise full
        if self.make_room is not None:
            self._is_making_room = True
            with suppress(StoreError, NoSpaceError, FencedError, DataCheckError, RefusedError):
                yield from self.drive(self.make_room())
            self._is_making_room = False

    def _once(self, operation: Operation) -> Steps[Any]:
        if isinstance(operation, There):
            return (yield from _over_there(self._once(operation.operation)))
        if isinstance(operation, Create):
            return (yield from self.create(operation))
        return (yield operation)

    def create(self, operation: Create) -> Steps[Created | Exists]:
        """One try: the key has our bytes, or another writer's, or the outcome is unknown (StoreUnavailableError)."""
        doubt = StoreUnavailableError("412, and then nothing there")
        try:
            answer: Created | Exists = yield operation
            if isinstance(answer, Created):
                return answer
        except StoreUnavailableError as error:
            doubt = error
        return (yield from self.settle(operation, doubt))

    def settle(self, operation: Create, doubt: StoreUnavailableError) -> Steps[Created | Exists]:
        """Read the key: it may have another writer's bytes, our own (the answer was lost), or none."""
        holder: bytes | None = yield Get(operation.key, holder_bytes(operation.data))
        return settled(holder, operation.data, doubt, operation.key)


def _over_there(steps: Steps[Result]) -> Steps[Result]:
    """The same calls, to the second of two stores; errors of that store are thrown into them."""
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            operation = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        assert not isinstance(operation, Now | Sleep | There | Together)
        try:
            answer, error = (yield There(operation)), None
        except (StoreError, NoSpaceError) as raised:
            error = raised


class Bucket:
    """Objects by key. Implements store.port.Store, but for two things: `Exists` carries no bytes, and a create of the
    same bytes also gets `Exists`. `Client` settles that. Strongly consistent, but a listing does not show a key before
    `listed_from_s`, and shows a deleted one up to `listed_until_s`; `withheld`: by prefix, what its last listing left
    out. `forged`: objects of a forger (forger.py)."""

    url = "memory://histories"

    def __init__(self, now_s: Callable[[], float] = lambda: 0.0) -> None:
        self.objects: dict[str, bytes] = {}
        self.listed_from_s: dict[str, float] = {}
        self.listed_until_s: dict[str, float] = {}
        self.forged: set[str] = set()
        self.withheld: dict[str, set[str]] = {}
        self._now_s = now_s
        self._sorted: list[str] = []  # keys, as far as this object was told of them

    def create(self, key: str, data: bytes) -> Created | Exists:
        if key in self.objects:
            return Exists(b"")
        self.put(key, data)
        return Created()

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        data = self.objects.get(key)
        return None if data is None else beginning(data, max_bytes)

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        data = self.objects.get(key)
        return None if data is None else data[max(0, start) : max(0, end)]

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        check_prefix(prefix)
        now_s, found = self._now_s(), self.keys(prefix, after)
        if not self.listed_from_s and not self.listed_until_s:
            self.withheld.clear()
            return [*found[:limit]]
        self.listed_from_s = {key: at_s for key, at_s in self.listed_from_s.items() if at_s > now_s}
        self.listed_until_s = {key: at_s for key, at_s in self.listed_until_s.items() if at_s > now_s}
        self.withheld[prefix] = self.listed_from_s.keys() & found
        gone = {key for key in self.listed_until_s if key.startswith(prefix) and key > after}
        return sorted(gone.union(key for key in found if key not in self.listed_from_s))[:limit]

    def keys(self, prefix: str, after: str = "") -> Sequence[str]:
        """The keys with the prefix, beyond `after`, in their order; also those that a listing does not show yet."""
        if len(self._sorted) != len(self.objects):  # those of a copy
            self._sorted = sorted(self.objects)
        first = bisect_left(self._sorted, max(prefix, f"{after}\0" if after else ""))
        end = bisect_left(self._sorted, f"{prefix}\U0010ffff") if prefix else len(self._sorted)
        return self._sorted[first:end]

    def put(self, key: str, data: bytes) -> None:
        if key not in self.objects:
            insort(self._sorted, check_key(key))
        self.objects[key] = data

    def delete(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            at = bisect_left(self._sorted, key)
            del self._sorted[at : at + (self._sorted[at : at + 1] == [key])]

    def stat(self, key: str) -> ObjectStat | None:
        data = self.objects.get(key)
        return None if data is None else ObjectStat(key, len(data), 0.0)
