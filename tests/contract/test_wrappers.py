"""Retries, meters and links: what each adds to the store below, on a virtual clock."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from diloco_cli.errors import NoSpaceError
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import (
    Created,
    Exists,
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
)
from diloco_cli.store.retry import MAX_PAUSE_S, SHORTEST_PAUSE_S, Retrying, RetryingStore, pause_s
from diloco_cli.store.wan import EmulatedLink
from diloco_cli.store.wrapper import MeteredStore


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


def test_pauses_are_spread_by_jitter_between_the_named_bounds() -> None:
    error = StoreUnavailableError("busy")
    for attempt in (1, 5, 1000):
        assert pause_s(attempt, error, 0.0) == SHORTEST_PAUSE_S
        assert SHORTEST_PAUSE_S < pause_s(attempt, error, 0.99) <= MAX_PAUSE_S


def test_a_forbidden_call_is_repeated_slowly() -> None:
    assert pause_s(1, StoreForbiddenError("no"), 0.0) == MAX_PAUSE_S / 2


def test_what_retrying_cannot_help_is_raised_at_once(time: VirtualClock) -> None:
    with pytest.raises(StoreBrokenError):
        retrying(FailingStore(StoreBrokenError("no bucket")), time).get("k")
    assert time.pauses == []


def test_a_full_disk_is_waited_for_in_the_background_and_raised_in_the_foreground(time: VirtualClock) -> None:
    assert retrying(FailingStore(NoSpaceError("full"), NoSpaceError("full")), time).get("k") is None
    assert len(time.pauses) == 2
    with pytest.raises(NoSpaceError):
        retrying(FailingStore(NoSpaceError("full")), time, deadline_s=30).get("k")


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
    metered = MeteredStore(wrapped)
    assert metered.retrying is None
    wrapped.get("k")
    assert [(r.attempts, r.verb, r.last_error) for r in seen if r] == [
        (1, "get", "first"),
        (2, "get", "second"),
    ]
    assert seen[0] is not None
    assert seen[1] is not None
    assert seen[0].since_s == seen[1].since_s
    assert told == seen
    assert metered.retrying is None


def test_a_waiting_call_ends_when_it_is_told_to_stop() -> None:
    stop = threading.Event()
    store = FailingStore(StoreForbiddenError("no"), always=True)
    wrapped = RetryingStore(store, sleep=stop.wait, stop=stop.is_set, on_retry=lambda retrying: stop.set())
    with pytest.raises(StoreForbiddenError):
        wrapped.get("k")


def test_the_meter_counts_requests_and_bytes_by_verb() -> None:
    store = MeteredStore(FailingStore(StoreUnavailableError("busy")))
    with pytest.raises(StoreUnavailableError):
        store.get("k")
    assert store.create("k", b"12345") == Created()
    assert store.create("k", b"123") == Exists(b"12345")
    store.get("k")
    store.get("none")
    store.get_range("k", 1, 3)
    store.put("h", b"1")
    store.list("")
    store.stat("k")
    store.delete("k")
    counts = store.counts
    assert counts.requests == {
        "create": 2,
        "get": 3,
        "get_range": 1,
        "put": 1,
        "list": 1,
        "stat": 1,
        "delete": 1,
    }
    assert (counts.num_requests, counts.errors, counts.up_bytes, counts.down_bytes) == (10, 1, 9, 12)


def test_the_meter_loses_no_count_among_threads() -> None:
    store = MeteredStore(MemoryStore())
    in_threads(8, lambda: [store.put("k", b"12") for _ in range(500)])
    assert (store.counts.num_requests, store.counts.up_bytes) == (4000, 8000)


def test_a_link_takes_a_round_trip_and_the_time_of_the_bytes(time: VirtualClock) -> None:
    store = EmulatedLink(MemoryStore(), 8e6, 80e6, 0.1, time.sleep, time.monotonic)
    store.create("k", b"x" * 2_000_000)
    assert time.now_s - 100 == pytest.approx(2.1)
    store.get("k")
    assert time.now_s - 100 == pytest.approx(2.1 + 0.3)
    store.get_range("k", 0, 1_000_000)
    assert time.now_s - 100 == pytest.approx(2.4 + 0.2)
    store.stat("k")
    assert time.now_s - 100 == pytest.approx(2.6 + 0.1)


def test_threads_share_a_links_bandwidth_and_a_small_record_overtakes_a_payload() -> None:
    from time import monotonic

    store = EmulatedLink(MemoryStore(), 80e6, None, 0.0)
    started, ended = monotonic(), {}

    def upload(key: str, num_bytes: int) -> Callable[[], None]:
        def run() -> None:
            store.create(key, b"x" * num_bytes)
            ended[key] = monotonic() - started

        return run

    threads = [threading.Thread(target=upload(key, 2_500_000)) for key in ("a", "b")]
    threads.append(threading.Thread(target=upload("record", 1000)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(ended["a"], ended["b"]) >= 0.49  # 5 MB at 10 MB/s
    assert ended["record"] < min(ended["a"], ended["b"])


def test_a_link_without_limits_costs_no_time(time: VirtualClock) -> None:
    store = EmulatedLink(MemoryStore(), None, None, 0.0, time.sleep, time.monotonic)
    store.create("k", b"x" * 1000)
    assert time.pauses == []


def in_threads(num_threads: int, work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
