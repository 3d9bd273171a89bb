"""Performs protocol code on a real store: the one place where operations become calls.

Operations that go together are calls of several threads, at most DILOCO_STORE_CONNECTIONS at a time.

`Lanes`: threads beside the training. Each performs its steps one after the other, in the order of handing in; what ends
a lane ends the learner, whose clock raises it before its next operation.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from diloco_cli.errors import NoSpaceError, StoreError
from diloco_cli.protocol.log.operations import (
    Create,
    Delete,
    Get,
    List,
    Now,
    Operation,
    Put,
    Sleep,
    Steps,
    There,
    Together,
    Undeleted,
)
from diloco_cli.runtime.spending import Spending
from diloco_cli.store.parallel import connections_here
from diloco_cli.store.port import Store, StoreForbiddenError

if TYPE_CHECKING:
    from diloco_cli.protocol.actors.learner import Lane

Result = TypeVar("Result")
CHECK_EVERY_S = 0.5  # while calls are on their way


class Clock(Protocol):
    """A monotonic clock, a way to pass time, and `check`, which is called before every operation and may end the work
    by raising: that is safe at any operation."""

    def now_s(self) -> float: ...

    def sleep_s(self, seconds: float) -> None: ...

    def check(self) -> None: ...


@dataclass(frozen=True)
class Side:
    """A store; deletions go to `tries_once`, if it is given, and may fail there: the next sweep finds the object again,
    and a syncer that is not allowed to delete must go on merging."""

    store: Store
    tries_once: Store | None = None


def perform(
    steps: Steps[Result], store: Store, clock: Clock, tries_once: Store | None = None, other: Side | None = None,
    own: Connections | None = None, spending: Spending | None = None,
) -> Result:  # fmt: skip
    """Run a protocol generator to its end. `tries_once`: see `Side`; `other`: the store of `There` operations; `own`:
    connections that it shares with nobody, whose calls might hang; `spending`: what its calls take is told to it."""
    home = Side(store, tries_once)
    answer: Any = None
    now_s = clock.now_s() if spending is not None else 0.0
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        if spending is not None:
            now_s, before_s = clock.now_s(), now_s
            spending.computed(now_s - before_s)
        clock.check()
        if isinstance(operation, Together):
            calls = [partial(_perform_at, home, other, one, clock) for one in operation.operations]
            answer = (own or connections()).answers(calls, clock.check)
        else:
            answer = _perform_at(home, other, operation, clock)
        if spending is not None:
            now_s, before_s = clock.now_s(), now_s
            if not isinstance(operation, Now | Sleep):
                spending.called(operation, answer, now_s - before_s)


def _perform_at(home: Side, other: Side | None, operation: Operation, clock: Clock) -> Any:
    if isinstance(operation, There):
        if other is None:
            raise TypeError("these steps need a second store")
        return _perform_on(other, operation.operation, clock)
    return _perform_on(home, operation, clock)


def _perform_on(side: Side, operation: Operation, clock: Clock) -> Any:
    if isinstance(operation, Delete) and side.tries_once is not None:
        return _tried_once(side.tries_once, operation.key)
    return _perform_one(operation, side.store, clock)


def _tried_once(store: Store, key: str) -> Undeleted | None:
    try:
        store.delete(key)
    except StoreForbiddenError:
        return Undeleted.REFUSED
    except (StoreError, NoSpaceError):  # a full service may be unable to note even that
        return Undeleted.FAILED
    return None


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
    """This machine's clock; `interrupted` is called before every operation and after every sleep."""

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


class Connections:
    """Threads for calls that are made at the same time: daemons, so that a call without an answer does not keep a
    process from ending."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most or connections_here()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0

    def answers(self, calls: Sequence[Callable[[], Any]], check: Callable[[], None] = lambda: None) -> list[Any]:
        """The calls' answers, or the errors in their place, when all have ended. `check` is called now and then by the
        thread that waits; if it raises, calls that have not begun are never made, and the others are left alone."""
        found: list[Any] = [None] * len(calls)
        left, given_up = threading.Semaphore(0), threading.Event()

        def made(place: int) -> None:
            try:
                found[place] = None if given_up.is_set() else calls[place]()
            except BaseException as error:  # told to the steps that asked for this call
                found[place] = error
            finally:
                left.release()

        self._grow(len(calls))
        for place in range(len(calls)):
            self._calls.put(partial(made, place))
        try:
            for _ in calls:
                while not left.acquire(timeout=CHECK_EVERY_S):
                    check()
        except BaseException:
            given_up.set()
            raise
        return found

    def _grow(self, wanted: int) -> None:
        with self._lock:
            while self._threads < min(wanted, self._most):
                self._threads += 1
                threading.Thread(target=self._work, name="connection", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._calls.get()()


@cache
def connections() -> Connections:
    """Those of this process."""
    return Connections()


class Lanes:
    """The lanes of one learner's process; daemon threads, so that none outlives the process."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._queues: dict[Lane, queue.Queue[Steps[Any] | None]] = {}
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        self.news = threading.Event()

    def start(self, lane: Lane, steps: Steps[Any]) -> None:
        if lane not in self._queues:
            self._queues[lane] = queue.Queue()
            thread = threading.Thread(target=self._work, args=(self._queues[lane],), name=lane, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queues[lane].put(steps)

    def _work(self, jobs: queue.Queue[Steps[Any] | None]) -> None:
        try:
            while (steps := jobs.get()) is not None:
                perform(steps, self._store, self._clock)
        except BaseException as error:  # handed to the training thread, which raises it
            self.failure = error
            self.news.set()

    def check(self) -> None:
        """Raises the error that ended a lane, if any."""
        if self.failure is not None:
            raise self.failure

    def sleep_s(self, seconds: float) -> None:
        """The training waits here; news from the follower wakes it."""
        self.news.wait(seconds)
        self.news.clear()

    def close(self, timeout_s: float) -> None:
        """Let each lane finish its queued work, within `timeout_s`."""
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
