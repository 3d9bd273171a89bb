"""Meters, links, paces and deadlines: what each adds to the store below, on a virtual clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from diloco_cli.clock import monotonic_s, wall_s
from diloco_cli.errors import NoSpaceError
from diloco_cli.paths import read_json, write_json
from diloco_cli.protocol.log.operations import Get, Steps, Together
from diloco_cli.runtime.daemon import Connections, SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import (
    Created,
    Exists,
    StoreThrottledError,
    StoreUnavailableError,
)
from diloco_cli.store.retry import RetryingStore
from diloco_cli.store.wrappers import (
    CUT,
    FORGET_S,
    RISE_A_S,
    SLOWEST,
    CallPace,
    Deadline,
    DisturbedStore,
    EmulatedLink,
    MeteredStore,
    StoreFault,
    ThrottledStore,
    TimeBoxedStore,
    noted_beside,
    read_store_fault,
)
from tests.unit.store.test_retry import FailingStore, VirtualClock


@pytest.fixture
def time() -> VirtualClock:
    return VirtualClock()


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
    started, ended, all_begin = monotonic(), {}, threading.Barrier(3)

    def upload(key: str, num_bytes: int) -> Callable[[], None]:
        def run() -> None:
            all_begin.wait()
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


def disturb(path: Path, kind: str, **more: float) -> None:
    write_json(path, asdict(StoreFault(**{"id": kind, "kind": kind, "began_s": wall_s(), "for_s": 60.0, **more})))  # type: ignore[arg-type]


def test_calls_are_disturbed_as_a_file_says_and_that_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "iowa.json"
    store = DisturbedStore(MemoryStore(), path)
    store.put("k", b"x")
    assert not noted_beside(path).exists()
    disturb(path, "partition")
    with pytest.raises(StoreUnavailableError, match="cut off from the store, on purpose"):
        store.get("k")
    assert read_json(noted_beside(path)) == {"id": "partition"}
    disturb(path, "full")
    assert store.get("k") == b"x"
    for write in (store.create, store.put):
        with pytest.raises(NoSpaceError, match="on purpose"):
            write("n", b"x")
    assert store.list("n") == [] and read_json(noted_beside(path)) == {"id": "full"}
    path.unlink()
    store.create("n", b"x")


def test_a_share_of_the_calls_fails(tmp_path: Path) -> None:
    path, failed = tmp_path / "iowa.json", 0
    store = DisturbedStore(MemoryStore(), path)
    disturb(path, "errors", share=0.5)
    for _ in range(200):
        failed += 1
        with suppress(StoreUnavailableError):
            store.get("k")
            failed -= 1
    assert 60 < failed < 140


def test_a_slow_store_takes_so_many_times_as_long(tmp_path: Path) -> None:
    path, slept = tmp_path / "iowa.json", list[float]()
    link = EmulatedLink(MemoryStore(), None, None, rtt_s=0.02)
    store = DisturbedStore(link, path, slept.append)
    disturb(path, "slow", factor=10.0)
    assert store.get("k") is None and slept[0] >= 9 * 0.02
    disturb(path, "slow", factor=1e6)
    slept.clear()
    store = DisturbedStore(link, path, lambda seconds: (slept.append(seconds), path.unlink(missing_ok=True)))
    assert store.get("k") is None and len(slept) == 1, "what is healed meanwhile ends"


@pytest.mark.parametrize("began_s", [-61.0, 5.0])
def test_a_disturbance_ends_by_itself_also_where_a_clock_is_set_back(tmp_path: Path, began_s: float) -> None:
    path = tmp_path / "iowa.json"
    disturb(path, "partition", began_s=wall_s() + began_s)
    assert read_store_fault(path) is None and DisturbedStore(MemoryStore(), path).get("k") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"id": 1}', "torn"])
def test_a_file_that_says_nothing_disturbs_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "iowa.json"
    path.write_text(text)
    assert DisturbedStore(MemoryStore(), path).get("k") is None
