"""The simulated client does what the product's stores and retries do: as many calls, the same pauses, one answer.

Listings of the simulated bucket lag behind; nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco_cli.errors import NoSpaceError, StoreError
from diloco_cli.protocol.log.operations import Create, Get, Now, Put, Sleep, Steps
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import (
    Created,
    Exists,
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
)
from diloco_cli.store.retry import RetryingStore
from tests.histories.client import Bucket, Client

BUSY, FORBIDDEN, FULL, BROKEN = (
    StoreUnavailableError("503"), StoreForbiddenError("403"), NoSpaceError("full"), StoreBrokenError("no bucket"),
)  # fmt: skip


def one(operation: Any) -> Steps[Any]:
    return (yield operation)


def simulated(operation: Any, answers: list[Any]) -> tuple[Any, list[Any]]:
    """(result or error, everything that went over the wire) with these answers of the wire."""
    steps, wire, left = Client(lambda: 0.5, lambda: 0.0).drive(one(operation)), [], list(answers)
    answer: Any = None
    try:
        sent = steps.send(None)
        while True:
            wire.append(sent)
            if isinstance(sent, Sleep):
                sent = steps.send(None)
                continue
            answer = left.pop(0)
            sent = steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
    except StopIteration as stop:
        return stop.value, wire
    except (StoreError, NoSpaceError) as error:
        return error, wire


class Scripted(MemoryStore):
    """A store that settles its own creates, and fails as the script says."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__()
        self.answers, self.calls = answers, 0

    def _next(self) -> Any:
        self.calls += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        found: bytes | None = self._next()
        return found

    def put(self, key: str, data: bytes) -> None:
        self._next()


def real(call: Callable[[RetryingStore], Any], answers: list[Any]) -> tuple[Any, int, list[float]]:
    store, pauses = Scripted(list(answers)), list[float]()
    retrying = RetryingStore(store, sleep=pauses.append, jitter=lambda: 0.5, monotonic=lambda: 0.0)
    try:
        return call(retrying), store.calls, pauses
    except (StoreError, NoSpaceError) as error:
        return error, store.calls, pauses


@pytest.mark.parametrize(
    "answers",
    [
        [b"x"],
        [BUSY, b"x"],
        [BUSY] * 9 + [b"x"],
        [FORBIDDEN, BUSY, None],
        [FULL, FULL, b"x"],
        [BROKEN],
        [BUSY, BROKEN],
    ],
    ids=str,
)
def test_reads_are_repeated_as_often_and_after_the_same_pauses_as_by_the_product(answers: list[Any]) -> None:
    found, wire = simulated(Get("a", 9), answers)
    expected, calls, pauses = real(lambda store: store.get("a"), answers)
    assert found == expected
    assert sum(isinstance(sent, Get) for sent in wire) == calls
    assert [sent.seconds for sent in wire if isinstance(sent, Sleep)] == pauses


@pytest.mark.parametrize("answers", [[None], [BUSY], [FULL], [BROKEN]], ids=str)
def test_a_hint_is_tried_once_as_by_the_product(answers: list[Any]) -> None:
    found, wire = simulated(Put("hint/x", b"x"), answers)
    expected, calls, pauses = real(lambda store: store.put("hint/x", b"x"), answers)
    assert (found, len(wire)) == (expected, calls) and pauses == []


@pytest.mark.parametrize(
    ("answers", "result", "creates", "reads"),
    [
        ([Created()], Created(), 1, 0),
        ([Exists(b""), b"mine"], Created(), 1, 1),
        ([Exists(b""), b"other"], Exists(b"other"), 1, 1),
        ([BUSY, b"mine"], Created(), 1, 1),
        ([BUSY, b"other"], Exists(b"other"), 1, 1),
        ([BUSY, None, Created()], Created(), 2, 1),
        ([BUSY, BUSY, Exists(b""), b"mine"], Created(), 2, 2),
        ([FULL, Created()], Created(), 2, 0),
        ([FORBIDDEN, Exists(b""), b"other"], Exists(b"other"), 2, 1),
        ([BROKEN], BROKEN, 1, 0),
    ],
    ids=str,
)
def test_a_create_in_doubt_is_settled_by_reading_back(
    answers: list[Any], result: Any, creates: int, reads: int
) -> None:
    found, wire = simulated(Create("a", b"mine"), answers)
    assert found == result
    assert sum(isinstance(sent, Create) for sent in wire) == creates
    assert sum(isinstance(sent, Get) for sent in wire) == reads


def test_a_clock_and_a_pause_are_no_business_of_the_stores() -> None:
    assert simulated(Now(), [7.5]) == (7.5, [Now()])
    assert simulated(Sleep(2.0), []) == (None, [Sleep(2.0)])


KEYS = [f"delta/{name}" for name in "abc"]


class ClientClock:
    now_s = 0.0


def filled(clock: ClientClock) -> Bucket:
    bucket = Bucket(lambda: clock.now_s)
    for key in KEYS:
        bucket.create(key, b"")
    return bucket


def test_a_new_key_is_listed_late_and_read_at_once() -> None:
    clock = ClientClock()
    bucket = filled(clock)
    bucket.listed_from_s[KEYS[1]] = 5.0
    assert bucket.list("delta/") == [KEYS[0], KEYS[2]] and bucket.get(KEYS[1]) == b""
    clock.now_s = 5.0
    assert bucket.list("delta/") == KEYS


def test_a_deleted_key_is_listed_for_a_while_and_never_read() -> None:
    clock = ClientClock()
    bucket = filled(clock)
    bucket.delete(KEYS[1])
    bucket.listed_until_s[KEYS[1]] = 5.0
    assert bucket.list("delta/") == KEYS and bucket.get(KEYS[1]) is None
    assert bucket.list("delta/", after=KEYS[0]) == KEYS[1:] and bucket.list("weights/") == []
    assert bucket.list("delta/", limit=2) == KEYS[:2], "it counts like any other"
    clock.now_s = 5.0
    assert bucket.list("delta/") == [KEYS[0], KEYS[2]]


def test_a_deleted_key_that_is_written_again_is_listed_once() -> None:
    bucket = filled(ClientClock())
    bucket.listed_until_s[KEYS[1]] = 5.0
    assert bucket.list("delta/") == KEYS
