"""Meters, links, paces and deadlines: what each adds to the store below, on a virtual clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import NoSpaceError
from diloco_cli.protocol.log.operations import Get, Steps, Together
from diloco_cli.runtime.daemon import Connections, SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import (
    Created,
    Exists,
    StoreBrokenError,
    StoreForbiddenError,
    StoreThrottledError,
    StoreUnavailableError,
)
from diloco_cli.store.retry import MAX_PAUSE_S, SHORTEST_PAUSE_S, Retrying, RetryingStore, pause_s
from diloco_cli.store.wrappers import (
    CUT,
    FORGET_S,
    RISE_A_S,
    SLOWEST,
    CallPace,
    Deadline,
    EmulatedLink,
    MeteredStore,
    ThrottledStore,
    TimeBoxedStore,
    call_within,
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


def cut(calls: int = 40) -> CallPace:
    """A pace that was refused at second 1, after so many calls within it."""
    pace = CallPace()
    assert all(pace.wait_s(number / calls) == 0.0 for number in range(calls)), "no limit without a refusal"
    pace.refused(1.0)
    return pace


def test_a_refusal_cuts_the_pace_to_a_share_of_what_went_out() -> None:
    pace = cut(40)
    assert pace.limit == pytest.approx(CUT * 40)
    assert [pace.wait_s(1.0) for _ in range(3)] == pytest.approx([number / pace.limit for number in range(3)])


def test_refusals_of_calls_that_were_on_their_way_count_once() -> None:
    pace = cut()
    before = pace.limit
    for number in range(5):
        pace.refused(1.1 + number / 10)
    assert pace.limit == before
    pace.refused(2.5)
    assert before is not None and pace.limit is not None and SLOWEST <= pace.limit < before


def test_it_rises_by_the_second_in_which_it_is_used_and_not_in_idle_time() -> None:
    pace = cut()
    before = pace.limit
    assert before is not None
    for _ in range(round(before)):
        pace.went_well()
    assert pace.limit == pytest.approx(before + RISE_A_S, rel=0.02)
    pace.wait_s(200.0)
    assert pace.limit == pytest.approx(before + RISE_A_S, rel=0.02)
    pace.wait_s(2 + FORGET_S)
    assert pace.limit is None


def test_it_waits_as_long_as_the_store_asks() -> None:
    pace = cut()
    pace.refused(1.1, retry_after_s=7.0)
    assert pace.wait_s(1.1) == pytest.approx(7.0)


def test_a_limit_is_told_of_only_while_calls_wait_for_it() -> None:
    pace = cut(2)
    assert pace.limit == SLOWEST and not pace.is_felt(1.0), "no call has waited yet"
    assert [pace.wait_s(5.0), pace.wait_s(5.0)] == [0.0, 0.5] and pace.waits == 1
    assert not pace.is_felt(5.5), "half a second is little"
    assert [pace.wait_s(10.0) for _ in range(7)][-1] == 3.0
    assert pace.is_felt(10.0) and pace.is_felt(20.0)
    for second in range(20, 90):
        assert pace.wait_s(second) == 0.0, "fewer calls than the limit allows"
    assert pace.limit is not None and not pace.is_felt(90.0)


class Throttling(MemoryStore):
    """Takes `most` calls in each turn of its clock's second, as one that refuses the rest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.now_s, self.taken, self.refused = most, 0.0, dict[int, int](), 0
        self.gate = threading.Lock()

    def sleep_s(self, seconds: float) -> None:
        """Time passes only where somebody waits."""
        with self.gate:
            self.now_s += seconds

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        with self.gate:
            second = int(self.now_s)
            if self.taken.get(second, 0) >= self.most:
                self.refused += 1
                raise StoreThrottledError("429")
            self.taken[second] = self.taken.get(second, 0) + 1
        return super().get(key, max_bytes)


