"""Stores around another one: each passes the verbs on and does something around each call.

PrefixedStore    a part of a store as a store of its own: one run inside a bucket
MeteredStore     counts requests, bytes and errors; below the retries it counts what the store charges for, without the
                 parts of large objects
ThrottledStore   finds the pace of calls to a store that refuses some because they are too many
TimeBoxedStore   all calls end by one deadline, also if the store below hangs
EmulatedLink     a given latency and bandwidth, for trying a wide-area run on one machine
DisturbedStore   what `diloco chaos run` does to a unit's calls on purpose, for a while
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from diloco_cli import clock, randomness
from diloco_cli.errors import DilocoError, NoSpaceError
from diloco_cli.paths import UnreadableError, read_json, write_json
from diloco_cli.quantities import format_duration
from diloco_cli.store.port import (
    Created,
    Exists,
    ObjectStat,
    Store,
    StoreThrottledError,
    StoreUnavailableError,
    check_key,
    check_prefix,
)

T = TypeVar("T")
CUT = 0.8  # of the pace, by one refusal
SETTLE_S = 1.0  # after a cut: calls that were on their way before it say nothing new
RISE_A_S = 0.25  # calls a second, each second in which the pace is used
SLOWEST = 2.0  # calls a second: a process that makes fewer cannot be heard
FORGET_S = 300.0  # without a refusal: the store has become another one
MEASURED = 4096  # calls: the newest, for the rate at which they went out
LINK_SLICE_S = 0.05
"""Transfers share a direction of an emulated link in turns of this length, so that a small record does not wait for a
whole payload."""


class StoreWrapper:
    """A subclass overrides `_around`. This class itself adds nothing to a call."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self._store = store

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        """The call's result. `key`: the key, or the prefix of a listing; `num_bytes`: how many bytes it uploads."""
        return call()

    def create(self, key: str, data: bytes) -> Created | Exists:
        return self._around("create", key, lambda: self._store.create(key, data), len(data))

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        return self._around("get", key, lambda: self._store.get(key, max_bytes))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self._around("get_range", key, lambda: self._store.get_range(key, start, end))

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        return self._around("list", prefix, lambda: self._store.list(prefix, after, limit))

    def put(self, key: str, data: bytes) -> None:
        self._around("put", key, lambda: self._store.put(key, data), len(data))

    def delete(self, key: str) -> None:
        self._around("delete", key, lambda: self._store.delete(key))

    def stat(self, key: str) -> ObjectStat | None:
        return self._around("stat", key, lambda: self._store.stat(key))


def received_bytes(answer: object) -> int:
    """How many bytes of an object a call's answer holds."""
    data = answer.data if isinstance(answer, Exists) else answer
    return len(data) if isinstance(data, bytes) else 0


class PrefixedStore:
    """Every key gets `prefix/` in front; nothing outside of it can be named."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = f"{check_key(prefix)}/"
        self.url = f"{store.url.rstrip('/')}/{prefix}"

    def create(self, key: str, data: bytes) -> Created | Exists:
        return self._store.create(self._full(key), data)

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        return self._store.get(self._full(key), max_bytes)

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self._store.get_range(self._full(key), start, end)

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        keys = self._store.list(self._prefix + check_prefix(prefix), self._prefix + after if after else "", limit)
        return [key.removeprefix(self._prefix) for key in keys]

    def put(self, key: str, data: bytes) -> None:
        self._store.put(self._full(key), data)

    def delete(self, key: str) -> None:
        self._store.delete(self._full(key))

    def stat(self, key: str) -> ObjectStat | None:
        found = self._store.stat(self._full(key))
        return None if found is None else replace(found, key=key)

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)


@dataclass(frozen=True)
class StoreCounts:
    """Totals since the start. `requests` is by verb; a failed call counts as a request and as an error, and
    its payload as sent."""

    requests: Mapping[str, int]
    errors: int
    up_bytes: int
    down_bytes: int

    @property
    def num_requests(self) -> int:
        return sum(self.requests.values())

    @property
    def num_writes(self) -> int:
        """Requests of class A, as object stores charge: those that write or list. Deletes are free, reads class B."""
        return sum(self.requests.get(verb, 0) for verb in ("create", "put", "list"))


class MeteredStore(StoreWrapper):
    """Thread-safe; adds no request of its own."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._errors = 0
        self._up_bytes = 0
        self._down_bytes = 0

    @property
    def counts(self) -> StoreCounts:
        """One consistent snapshot."""
        with self._lock:
            requests = MappingProxyType(dict(self._requests))
            return StoreCounts(requests, self._errors, self._up_bytes, self._down_bytes)

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        with self._lock:
            self._requests[verb] += 1
            self._up_bytes += num_bytes
        try:
            answer = call()
        except DilocoError:
            with self._lock:
                self._errors += 1
            raise
        with self._lock:
            self._down_bytes += received_bytes(answer)
        return answer


