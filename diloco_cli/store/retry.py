"""The one retry policy: by kind of error, with growing jittered pauses and a deadline.

    kind      errors                                       in the background                 in a command
    passing   timeouts, resets, 408, 409, 429, 5xx,        soon, then ever more slowly,      until its deadline
              damaged bytes                                never given up
    refused   401, 403, an expired token, a skewed clock   every 10 to 20 s, never given up  raised at once
    full      no space, a quota used up                    every 2 to 4 s, never given up    raised at once
    gone      a bucket or directory that was there         every 2 to 4 s for 10 minutes     raised at once
    lasting   never a bucket, bad key, a broken promise    raised at once                    raised at once

A person can free a disk, renew a token or mount a directory while the work goes on. A bucket that has never answered
has a wrong name; one that is gone for 10 minutes ($DILOCO_GONE_AFTER) has been deleted.

`RetryNews`: reports while a store fails: lines in the log or on the screen, and a heartbeat for `status`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from diloco_cli import clock, randomness
from diloco_cli.environment import environment_value
from diloco_cli.errors import DilocoError, NoSpaceError, StoreError
from diloco_cli.quantities import parse_duration
from diloco_cli.store.port import Store, StoreForbiddenError, StoreGoneError
from diloco_cli.store.wrappers import StoreWrapper

SHORTEST_PAUSE_S = 0.2
MAX_PAUSE_S = 20.0
FULL_DISK_PAUSE_S = 2.0
GONE_AFTER_VARIABLE = "DILOCO_GONE_AFTER"
GONE_AFTER_S = 600.0
MAX_REASON = 200  # characters: it stands in a column of `status`

Kind = Literal["passing", "refused", "full", "gone", "lasting"]
T = TypeVar("T")
QUIET_S = 1.5
LINE_EVERY_S = 60.0
NEW_REASON_EVERY_S = 10.0
HEARTBEAT_EVERY_S = 3.0
MAKING_ROOM_TRIES_S = 10.0  # each call that makes room: to read up to a floor takes many


@dataclass(frozen=True)
class Retrying:
    """A call that keeps failing, for reports: since when (wall clock), how often, why."""

    since_s: float
    attempts: int
    verb: str
    last_error: str
    kind: Kind = "passing"


def kind_of(error: DilocoError) -> Kind:
    """The row of the table above."""
    if isinstance(error, NoSpaceError):
        return "full"
    if isinstance(error, StoreForbiddenError):
        return "refused"
    if isinstance(error, StoreGoneError):
        return "gone"
    return "passing" if is_retryable(error) else "lasting"


def gone_after_s() -> float:
    """For how long a missing bucket counts as an outage."""
    setting = environment_value(GONE_AFTER_VARIABLE)
    return GONE_AFTER_S if setting is None else parse_duration(setting)


def is_retryable(error: DilocoError) -> bool:
    """Whether the same call may work later."""
    return bool(getattr(error, "retryable", False))


def is_worth_repeating(error: DilocoError, in_background: bool) -> bool:
    """Whether to repeat a call. If only a person can remove the cause, only background work repeats it."""
    kind = kind_of(error)
    return kind == "passing" or (in_background and kind != "lasting")


def pause_s(attempt: int, error: DilocoError, jitter: float) -> float:
    """How long to wait after the attempt (the first is 1). Refused calls are repeated slowly: only a person can
    help, and a refused login in a fast loop looks like an attack. After a full disk, and while a bucket is gone, the
    pause is a few seconds."""
    kind = kind_of(error)
    if kind in ("full", "gone"):
        return FULL_DISK_PAUSE_S * (1 + jitter)
    if kind == "refused":
        return MAX_PAUSE_S / 2 * (1 + jitter)
    ceiling_s = min(MAX_PAUSE_S, 2 * SHORTEST_PAUSE_S * 2.0 ** min(attempt - 1, 30))
    return SHORTEST_PAUSE_S + (ceiling_s - SHORTEST_PAUSE_S) * jitter


class Patience:
    """The retry policy for all calls of one client."""

    def __init__(
        self,
        jitter: Callable[[], float],
        monotonic: Callable[[], float],
        in_background: bool = True,
        gone_s: float = GONE_AFTER_S,
    ) -> None:
        self._jitter, self._monotonic, self._in_background = jitter, monotonic, in_background
        self._gone_s = gone_s
        self._has_answered = False
        self._gone_since_s: float | None = None

    def pause_s(self, attempts: int, error: DilocoError) -> float:
        """How long to wait before the next try. Raises the error if the call is not to be repeated."""
        if not is_worth_repeating(error, self._in_background) or self.is_lost(error):
            raise error
        return pause_s(attempts, error, self._jitter())

    def is_lost(self, error: DilocoError) -> bool:
        """Whether this error is of a bucket that was never there, or has been gone for too long."""
        if kind_of(error) != "gone":
            return False
        now_s = self._monotonic()
        since_s = self._gone_since_s = now_s if self._gone_since_s is None else self._gone_since_s
        return not (self._in_background and self._has_answered) or now_s - since_s >= self._gone_s

    def answered(self, answer: object) -> None:
        """A call had its answer. That there is no object proves no bucket: GCS says so of a missing one too."""
        if answer is not None:
            self._has_answered, self._gone_since_s = True, None


class RetryingStore(StoreWrapper):
    """Without a deadline it never gives up (background loops); with one it raises the last error when the
    next pause would end after it (foreground commands). The deadline counts from the start of each call; `left_s`,
    if given, bounds all calls together.

    To be interruptible, give it an event: `RetryingStore(store, sleep=event.wait, stop=event.is_set)`; a
    call whose store fails then raises its last error as soon as the event is set. Repeating a create is safe
    by the port's contract: the same bytes count as success.

    `on_retry` is called before each pause, and every `tell_every_s` of a long one; `on_answer` when a call that had
    failed has its answer at last.

    `mark`: an object by which this client knows its bucket, if it has seen one. A folder that was gone may have been
    moved, and another made in its place: nothing is created there before the mark is seen again.
    """

    mark: tuple[str, bytes] | None = None

    def __init__(
        self,
        store: Store,
        deadline_s: float | None = None,
        *,
        sleep: Callable[[float], object] = clock.sleep_s,
        jitter: Callable[[], float] = randomness.jitter,
        monotonic: Callable[[], float] = clock.monotonic_s,
        stop: Callable[[], bool] = lambda: False,
        left_s: Callable[[], float] = lambda: math.inf,
        on_retry: Callable[[Retrying], None] = lambda retrying: None,
        on_answer: Callable[[Retrying], None] = lambda retrying: None,
        tell_every_s: float = math.inf,
        gone_s: float = GONE_AFTER_S,
    ) -> None:
        super().__init__(store)
        self._deadline_s = deadline_s
        self._sleep = sleep
        self._monotonic = monotonic
        self._patience = Patience(jitter, monotonic, deadline_s is None, gone_s)
        self._stop = stop
        self._left_s = left_s
        self._on_retry, self._on_answer, self._tell_every_s = on_retry, on_answer, tell_every_s
        self._lock = threading.Lock()
        self._failing: dict[int, Retrying] = {}
        self._was_gone = False
        self.pauses = 0  # so far, of all calls

    @property
    def retrying(self) -> Retrying | None:
        """The call that has been failing for longest, if one is being repeated now."""
        with self._lock:
            return min(self._failing.values(), key=lambda failing: failing.since_s, default=None)

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        return self.persist(verb, call)

    def put(self, key: str, data: bytes) -> None:
        """One try only: a put is a hint, and a hint that cannot be written must not delay the work."""
        try:
            self._store.put(key, data)
            self._patience.answered(True)
        except (StoreError, NoSpaceError) as error:
            if kind_of(error) == "lasting" or self._patience.is_lost(error):
                raise

    def persist(self, verb: str, call: Callable[[], T]) -> T:
        """Any other call, by the same policy; `verb` names it in reports."""
        started_s = self._monotonic()
        failing: Retrying | None = None
        try:
            while True:
                try:
                    if self._was_gone and verb == "create":
                        self._look_for_mark()
                    answer = call()
                    break
                except (StoreError, NoSpaceError) as error:
                    failing = self._repeated(verb, error, failing, started_s)
        finally:
            with self._lock:
                self._failing.pop(threading.get_ident(), None)
        if failing is not None:
            self._on_answer(failing)
        self._patience.answered(answer)
        return answer

    def _look_for_mark(self) -> None:
        if self.mark is not None:
            key, data = self.mark
            if self._store.get(key, len(data)) != data:
                raise StoreGoneError(f"it was gone, and {key} there now is not what it was before", where=self.url)
        self._was_gone = False

    def _repeated(self, verb: str, error: DilocoError, before: Retrying | None, started_s: float) -> Retrying:
        """Wait for the next try of a call that has failed. Raises the error if there is to be none."""
        attempts = 1 if before is None else before.attempts + 1
        pause_s = self._patience.pause_s(attempts, error)
        self._was_gone = self._was_gone or kind_of(error) == "gone"
        tried_s = self._monotonic() - started_s
        own_s = math.inf if self._deadline_s is None else self._deadline_s - tried_s
        if self._stop() or pause_s > min(own_s, self._left_s()):
            raise self._given_up(error, tried_s)
        since_s = clock.wall_s() if before is None else before.since_s
        failing = Retrying(since_s, attempts, verb, str(error), kind_of(error))
        self._wait(failing, pause_s)
        if self._stop():
            raise error
        return failing

    def _given_up(self, error: DilocoError, tried_s: float) -> DilocoError:
        """For a command: how long it tried, and what examines the store."""
        if self._deadline_s is not None and not error.hint:
            error.hint = f"tried for {tried_s:.0f} s; examine the store: diloco doctor {self.url}"
        return error

    def _wait(self, failing: Retrying, pause: float) -> None:
        with self._lock:
            self._failing[threading.get_ident()] = failing
            self.pauses += 1
        while pause > 0 and not self._stop():
            self._on_retry(failing)
            turn_s = min(pause, self._tell_every_s)
            self._sleep(turn_s)
            pause -= turn_s


def failing_text(failing: Retrying) -> str:
    """`create fails for 12 s: disk full`."""
    reason = failing.last_error
    if len(reason) > MAX_REASON:
        reason = f"{reason[: MAX_REASON - 3]}..."
    return f"{failing.verb} fails for {clock.wall_s() - failing.since_s:.0f} s: {reason}"


def retrying_text(store: RetryingStore) -> str:
    """The call that fails now, as text, or an empty text: for heartbeats and status."""
    failing = store.retrying
    return "" if failing is None else failing_text(failing)


class RetryNews:
    """`failing` and `answered` are the two hooks of a RetryingStore. A failure that ends within `QUIET_S` is not
    reported; a longer one gets a line then, one a minute while it lasts (sooner if the reason changes), and one when
    the store answers again.

    `heartbeat`, once it is set, writes the unit's heartbeat, because the thread that usually writes it may be the one
    that waits. It is called at most every three seconds and must not wait for long itself. `make_room`, once it is set,
    is called before each pause of a write that finds no room; one at a time.
    """

    def __init__(self, say: Callable[[str], None], monotonic: Callable[[], float] = clock.monotonic_s) -> None:
        self.heartbeat: Callable[[], None] | None = None
        self.make_room: Callable[[], None] | None = None
        self._making_room = threading.Lock()
        self._say, self._monotonic = say, monotonic
        self._lock = threading.Lock()
        self._said: tuple[str, float] | None = None
        self._next_heartbeat_s = 0.0

    def failing(self, retrying: Retrying) -> None:
        """A call has failed and will be repeated."""
        self.told(retrying)
        if retrying.kind == "full" and self.make_room is not None and self._making_room.acquire(blocking=False):
            try:
                self.make_room()
            finally:
                self._making_room.release()

    def told(self, retrying: Retrying) -> None:
        """The same of a call for which no room is made."""
        if clock.wall_s() - retrying.since_s >= QUIET_S:
            self._tell(retrying)
        if self.heartbeat is not None and self._is_heartbeat_due():
            self.heartbeat()

    def answered(self, retrying: Retrying) -> None:
        """A call that failed has its answer."""
        with self._lock:
            said, self._said = self._said, None
        if said is not None:
            self._say(f"store: answers again, after {clock.wall_s() - retrying.since_s:.0f} s")

    def _tell(self, retrying: Retrying) -> None:
        now_s = self._monotonic()
        with self._lock:
            if self._said is not None:
                reason, said_s = self._said
                if now_s < said_s + (LINE_EVERY_S if retrying.last_error == reason else NEW_REASON_EVERY_S):
                    return
            self._said = (retrying.last_error, now_s)
        self._say(f"store: {failing_text(retrying)}")

    def _is_heartbeat_due(self) -> bool:
        now_s = self._monotonic()
        with self._lock:
            if now_s < self._next_heartbeat_s:
                return False
            self._next_heartbeat_s = now_s + HEARTBEAT_EVERY_S
        return True


def background_store(
    store: Store, wait: Callable[[float], object], stop: Callable[[], bool], tell: Callable[[str], None]
) -> tuple[RetryingStore, RetryNews]:
    """For a daemon: a failing call is repeated until `stop` holds, and `tell` gets a line of it now and then. `wait`
    sleeps, and ends early when the process is to stop."""
    news = RetryNews(tell)
    return store_beside(store, wait, stop, news, news.failing), news


def store_beside(
    store: Store,
    wait: Callable[[float], object],
    stop: Callable[[], bool],
    news: RetryNews,
    on_retry: Callable[[Retrying], None] | None = None,
    deadline_s: float | None = None,
) -> RetryingStore:
    """For other threads of a daemon: its writes wait for the room that the daemon makes, and make none."""
    return RetryingStore(
        store,
        deadline_s,
        sleep=wait,
        stop=stop,
        on_retry=on_retry or news.told,
        on_answer=news.answered,
        tell_every_s=HEARTBEAT_EVERY_S,
        gone_s=gone_after_s(),
    )
