"""What every daemon shares: protocol code on a real store, a clock with a stop signal, and its own measurements.

`perform` is the one place where operations become calls. Operations of a set go over threads, at most
DILOCO_STORE_CONNECTIONS at a time. `Lanes` are threads beside the training, which perform their steps in order; an
error in a lane ends the learner, because its clock raises it before the next operation.

`Spending` is what a syncer's merges cost, from which `status` derives a slot's length (protocol/rules/capacity.py):
calls with little data show the time of a call, what a large object takes beyond that is the time of its bytes, and
between calls the process computes. A repeated or throttled call says nothing of the store's pace and is left out.

`commits_ahead` reads a log from its beginning, many commits at a time, for those who look at all of it.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from diloco_cli import __version__
from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.errors import InterruptedRunError, NoSpaceError, StoreError, TerminatedError
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.operations import (
    MAX_AT_ONCE,
    Create,
    Delete,
    Get,
    List,
    Mend,
    Now,
    Operation,
    Put,
    Sleep,
    Steps,
    There,
    Together,
    Undeleted,
)
from diloco_cli.protocol.log.records import MAX_EXACT, MAX_RECORD_BYTES, ProcessClaim
from diloco_cli.protocol.rules.capacity import turns
from diloco_cli.randomness import nonce
from diloco_cli.store.open import connections_here, open_store
from diloco_cli.store.port import Store, StoreForbiddenError, gentle
from diloco_cli.store.retry import RetryingStore, RetryNews, background_store
from diloco_cli.store.wrappers import MeteredStore, ThrottledStore

LARGE_BYTES = 1 << 16
CALLS_SHARE = 0.05  # that a new call has in the mean
MERGES_SHARE = 0.2  # that a new merge has
MOST_OF_MEAN = 4.0  # times the mean: a larger value counts as that
DIGITS = 6


class Spending:
    """Of one syncer process; seconds. `pauses`: how many there have been before calls to the store; `connections`: how
    many calls go at a time."""

    def __init__(self, pauses: Callable[[], int] = lambda: 0, connections: int = MAX_AT_ONCE) -> None:
        self._pauses, self._paused_before, self._connections = pauses, 0, connections
        self._call_s: float | None = None
        self._merge_bytes_s: float | None = None
        self._merge_processor_s: float | None = None
        self._bytes_s: float | None = 0.0  # of the present merge; None: a call that carried some was paused
        self._processor_s = 0.0

    def computed(self, seconds: float) -> None:
        """The process worked for so long between two calls."""
        self._processor_s += seconds
        self._paused_before = self._pauses()

    def called(self, operation: Operation, answer: Any, seconds: float) -> None:
        """A call, or those that went together, took so long, pauses included."""
        is_large, paused = _num_bytes(operation, answer) >= LARGE_BYTES, self._pauses() != self._paused_before
        in_turn = turns(len(operation.operations), self._connections) if isinstance(operation, Together) else 1
        if paused:
            self._bytes_s = None if is_large else self._bytes_s
        elif not is_large:
            self._call_s = _mean(self._call_s, seconds / in_turn, CALLS_SHARE)
        elif self._bytes_s is not None:
            self._bytes_s += max(0.0, seconds - in_turn * (self._call_s or 0.0))

    def merged(self) -> None:
        """A merge is in the log: what came since the one before was for it."""
        self._merge_processor_s = _mean(self._merge_processor_s, self._processor_s, MERGES_SHARE)
        if self._bytes_s is not None:
            self._merge_bytes_s = _mean(self._merge_bytes_s, self._bytes_s, MERGES_SHARE)
        self._bytes_s, self._processor_s = 0.0, 0.0

    def facts(self) -> dict[str, float]:
        """For the heartbeat; nothing before the first merge whose parts are all known."""
        if self._call_s is None or self._merge_bytes_s is None or self._merge_processor_s is None:
            return {}
        found = {"call_s": self._call_s, "bytes_s": self._merge_bytes_s, "processor_s": self._merge_processor_s}
        return {name: round(value, DIGITS) for name, value in found.items()}


def _mean(before: float | None, value: float, share: float) -> float:
    """With a share of the new value, as far as that is like those before it."""
    if not before:
        return value
    return before + share * (min(value, MOST_OF_MEAN * before) - before)


def _num_bytes(operation: Operation, answer: Any) -> int:
    """Carried, either way."""
    if isinstance(operation, Together):
        answers: Sequence[Any] = answer
        return sum(map(_num_bytes, operation.operations, answers))
    inner = operation.operation if isinstance(operation, There) else operation
    sent = len(inner.data) if isinstance(inner, Create | Put | Mend) else 0
    return sent + (len(answer) if isinstance(answer, bytes) else 0)


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
    """A store; deletions and mends go to `tries_once`, if it is given, and may fail there: they are found due again
    later, and a process that is not allowed to make them must go on with its work."""

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
    if isinstance(operation, Delete | Mend) and side.tries_once is not None:
        return _tried_once(partial(_perform_one, operation, side.tries_once, clock))
    return _perform_one(operation, side.store, clock)


def _tried_once(call: Callable[[], Any]) -> Undeleted | None:
    try:
        answer: Undeleted | None = call()
    except StoreForbiddenError:
        return Undeleted.REFUSED
    except (StoreError, NoSpaceError):  # a full service may be unable to note even that
        return Undeleted.FAILED
    return answer


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
        case Mend():
            return operation.answer(store)
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

    def answers(
        self,
        calls: Sequence[Callable[[], Any]],
        check: Callable[[], object] = lambda: None,
        every_s: float = CHECK_EVERY_S,
    ) -> list[Any]:
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
                while not left.acquire(timeout=every_s):
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
    """The lanes of one learner's process; daemon threads, so that none outlives the process. `tries_once`: see Side.
    `hurries`: whether saved moments may take the link from offers, because the process is about to leave."""

    def __init__(self, store: Store, clock: Clock, tries_once: Store | None = None) -> None:
        self._store, self._clock, self._tries_once = store, clock, tries_once
        self._queues: dict[Lane, queue.Queue[Steps[Any] | None]] = {}
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        self.news = threading.Event()
        self.hurries: Callable[[], bool] = lambda: False

    def start(self, lane: Lane, steps: Steps[Any]) -> None:
        if lane not in self._queues:
            self._queues[lane] = queue.Queue()
            thread = threading.Thread(target=self._work, args=(lane,), name=lane, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queues[lane].put(steps)

    def _work(self, lane: Lane) -> None:
        jobs = self._queues[lane]
        try:
            with gentle(lambda: lane == "moments" and not self.hurries()):
                while (steps := jobs.get()) is not None:
                    perform(steps, self._store, self._clock, self._tries_once)
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


def commits_ahead(store: Store, first: int = 0, last: int = MAX_EXACT) -> Iterator[bytes]:
    """The records of the commits from `first` to `last`, up to one that is not there, read in portions that grow. What
    is not there is read once more when its turn comes: the log of a living run grows meanwhile."""
    portion = 1
    while first <= last:
        numbers = range(first, min(first + portion, last + 1))
        reads = [partial(store.get, commit_key(n), MAX_RECORD_BYTES) for n in numbers]
        for read, answer in zip(reads, connections().answers(reads), strict=True):
            if isinstance(answer, BaseException):
                raise answer
            data = read() if answer is None else answer
            if data is None:
                return
            yield data
        first, portion = numbers.stop, min(2 * portion, MAX_AT_ONCE)


STDOUT = 1


class StopSignal:
    """Whether a signal has asked this process to end, and when. `patience_s`: how long it may still finish its work;
    waits and retries go on as usual until then."""

    def __init__(self, patience_s: float = 0.0) -> None:
        self.patience_s = patience_s
        self._event = threading.Event()
        self._since_s = 0.0
        self._number: int | None = None

    def hear_signals(self) -> None:
        """From now on, SIGTERM and SIGINT only ask. Call it on the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def ask(self) -> None:
        if not self._event.is_set():
            self._since_s = monotonic_s()
            self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def is_due(self, grace_s: float = 0.0) -> bool:
        """Whether the stop was asked for, and its patience and `grace_s` more have passed."""
        return self._event.is_set() and self._left_s(grace_s) <= 0

    def wait(self, seconds: float) -> None:
        """Sleep; a stop cuts it short, as far as its patience goes."""
        if not self._event.wait(max(0.0, seconds)):
            return
        sleep_s(min(max(0.0, seconds), max(0.0, self._left_s())))

    def check(self, grace_s: float = 0.0) -> None:
        """Raise TerminatedError once the stop is due."""
        if self.is_due(grace_s):
            raise self.error()

    def error(self) -> TerminatedError:
        """Its exit status says by which signal."""
        return InterruptedRunError("stopped by Ctrl-C") if self.by_hand else TerminatedError("told to leave by SIGTERM")

    @property
    def by_hand(self) -> bool:
        return self._number == signal.SIGINT

    def _left_s(self, grace_s: float = 0.0) -> float:
        return self.patience_s + grace_s - (monotonic_s() - self._since_s)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number
        self.ask()


def say(line: str) -> None:
    """Write one line of a daemon's log. A full disk or a closed pipe loses the line and does not end the daemon, nor
    does text from the bucket that cannot be encoded."""
    with suppress(OSError):
        os.write(STDOUT, f"{line}\n".encode(errors="backslashreplace"))


def own_claim(ranks: int = 1) -> ProcessClaim:
    return ProcessClaim(0, nonce(), os.uname().nodename, os.getpid(), utc_now_text(), __version__, ranks)


def opened(
    url: str,
    stop: StopSignal,
    who: str = "",
    attend: Callable[[], object] = lambda: None,
    throttled: ThrottledStore | None = None,
) -> tuple[MeteredStore, RetryingStore, RetryNews, SystemClock]:
    """The bucket at `url`, metered and with retries; failures are reported in this process's log, after `who`.
    `attend` is called before each wait. `throttled`: the bucket, if the caller has opened it."""

    def wait(seconds: float) -> None:
        attend()
        stop.wait(seconds)

    meter = MeteredStore(throttled or ThrottledStore(open_store(url), wait))
    store, news = background_store(meter, wait, stop.is_set, lambda line: say(f"{utc_now_text()} {who}{line}"))
    return meter, store, news, SystemClock(monotonic_s, wait, stop.check)