class CallPace:
    """How fast a process calls a store that refuses calls because they are too many (429, SlowDown).

    More calls than a store takes are refused, repeated and refused again, and the process that repeats most gets least.
    So each process finds its pace as TCP does: a refusal cuts it to a share of what went through, calls that go well
    raise it slowly. By such steps the paces of processes that share a store become alike, or as their `weight` says: a
    syncer makes as many calls as all learners, and is cut as if each of as many connections had a pace of its own
    (MulTCP, Crowcroft and Oechslin 1998). Until a store refuses there is no limit.

    Times are seconds of one monotonic clock. Safe between threads. `limit`: calls a second, if any; `waits`: of calls
    that had to wait, so far."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.limit: float | None = None
        self.waits = 0
        self._lock = threading.Lock()
        self._sent: deque[float] = deque(maxlen=MEASURED)
        self._next_s = self._cut_s = float("-inf")

    def wait_s(self, now_s: float) -> float:
        """Take the next call; returns how long it has to wait."""
        with self._lock:
            if self.limit is not None and now_s - self._cut_s > FORGET_S:
                self.limit = None
            start_s = max(now_s, self._next_s)
            if self.limit is not None:
                self._next_s = start_s + 1.0 / self.limit
            self._sent.append(start_s)
            if start_s > now_s:
                self.waits += 1
            return start_s - now_s

    def refused(self, now_s: float) -> None:
        """The store has refused a call because there are too many."""
        with self._lock:
            if now_s - self._cut_s < SETTLE_S / self.weight:
                return
            self._cut_s = now_s
            lately = sum(now_s - 1.0 <= sent_s <= now_s for sent_s in self._sent)
            cut = 1.0 - (1.0 - CUT) / self.weight
            self.limit = max(SLOWEST, cut * (lately if self.limit is None else self.limit))

    def went_well(self) -> None:
        """A call had its answer."""
        with self._lock:
            if self.limit is not None:
                self.limit += self.weight * RISE_A_S / self.limit


class ThrottledStore(StoreWrapper):
    """Each call waits for its turn. Below the retries: a repeated call waits as any other."""

    def __init__(
        self, store: Store, sleep: Callable[[float], object], monotonic: Callable[[], float] = clock.monotonic_s
    ) -> None:
        super().__init__(store)
        self.pace = CallPace()
        self._sleep, self._monotonic = sleep, monotonic

    @property
    def calls_a_s(self) -> float:
        """The present pace; 0 while there is no limit."""
        return round(self.pace.limit or 0.0, 1)

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        wait_s = self.pace.wait_s(self._monotonic())
        if wait_s > 0.0:
            self._sleep(wait_s)
        try:
            answer = call()
        except StoreThrottledError:
            if verb != "put":  # of one name that is overwritten too often: that says nothing about other calls
                self.pace.refused(self._monotonic())
            raise
        self.pace.went_well()
        return answer


class Deadline:
    """How much time is left; shared by all calls that must end together."""

    def __init__(self, seconds: float, monotonic: Callable[[], float] = clock.monotonic_s) -> None:
        self._monotonic = monotonic
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """From now on `seconds` are left."""
        self.seconds = max(0.0, seconds)
        self._end_s = self._monotonic() + self.seconds

    def end(self) -> None:
        """There is no time left."""
        self._end_s = self._monotonic()

    def left_s(self) -> float:
        return max(0.0, self._end_s - self._monotonic())

    def is_over(self) -> bool:
        return self.left_s() <= 0


class TimeBoxedStore(StoreWrapper):
    """For commands. Raises StoreUnavailableError at the deadline, also during a call; waiting for a call can
    be interrupted (Ctrl-C). A client's own timeouts are made for transfers that may take minutes, and a hung network
    file system has none. So each call is made in a thread of its own, which is abandoned at the deadline; the call may
    still take effect later. Not for the background: an abandoned call holds a thread and its memory until the store
    answers.

    While an abandoned call hangs, no other call begins and the error is raised at once, also after a restart of the
    deadline, so that repeated looks at a hung file system do not accumulate threads. With `keeps_trying` calls begin
    all the same, for the last few writes of a command."""

    def __init__(self, store: Store, box: Deadline, keeps_trying: bool = False) -> None:
        super().__init__(store)
        self._box = box
        self._keeps_trying = keeps_trying
        self._left_behind: set[threading.Thread] = set()

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        self._left_behind -= {thread for thread in self._left_behind.copy() if not thread.is_alive()}
        if self._left_behind and not self._keeps_trying:
            self._box.end()
        where, hint = f"{self.url}/{key}".rstrip("/"), f"diloco doctor {self.url}"
        return call_within(self._box, call, where, hint, self._left_behind.add)


def call_within(
    box: Deadline,
    call: Callable[[], T],
    where: str,
    hint: str = "",
    on_leaving: Callable[[threading.Thread], object] = lambda thread: None,
) -> T:
    """The call's result; StoreUnavailableError if the deadline comes first, and then the call is abandoned."""
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    no_answer = StoreUnavailableError(
        f"the store gave no answer within {format_duration(box.seconds)}", where=where, hint=hint or None
    )
    left_s = box.left_s()
    if left_s <= 0:
        raise no_answer
    thread = threading.Thread(target=_answer, args=(call, outcome), name="store-call", daemon=True)
    thread.start()
    try:
        result, error = outcome.get(timeout=left_s)
    except queue.Empty:
        on_leaving(thread)
        raise no_answer from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _answer(call: Callable[[], T], outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]]) -> None:
    try:
        outcome.put((call(), None))
    except BaseException as error:  # handed to the caller, which raises it
        outcome.put((None, error))


