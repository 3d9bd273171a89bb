"""What a syncer measures of its merges: on a clock of the test, with calls that take as long as they are said to."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.protocol.log.operations import Create, Get, Now, Operation, Put, Sleep, Steps, Together
from diloco_cli.runtime.driver import perform
from diloco_cli.runtime.spending import LARGE_BYTES, Spending
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import StoreUnavailableError
from diloco_cli.store.retry import RetryingStore

CALL_S, BYTES_S, WORK_S = 0.04, 0.3, 0.2
LARGE = bytes(LARGE_BYTES)


class TimedStore(MemoryStore):
    """Calls take time on the clock; those with large objects more of it."""

    def __init__(self, clock: ToldClock) -> None:
        super().__init__()
        self._clock = clock

    def create(self, key: str, data: bytes) -> Any:
        self._clock.at_s += CALL_S + (BYTES_S if len(data) >= LARGE_BYTES else 0.0)
        return super().create(key, data)

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        found = super().get(key, max_bytes)
        self._clock.at_s += CALL_S + (BYTES_S if found and len(found) >= LARGE_BYTES else 0.0)
        return found


class ToldClock:
    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def sleep_s(self, seconds: float) -> None:
        self.at_s += seconds

    def check(self) -> None: ...


def performed(*merges: list[Operation]) -> Spending:
    """A syncer that works for a while between any two operations, and rests after each merge."""
    clock, spending = ToldClock(), Spending()

    def steps() -> Steps[None]:
        for operations in merges:
            for operation in operations:
                yield operation
                clock.at_s += WORK_S
            spending.merged()
            yield Sleep(100.0)
            yield Now()

    perform(steps(), TimedStore(clock), clock, spending=spending)
    return spending


def test_calls_bytes_and_the_processor_are_told_apart() -> None:
    merge: list[Operation] = [Get("offer", 9), Create("state", LARGE), Get("state", LARGE_BYTES), Create("commit", b"")]
    found = performed(merge).facts()
    assert found["call_s"] == pytest.approx(CALL_S)
    between_calls_s = 3 * WORK_S  # what follows the commit is for the next merge
    assert found["bytes_s"] == pytest.approx(2 * BYTES_S) and found["processor_s"] == pytest.approx(between_calls_s)


def test_a_rest_is_neither_and_later_merges_count_by_themselves() -> None:
    small: list[Operation] = [Get("offer", 9), Put("hint", b"x")]
    found = performed(*[small] * 60).facts()
    assert found["bytes_s"] == 0.0 and found["processor_s"] == pytest.approx(2 * WORK_S)


def test_objects_that_go_together_count_by_their_sum() -> None:
    spending = Spending()
    half = LARGE[: LARGE_BYTES // 2]
    spending.called(Get("offer", 9), None, CALL_S)
    spending.called(Together((Get("a", 9), Create("b", half))), [half, None], CALL_S + BYTES_S)
    spending.merged()
    assert spending.facts() == pytest.approx({"call_s": CALL_S, "bytes_s": BYTES_S, "processor_s": 0.0})


def test_calls_that_wait_for_a_connection_are_no_slower_calls() -> None:
    """Five on two connections: three round trips, and with a large object what is beyond them."""
    spending = Spending(connections=2)
    five = tuple(Get(name, 9) for name in "abcde")
    spending.called(Together(five), [None] * 5, 3 * CALL_S)
    spending.called(Together((*five[1:], Create("large", LARGE))), [None] * 5, 3 * CALL_S + BYTES_S)
    spending.merged()
    assert spending.facts() == pytest.approx({"call_s": CALL_S, "bytes_s": BYTES_S, "processor_s": 0.0})


class OutOfOrder(TimedStore):
    """Fails for a while from a second of the clock on."""

    def __init__(self, clock: ToldClock, from_s: float, for_s: float) -> None:
        super().__init__(clock)
        self._from_s, self._until_s = from_s, from_s + for_s

    def _fail(self) -> None:
        if self._from_s <= self._clock.at_s < self._until_s:
            self._clock.at_s += CALL_S
            raise StoreUnavailableError("503")

    def create(self, key: str, data: bytes) -> Any:
        self._fail()
        return super().create(key, data)

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        self._fail()
        return super().get(key, max_bytes)


@pytest.mark.parametrize("large", [False, True])
def test_an_outage_of_ten_minutes_changes_none_of_the_figures(large: bool) -> None:
    """It begins with a small call, or with the one that carries a version."""
    clock = ToldClock()
    begins_s = 20.0 + WORK_S + (CALL_S + WORK_S if large else 0.0)
    store = RetryingStore(
        OutOfOrder(clock, begins_s, 600.0), sleep=clock.sleep_s, jitter=lambda: 0.5, monotonic=clock.now_s
    )
    spending = Spending(lambda: store.pauses)

    def steps() -> Steps[None]:
        for number in range(6):
            yield Sleep(max(0.0, 10.0 * number - clock.at_s))
            for operation in (Get("offer", 9), Create(f"state{number}", LARGE), Create(f"commit{number}", b"")):
                clock.at_s += WORK_S
                yield operation
            spending.merged()
            yield Now()

    perform(steps(), store, clock, spending=spending)
    assert clock.at_s > 620.0
    found = spending.facts()
    assert found["call_s"] == pytest.approx(CALL_S) and found["bytes_s"] == pytest.approx(BYTES_S)
    assert found["processor_s"] == pytest.approx(3 * WORK_S)


def test_one_call_that_hangs_moves_the_mean_little_and_a_store_that_became_slow_all_the_way() -> None:
    spending = Spending()
    for seconds in (CALL_S, CALL_S, 600.0):
        spending.called(Get("offer", 9), None, seconds)
    spending.merged()
    assert spending.facts()["call_s"] < 1.2 * CALL_S
    for _ in range(200):
        spending.called(Get("offer", 9), None, 1.0)
    assert spending.facts()["call_s"] == pytest.approx(1.0, rel=0.01)


def test_nothing_is_said_before_the_first_merge() -> None:
    spending = Spending()
    spending.called(Get("offer", 9), None, CALL_S)
    assert spending.facts() == {}
