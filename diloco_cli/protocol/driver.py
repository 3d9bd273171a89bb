"""Performs protocol code on a real store: the one place where operations become calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from diloco_cli.protocol.operations import Create, Get, Now, Operation, Put, Sleep, Steps
from diloco_cli.store.port import Store

Result = TypeVar("Result")


class Clock(Protocol):
    """A monotonic clock, a way to pass time, and a question asked before every operation: `check` may end the work by
    raising, which is safe anywhere."""

    def now_s(self) -> float: ...

    def sleep_s(self, seconds: float) -> None: ...

    def check(self) -> None: ...


def perform(steps: Steps[Result], store: Store, clock: Clock) -> Result:
    """Run a protocol generator to its end."""
    answer: Any = None
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        clock.check()
        answer = _perform_one(operation, store, clock)


def _perform_one(operation: Operation, store: Store, clock: Clock) -> Any:
    match operation:
        case Get(key):
            return store.get(key)
        case Create(key, data):
            return store.create(key, data)
        case Put(key, data):
            return store.put(key, data)
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
