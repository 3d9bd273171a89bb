"""Which errors are repeated, how soon, how often altogether, and who hears of it; on a virtual clock.

What people hear of a failing store: not every hiccup, not every retry, and when it is over.
"""

from __future__ import annotations

import threading

import pytest

from diloco_cli.clock import wall_s
from diloco_cli.errors import DilocoError, NoSpaceError
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import (
    BadKeyError,
    Created,
    Exists,
    StoreBrokenError,
    StoreForbiddenError,
    StoreGoneError,
    StoreUnavailableError,
)
from diloco_cli.store.retry import (
    MAX_PAUSE_S,
    SHORTEST_PAUSE_S,
    Retrying,
    RetryingStore,
    RetryNews,
    is_worth_repeating,
    kind_of,
    pause_s,
    store_beside,
)


class VirtualClock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s


class FailingStore(MemoryStore):
    """Raises the given errors first, one a call."""

    def __init__(self, *errors: Exception, always: bool = False) -> None:
        super().__init__()
        self.errors = list(errors)
        self.always = always

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        if self.errors:
            raise self.errors[0] if self.always else self.errors.pop(0)
        return super().get(key, max_bytes)


@pytest.fixture
def time() -> VirtualClock:
    return VirtualClock()


def retrying(store: MemoryStore, time: VirtualClock, deadline_s: float | None = None) -> RetryingStore:
    return RetryingStore(store, deadline_s, sleep=time.sleep, monotonic=time.monotonic, jitter=lambda: 0.5)


def test_passing_errors_are_repeated_with_growing_bounded_pauses(time: VirtualClock) -> None:
    store = FailingStore(*[StoreUnavailableError("busy")] * 12)
    assert retrying(store, time).get("k") is None
    assert len(time.pauses) == 12
    assert time.pauses == sorted(time.pauses)
    assert SHORTEST_PAUSE_S <= time.pauses[0] < 0.5
    assert time.pauses[-1] <= MAX_PAUSE_S


