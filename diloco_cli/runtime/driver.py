"""Performs protocol code on a real store: the one place where operations become calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from diloco_cli.errors import StoreError
from diloco_cli.protocol.log.operations import Create, Delete, Get, List, Now, Operation, Put, Sleep, Steps, There
from diloco_cli.store.port import Store

Result = TypeVar("Result")


class Clock(Protocol):
    """A monotonic clock, a way to pass time, and a question asked before every operation: `check` may end the work by
    raising, which is safe anywhere."""

    def now_s(self) -> float: ...

    def sleep_s(self, seconds: float) -> None: ...

    def check(self) -> None: ...


@dataclass(frozen=True)
class Side:
    """A store; deletions go to `tries_once`, if it is given, and may fail there: the next sweep finds what is left, and
    a syncer that may not delete must not stop merging for it."""

    store: Store
    tries_once: Store | None = None


def perform(
    steps: Steps[Result], store: Store, clock: Clock, tries_once: Store | None = None, other: Side | None = None
) -> Result:
    """Run a protocol generator to its end. `tries_once`: see `Side`; `other`: where `There` is."""
    home = Side(store, tries_once)
    answer: Any = None
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        clock.check()
        side = home
        if isinstance(operation, There):
            if other is None:
                raise TypeError("these steps need a second store")
            operation, side = operation.operation, other
        answer = _perform_at(side, operation, clock)


def _perform_at(side: Side, operation: Operation, clock: Clock) -> Any:
    if isinstance(operation, Delete) and side.tries_once is not None:
        with suppress(StoreError):
            side.tries_once.delete(operation.key)
        return None
    return _perform_one(operation, side.store, clock)


def _perform_one(operation: Operation, store: Store, clock: Clock) -> Any:
    match operation:
        case Get(key, max_bytes):
            return store.get(key, max_bytes)
        case Create(key, data):
            return store.create(key, data)
        case Put(key, data):
            return store.put(key, data)
        case List(prefix, after, limit):
            return store.list(prefix, after, limit)
        case Delete(key):
            return store.delete(key)
        case Now():
            return clock.now_s()
        case Sleep(seconds):
            return clock.sleep_s(seconds)


class SystemClock:
    """This machine's clock; `interrupted` is asked before every operation and after every sleep."""

    def __init__(
        self, now_s: Callable[[], float], sleep_s: Callable[[float], object], interrupted: Callable[[], None]
    ) -> None:
        self._now_s, self._sleep_s, self._interrupted = now_s, sleep_s, interrupted

    def now_s(self) -> float:
        return self._now_s()

    def sleep_s(self, seconds: float) -> None:
        self._sleep_s(seconds)
        self.check()

    def check(self) -> None:
        self._interrupted()