@pytest.mark.parametrize("connections", [1, 8, 48])
def test_the_driver_gets_every_answer_with_any_number_of_connections(connections: int) -> None:
    """Of 50 calls a second, 600 calls in sets of 48; more connections have no more refusals than a few a cut."""
    store = Throttling(50)
    throttled = ThrottledStore(store, store.sleep_s, lambda: store.now_s)
    meter = MeteredStore(throttled)
    patient = RetryingStore(meter, sleep=store.sleep_s, monotonic=lambda: store.now_s, jitter=lambda: 0.5)

    def steps() -> Steps[list[list[bytes | None]]]:
        found = []
        for _ in range(12):
            found.append((yield Together(tuple(Get(f"k{i}", 9) for i in range(48)))))
        return found

    clock = SystemClock(lambda: store.now_s, store.sleep_s, lambda: None)
    answers = perform(steps(), patient, clock, own=Connections(connections))
    assert answers == [[None] * 48] * 12 and throttled.calls_a_s > 0
    assert store.refused < 0.2 * meter.counts.num_requests


class HangingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        self.released.wait(20)
        return super().get(key, max_bytes)


@pytest.fixture
def hanging() -> Iterator[HangingStore]:
    store = HangingStore()
    yield store
    store.released.set()


def test_within_its_time_it_is_the_store_itself() -> None:
    store = TimeBoxedStore(MemoryStore(), Deadline(10))
    assert store.create("k", b"12345") == Created() and store.create("k", b"x") == Exists(b"12345")
    assert (store.get("k"), store.get_range("k", 1, 3), store.list("")) == (b"12345", b"23", ["k"])
    store.put("h", b"1")
    store.delete("k")
    assert store.stat("k") is None and store.stat("h") is not None


def test_errors_come_through_as_they_are() -> None:
    def refuse() -> None:
        raise StoreBrokenError("no such bucket")

    with pytest.raises(StoreBrokenError, match="no such bucket"):
        call_within(Deadline(10), refuse, "here")


def test_a_call_that_hangs_is_left_behind_and_the_next_is_not_begun(hanging: HangingStore) -> None:
    box = Deadline(0.2)
    store, started_s = TimeBoxedStore(hanging, box), monotonic_s()
    with pytest.raises(StoreUnavailableError, match="no answer within 200 ms") as raised:
        store.get("a/key")
    assert 0.2 <= monotonic_s() - started_s < 5
    assert raised.value.where == "memory://anonymous/a/key" and "diloco doctor" in (raised.value.hint or "")
    with pytest.raises(StoreUnavailableError):
        store.create("k", b"x")
    assert hanging.list("") == []
    hanging.released.set()
    for thread in calls_left_behind():
        thread.join(20)
    box.restart(10)
    assert store.get("a/key") is None


def test_a_store_that_hangs_is_looked_at_by_one_thread_however_often_somebody_looks(hanging: HangingStore) -> None:
    before = len(calls_left_behind())
    box = Deadline(0.2)
    store = RetryingStore(TimeBoxedStore(hanging, box), 30.0, left_s=box.left_s)
    words, took_s = set(), []
    for _ in range(5):
        started_s = monotonic_s()
        box.restart(0.2 if not words else 60.0)
        box.seconds = 0.2
        with pytest.raises(StoreUnavailableError) as raised:
            store.get("a/key")
        words.add(str(raised.value))
        took_s.append(monotonic_s() - started_s)
    assert len(words) == 1 and max(took_s[1:]) < 5
    assert len(calls_left_behind()) == before + 1


def test_the_last_few_things_are_tried_beside_a_call_that_hangs(hanging: HangingStore) -> None:
    box = Deadline(0.2)
    store = TimeBoxedStore(hanging, box, keeps_trying=True)
    with pytest.raises(StoreUnavailableError):
        store.get("a/key")
    box.restart(10)
    assert store.create("k", b"x") == Created()


def calls_left_behind() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "store-call"]
