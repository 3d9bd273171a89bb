"""The pace of calls to a store that refuses some of them, by a clock of one's own."""

from __future__ import annotations

import threading

import pytest

from diloco_cli.protocol.log.operations import Get, Steps, Together
from diloco_cli.runtime.daemon import Connections, SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import StoreThrottledError
from diloco_cli.store.retry import RetryingStore
from diloco_cli.store.throttle import CUT, FORGET_S, RISE_A_S, SLOWEST, CallPace, ThrottledStore
from diloco_cli.store.wrapper import MeteredStore


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