@pytest.mark.parametrize("error", [StoreUnavailableError("busy"), StoreForbiddenError("no"), NoSpaceError("full")])
def test_a_hint_that_cannot_be_written_does_not_hold_up_the_work(time: VirtualClock, error: Exception) -> None:
    class NoHints(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            raise error

    retrying(NoHints(), time).put("heartbeat/iowa.json", b"{}")
    assert time.pauses == []


def test_a_deadline_ends_with_the_last_error_and_is_not_overstepped(time: VirtualClock) -> None:
    store = FailingStore(StoreUnavailableError("busy"), always=True)
    with pytest.raises(StoreUnavailableError, match="busy"):
        retrying(store, time, deadline_s=30).get("k")
    assert 100 + 10 < time.now_s <= 100 + 30


def test_without_a_deadline_it_outlives_an_outage_of_hours(time: VirtualClock) -> None:
    store = FailingStore(StoreUnavailableError("down"), always=True)

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if time.now_s > 8 * 3600:
            store.errors.clear()

    assert RetryingStore(store, sleep=sleep, monotonic=time.monotonic).get("k") is None
    assert time.now_s > 8 * 3600


def test_it_tells_since_when_and_why_it_is_retrying_and_forgets_it_after_success() -> None:
    store = FailingStore(StoreUnavailableError("first"), StoreUnavailableError("second"))
    seen: list[Retrying | None] = []
    told: list[Retrying] = []

    def sleep(seconds: float) -> None:
        seen.append(wrapped.retrying)

    wrapped = RetryingStore(store, sleep=sleep, on_retry=told.append)
    wrapped.get("k")
    assert [(r.attempts, r.verb, r.last_error) for r in seen if r] == [
        (1, "get", "first"),
        (2, "get", "second"),
    ]
    assert seen[0] is not None
    assert seen[1] is not None
    assert seen[0].since_s == seen[1].since_s
    assert told == seen
    assert wrapped.retrying is None


def test_a_waiting_call_ends_when_it_is_told_to_stop() -> None:
    stop = threading.Event()
    store = FailingStore(StoreForbiddenError("no"), always=True)
    wrapped = RetryingStore(store, sleep=stop.wait, stop=stop.is_set, on_retry=lambda retrying: stop.set())
    with pytest.raises(StoreForbiddenError):
        wrapped.get("k")


@pytest.mark.parametrize(
    ("error", "kind", "in_background", "in_command", "first_pause_s"),
    [
        (StoreUnavailableError("503"), "passing", True, True, (0.2, 0.4)),
        (StoreForbiddenError("403"), "refused", True, False, (10.0, 20.0)),
        (NoSpaceError("full"), "full", True, False, (2.0, 4.0)),
        (StoreGoneError("no such bucket"), "gone", True, False, (2.0, 4.0)),
        (StoreBrokenError("no hard links"), "lasting", False, False, None),
        (BadKeyError("not a key"), "lasting", False, False, None),
    ],
)
def test_every_kind_of_error_has_its_own_cure(
    error: DilocoError, kind: str, in_background: bool, in_command: bool, first_pause_s: tuple[float, float] | None
) -> None:
    assert kind_of(error) == kind
    assert is_worth_repeating(error, in_background=True) == in_background
    assert is_worth_repeating(error, in_background=False) == in_command
    if first_pause_s is not None:
        assert (pause_s(1, error, 0.0), pause_s(1, error, 1.0)) == pytest.approx(first_pause_s)


def test_all_calls_together_end_with_the_time_that_is_left() -> None:
    time, store = VirtualClock(), FailingStore(StoreUnavailableError("503"), always=True)
    retrying = RetryingStore(
        store, 60.0, left_s=lambda: 105.0 - time.now_s, sleep=time.sleep, monotonic=time.monotonic, jitter=lambda: 0.5
    )
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            retrying.get("k")
    assert 102.0 < time.now_s <= 105.0


def test_long_pauses_are_told_of_all_the_while_and_the_answer_is_too() -> None:
    time, heard, answered = VirtualClock(), list[tuple[float, int]](), list[Retrying]()
    retrying = RetryingStore(
        FailingStore(StoreForbiddenError("403")), sleep=time.sleep, monotonic=time.monotonic, jitter=lambda: 0.2,
        on_retry=lambda r: heard.append((time.now_s, r.attempts)), on_answer=answered.append, tell_every_s=5.0,
    )  # fmt: skip
    assert retrying.get("k") is None
    assert heard == [(100.0, 1), (105.0, 1), (110.0, 1)]  # a pause of 12 s
    assert time.now_s == 112.0
    assert [r.last_error for r in answered] == ["403"] and retrying.retrying is None


class VanishingStore(MemoryStore):
    """A bucket that may be `gone`; of `finds_nothing` it then only says that there is no such object, as GCS does."""

    gone = finds_nothing = False

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        if self.gone and not self.finds_nothing:
            raise StoreGoneError("no such bucket")
        return None if self.gone else super().get(key, max_bytes)

    def create(self, key: str, data: bytes) -> Created | Exists:
        if self.gone:
            raise StoreGoneError("no such bucket")
        return super().create(key, data)

    def put(self, key: str, data: bytes) -> None:
        if self.gone:
            raise StoreGoneError("no such bucket")
        super().put(key, data)


def vanishing(time: VirtualClock) -> tuple[VanishingStore, RetryingStore]:
    store = VanishingStore()
    return store, RetryingStore(store, sleep=time.sleep, monotonic=time.monotonic, jitter=lambda: 0.5)


def test_a_bucket_that_is_gone_is_an_outage_for_ten_minutes_and_then_an_error() -> None:
    time = VirtualClock()
    store, retrying = vanishing(time)
    retrying.put("k", b"")
    store.gone, began_s = True, time.now_s
    retrying.put("k", b"a hint never waits")
    with pytest.raises(StoreGoneError) as caught:
        retrying.get("k")
    assert 600.0 <= time.now_s - began_s < 610.0 and caught.value.exit_status == 6
    with pytest.raises(StoreGoneError):
        retrying.put("k", b"nor does it hide that the time is up")


def test_a_bucket_that_has_never_answered_has_a_wrong_name_and_is_no_outage() -> None:
    time = VirtualClock()
    store, retrying = vanishing(time)
    store.gone, began_s = True, time.now_s
    with pytest.raises(StoreGoneError):
        retrying.get("k")
    assert time.now_s == began_s


@pytest.mark.parametrize("finds_nothing", [False, True])
def test_a_bucket_that_came_back_has_ten_minutes_again_and_finding_nothing_is_no_return(finds_nothing: bool) -> None:
    time = VirtualClock()
    store, retrying = vanishing(time)
    store.finds_nothing = finds_nothing
    for _ in range(2):
        retrying.put("k", b"it is there")
        store.gone = True
        retrying.put("k", b"")
        time.sleep(590.0)
        if finds_nothing:
            assert retrying.get("k") is None
        retrying.put("k", b"still an outage")
        store.gone = False
    store.gone = True
    retrying.put("k", b"")
    time.sleep(590.0)
    if finds_nothing:
        assert retrying.get("k") is None
    time.sleep(20.0)
    with pytest.raises(StoreGoneError):
        retrying.put("k", b"")


@pytest.mark.parametrize("waits", ["create", "get"])
@pytest.mark.parametrize("another", [b"another's", None])
def test_nothing_is_created_in_what_came_instead_of_a_bucket_that_was_gone(waits: str, another: bytes | None) -> None:
    """Neither by the call that has waited for its return, nor by a later one."""
    time, store = VirtualClock(), VanishingStore()

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        store.gone = False

    retrying = RetryingStore(store, sleep=sleep, monotonic=time.monotonic, jitter=lambda: 0.5)
    retrying.mark = ("mark", b"mine")
    retrying.put("mark", b"mine")
    store.delete("mark")
    retrying.create("before", b"")
    if another is not None:
        store.put("mark", another)
    store.gone = True
    if waits == "get":
        retrying.get("k")
    with pytest.raises(StoreGoneError, match="mark there now is not what it was before"):
        retrying.create("k", b"")
    assert store.get("k") is None
    store.put("mark", b"mine")
    retrying.create("k", b"")
    store.delete("mark")
    retrying.create("later", b"")


class Listener:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now_s = 0.0
        self.news = RetryNews(self.lines.append, lambda: self.now_s)

    def fail(self, lasts_s: float, reason: str = "503") -> None:
        self.news.failing(Retrying(wall_s() - lasts_s, 1, "get", reason))


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_a_hiccup_is_not_talked_about(listener: Listener) -> None:
    listener.fail(0.5)
    listener.news.answered(Retrying(wall_s() - 0.7, 1, "get", "503"))
    assert listener.lines == []


def test_a_failure_is_told_once_then_once_a_minute_then_its_end(listener: Listener) -> None:
    for listener.now_s in (2.0, 5.0, 30.0, 61.0, 62.1, 70.0):
        listener.fail(listener.now_s)
    listener.news.answered(Retrying(wall_s() - 75, 9, "get", "503"))
    assert listener.lines == [
        "store: get fails for 2 s: 503", "store: get fails for 62 s: 503", "store: answers again, after 75 s",
    ]  # fmt: skip


def test_a_new_reason_is_told_sooner(listener: Listener) -> None:
    for listener.now_s, reason in ((2.0, "503"), (5.0, "403"), (12.5, "403"), (13.0, "503")):
        listener.fail(listener.now_s, reason)
    assert [line.rsplit(" ")[-1] for line in listener.lines] == ["503", "403"]


def test_the_heartbeat_goes_on_while_a_call_is_repeated(listener: Listener) -> None:
    heartbeats: list[float] = []
    listener.news.heartbeat = lambda: heartbeats.append(listener.now_s)
    for listener.now_s in (0.0, 1.0, 2.9, 3.0, 4.0, 6.5):
        listener.fail(0.1)
    assert heartbeats == [0.0, 3.0, 6.5]


def beside(store: FailingStore, listener: Listener, deadline_s: float | None = None) -> RetryingStore:
    return store_beside(store, lambda seconds: None, lambda: False, listener.news, deadline_s=deadline_s)


def test_the_syncers_own_call_makes_room_and_that_of_a_thread_beside_it_makes_none(listener: Listener) -> None:
    made: list[bool] = []
    listener.news.make_room = lambda: made.append(True)
    beside(FailingStore(NoSpaceError("full")), listener).get("key")
    assert not made
    listener.news.failing(Retrying(wall_s(), 1, "create", "full", "full"))
    assert made == [True]


def test_a_call_for_room_is_tried_again_when_the_store_hiccups_but_waits_for_no_room(listener: Listener) -> None:
    beside(FailingStore(*[StoreUnavailableError("503")] * 3), listener, deadline_s=30.0).get("key")
    with pytest.raises(NoSpaceError):
        beside(FailingStore(NoSpaceError("full")), listener, deadline_s=30.0).get("key")