class _Direction:
    """One direction of a link; all threads queue for it."""

    def __init__(self, bits_per_s: float | None, sleep: Callable[[float], object], now: Callable[[], float]) -> None:
        self._bytes_per_s = bits_per_s / 8 if bits_per_s else None
        self._sleep = sleep
        self._now = now
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def carry(self, num_bytes: int) -> None:
        """Returns when `num_bytes` have passed."""
        if self._bytes_per_s is None:
            return
        left_s = num_bytes / self._bytes_per_s
        while left_s > 0:
            turn_s = min(left_s, LINK_SLICE_S)
            left_s -= turn_s
            with self._lock:
                now_s = self._now()
                self._free_at_s = max(now_s, self._free_at_s) + turn_s
                wait_s = self._free_at_s - now_s
            self._sleep(wait_s)


class EmulatedLink(StoreWrapper):
    """Every call takes one round trip and the time of its payload at the given bits per second, up and down
    apart; None is unlimited. An upload takes effect after its bytes have passed. One object is one link:
    share it among the threads of a machine."""

    def __init__(
        self,
        store: Store,
        up_bps: float | None,
        down_bps: float | None,
        rtt_s: float,
        sleep: Callable[[float], object] = clock.sleep_s,
        monotonic: Callable[[], float] = clock.monotonic_s,
    ) -> None:
        super().__init__(store)
        self._rtt_s = rtt_s
        self._sleep = sleep
        self._up = _Direction(up_bps, sleep, monotonic)
        self._down = _Direction(down_bps, sleep, monotonic)

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        self._up.carry(num_bytes)
        if self._rtt_s > 0:
            self._sleep(self._rtt_s)
        answer = call()
        self._down.carry(sum(map(len, answer)) if isinstance(answer, list) else received_bytes(answer))
        return answer


@dataclass(frozen=True)
class StoreFault:
    """What is done on purpose to the calls of a unit: for `for_s` seconds from `began_s` on the wall clock, then it is
    over whatever happens. `kind`: as in faults.py. `factor`: how much slower; `share`: of the calls that fail."""

    id: str
    kind: str
    began_s: float
    for_s: float
    factor: float = 1.0
    share: float = 1.0

    @property
    def is_on(self) -> bool:
        return 0.0 <= clock.wall_s() - self.began_s < self.for_s


def read_store_fault(path: Path) -> StoreFault | None:
    """The fault that is on now, by its file; a file that is none counts as missing."""
    try:
        body = read_json(path)
        fault = None if body is None else StoreFault(**body)
        return fault if fault is not None and fault.is_on else None
    except (UnreadableError, TypeError):
        return None


LOOKS_EVERY_S = 0.5  # at whether a call is still to be slow


class DisturbedStore(StoreWrapper):
    """`path`: a file of this machine that says what is done, if it is there; beside it this process notes what it has
    begun to do, for who asked for it."""

    def __init__(self, store: Store, path: Path, sleep: Callable[[float], object] = clock.sleep_s) -> None:
        super().__init__(store)
        self.undisturbed, self._path, self._sleep, self._noted = store, path, sleep, ""

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        fault = read_store_fault(self._path)
        if fault is None:
            return call()
        if fault.id != self._noted:
            self._noted = fault.id
            with suppress(DilocoError, OSError):  # whoever asked for it finds that it did not happen
                write_json(noted_beside(self._path), {"id": fault.id})
        if fault.kind == "full" and verb in ("create", "put"):
            raise NoSpaceError("no space is left, on purpose (chaos)", where=self.url)
        if fault.kind == "partition" or (fault.kind == "errors" and randomness.jitter() < fault.share):
            what = "cut off from the store" if fault.kind == "partition" else "the store failed"
            raise StoreUnavailableError(f"{what}, on purpose (chaos)", where=self.url)
        began_s = clock.monotonic_s()
        answer = call()
        left_s = (fault.factor - 1.0) * (clock.monotonic_s() - began_s) if fault.kind == "slow" else 0.0
        while left_s > 0 and read_store_fault(self._path) == fault:  # it may be healed while a call is on its way
            self._sleep(min(left_s, LOOKS_EVERY_S))
            left_s -= LOOKS_EVERY_S
        return answer


def noted_beside(path: Path) -> Path:
    """Where a unit notes which fault it has begun to do."""
    return path.with_suffix(".noted")
