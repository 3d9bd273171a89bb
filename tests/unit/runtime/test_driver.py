"""The threads beside the training: in order, one job after the other, and what ends one ends the learner."""

from __future__ import annotations

from threading import Event

import pytest

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.protocol.log.operations import Create, Get, Now, Steps
from diloco_cli.runtime.driver import Lanes, SystemClock
from diloco_cli.store.memory import MemoryStore

WITHIN_S = 10.0


@pytest.fixture
def lanes() -> Lanes:
    return Lanes(MemoryStore(), SystemClock(monotonic_s, sleep_s, lambda: None))


def note(done: list[str], name: str, before: Event | None = None, after: Event | None = None) -> Steps[None]:
    yield Now()
    if before is not None:
        assert before.wait(WITHIN_S)
    done.append(name)
    if after is not None:
        after.set()


def test_the_jobs_of_a_lane_are_done_in_their_order_and_lanes_beside_each_other(lanes: Lanes) -> None:
    done, go, other = list[str](), Event(), Event()
    for name in ("a", "b", "c"):
        lanes.start("upload", note(done, name, before=go))
    lanes.start("moments", note(done, "beside", after=other))
    assert other.wait(WITHIN_S) and done == ["beside"]
    go.set()
    lanes.close(WITHIN_S)
    assert done == ["beside", "a", "b", "c"], "each lane finishes what it has"


def test_operations_are_performed_on_the_store(lanes: Lanes) -> None:
    found: list[bytes | None] = []

    def write_and_read() -> Steps[None]:
        yield Create("key", b"data")
        found.append((yield Get("key", 100)))

    lanes.start("upload", write_and_read())
    lanes.close(WITHIN_S)
    lanes.check()
    assert found == [b"data"]


def test_what_ends_a_lane_is_raised_by_the_training_which_it_wakes(lanes: Lanes) -> None:
    def fails() -> Steps[None]:
        yield Now()
        raise RuntimeError("no space")

    lanes.check()
    lanes.start("upload", fails())
    started_s = monotonic_s()
    lanes.sleep_s(WITHIN_S)
    assert monotonic_s() - started_s < WITHIN_S / 2, "the training slept on"
    with pytest.raises(RuntimeError, match="no space"):
        lanes.check()
    assert isinstance(lanes.failure, RuntimeError)


def test_news_that_came_before_the_sleep_end_it_and_are_forgotten_then(lanes: Lanes) -> None:
    lanes.news.set()
    started_s = monotonic_s()
    lanes.sleep_s(WITHIN_S)
    assert monotonic_s() - started_s < WITHIN_S / 2 and not lanes.news.is_set()
