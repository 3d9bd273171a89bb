"""The one retry policy: full jitter, growing pauses, errors that retrying cannot help are raised at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from diloco_cli import clock, randomness
from diloco_cli.errors import DilocoError, NoSpaceError, StoreError
from diloco_cli.store.port import Created, Exists, ObjectStat, Store, StoreForbiddenError

SHORTEST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 20.0
FULL_DISK_PAUSE_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class Retrying:
    """A call that keeps failing, for people's eyes: since when (wall clock), how often, why."""

    since_s: float
    attempts: int
    verb: str
    last_error: str


def pause_s(attempt: int, error: DilocoError, jitter: float) -> float:
    """How long to wait after the attempt (the first is 1). Forbidden calls are repeated slowly: only a person can
    help there, and a refused login in a fast loop looks like an attack. A full disk is looked at every few seconds."""
    if isinstance(error, NoSpaceError):
        return FULL_DISK_PAUSE_S * (1 + jitter)
    if isinstance(error, StoreForbiddenError):
        return LONGEST_PAUSE_S / 2 * (1 + jitter)
    ceiling_s = min(LONGEST_PAUSE_S, 2 * SHORTEST_PAUSE_S * 2.0 ** min(attempt - 1, 30))
    return SHORTEST_PAUSE_S + (ceiling_s - SHORTEST_PAUSE_S) * jitter


class RetryingStore:
    """Without a deadline it never gives up (background loops); with one it raises the last error when the
    next pause would end after it (foreground commands). The deadline counts from the start of each call.

    To be interruptible, give it an event: `RetryingStore(store, sleep=event.wait, stop=event.is_set)`; a
    call whose store fails then raises its last error as soon as the event is set. Repeating a create is safe
    by the port's contract: one's own bytes count as success.
    """

    def __init__(
        self,
        store: Store,
        deadline_s: float | None = None,
        *,
        sleep: Callable[[float], object] = clock.sleep_s,
        jitter: Callable[[], float] = randomness.jitter,
        monotonic: Callable[[], float] = clock.monotonic_s,
        stop: Callable[[], bool] = lambda: False,
        on_retry: Callable[[Retrying], None] = lambda retrying: None,
    ) -> None:
        self.url = store.url
        self._store = store
        self._deadline_s = deadline_s
        self._sleep = sleep
        self._jitter = jitter
        self._monotonic = monotonic
        self._stop = stop
        self._on_retry = on_retry
        self._lock = threading.Lock()
        self._failing: dict[int, Retrying] = {}

    @property
    def retrying(self) -> Retrying | None:
        """The call that has been failing for longest, if one is being repeated now."""
        with self._lock:
            return min(self._failing.values(), key=lambda failing: failing.since_s, default=None)

    def create(self, key: str, data: bytes) -> Created | Exists:
        return self._persist("create", lambda: self._store.create(key, data))

    def get(self, key: str) -> bytes | None:
        return self._persist("get", lambda: self._store.get(key))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self._persist("get_range", lambda: self._store.get_range(key, start, end))

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        return self._persist("list", lambda: self._store.list(prefix, after, limit))

    def put(self, key: str, data: bytes) -> None:
        """Once: a put is a hint, and a hint that cannot be written must not hold up the work."""
        try:
            self._store.put(key, data)
        except (StoreError, NoSpaceError) as error:
            if not isinstance(error, NoSpaceError) and not is_retryable(error):
                raise

    def delete(self, key: str) -> None:
        self._persist("delete", lambda: self._store.delete(key))

    def stat(self, key: str) -> ObjectStat | None:
        return self._persist("stat", lambda: self._store.stat(key))

    def _may_help(self, error: DilocoError) -> bool:
        """A full disk is worth waiting for in the background, where a person can free it while the work goes on."""
        return self._deadline_s is None if isinstance(error, NoSpaceError) else is_retryable(error)

    def _persist(self, verb: str, call: Callable[[], T]) -> T:
        started_s = self._monotonic()
        failing: Retrying | None = None
        thread = threading.get_ident()
        try:
            while True:
                try:
                    return call()
                except (StoreError, NoSpaceError) as error:
                    if not self._may_help(error) or self._stop():
                        raise
                    failing = _again(failing, verb, error)
                    pause = pause_s(failing.attempts, error, self._jitter())
                    waited_s = self._monotonic() - started_s
                    if self._deadline_s is not None and waited_s + pause > self._deadline_s:
                        raise
                    last_error = error
                with self._lock:
                    self._failing[thread] = failing
                self._on_retry(failing)
                self._sleep(pause)
                if self._stop():
                    raise last_error
        finally:
            with self._lock:
                self._failing.pop(thread, None)


def is_retryable(error: DilocoError) -> bool:
    """Whether the same call may work later."""
    return bool(getattr(error, "retryable", False))


def _again(failing: Retrying | None, verb: str, error: DilocoError) -> Retrying:
    since_s, attempts = (failing.since_s, failing.attempts) if failing else (clock.wall_s(), 0)
    return Retrying(since_s, attempts + 1, verb, str(error))


def retrying_text(store: RetryingStore) -> str:
    """`create fails for 12 s: disk full`, or nothing: for beats and status."""
    failing = store.retrying
    if failing is None:
        return ""
    return f"{failing.verb} fails for {clock.wall_s() - failing.since_s:.0f} s: {failing.last_error}"
