"""The threads beside the training: in order, one job after the other, and what ends one ends the learner."""

from __future__ import annotations

from threading import Barrier, Event, Lock, Thread

import pytest

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.errors import DilocoError, NoSpaceError, TerminatedError
from diloco_cli.protocol.log.operations import Create, Delete, Get, Now, Steps, Together, Undeleted
from diloco_cli.protocol.log.together import together
from diloco_cli.runtime.driver import Connections, Lanes, SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import StoreForbiddenError, StoreUnavailableError

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


class Rendezvous(MemoryStore):
    """A call is answered once as many others wait as it takes."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.barrier = Barrier(calls)

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        self.barrier.wait(WITHIN_S)
        if key == "b":
            raise StoreUnavailableError("503")
        return key.encode()


CLOCK = SystemClock(monotonic_s, sleep_s, lambda: None)


def get(key: str) -> Steps[bytes | None]:
    return (yield Get(key, 10))  # type: ignore[no-any-return]


def test_operations_that_go_together_are_on_their_way_at_the_same_time() -> None:
    assert perform(together([get("a"), get("c"), get("d")]), Rendezvous(3), CLOCK) == [b"a", b"c", b"d"]


def test_one_that_fails_does_not_keep_the_others_from_their_answers() -> None:
    def all_three() -> Steps[list[object]]:
        return (yield Together((Get("a", 10), Get("b", 10), Get("c", 10))))  # type: ignore[no-any-return]

    first, failed, last = perform(all_three(), Rendezvous(3), CLOCK)
    assert (first, last) == (b"a", b"c") and isinstance(failed, StoreUnavailableError)


def test_no_more_calls_than_connections_are_on_their_way() -> None:
    most, now, lock = [0], [0], Lock()

    def call() -> int:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        sleep_s(0.002)
        with lock:
            now[0] -= 1
        return now[0]

    assert len(Connections(3).answers([call] * 30)) == 30 and most[0] <= 3


def test_calls_that_hang_keep_only_those_of_their_own_connections_waiting() -> None:
    """As those to a region that does not answer, beside those to the home bucket."""
    hang, region = Event(), Connections(4)
    waiting = Thread(target=region.answers, args=([lambda: hang.wait(WITHIN_S)] * 8,))
    waiting.start()
    assert perform(together([get("a"), get("c")]), Rendezvous(2), CLOCK) == [b"a", b"c"]
    assert waiting.is_alive()
    hang.set()
    waiting.join(WITHIN_S)


def test_a_stop_ends_the_wait_for_calls_and_makes_none_that_has_not_begun() -> None:
    hang, begun = Event(), list[int]()

    def call() -> None:
        begun.append(1)
        hang.wait(WITHIN_S)

    def check() -> None:
        raise TerminatedError("SIGTERM")

    narrow = Connections(2)
    with pytest.raises(TerminatedError):
        narrow.answers([call] * 6, check)
    hang.set()
    assert narrow.answers([lambda: "after them"] * 2) == ["after them"] * 2 and len(begun) == 2


def test_whatever_ends_a_call_is_its_answer_and_its_connection_goes_on() -> None:
    def leaves() -> None:
        raise SystemExit(3)

    narrow = Connections(1)
    assert isinstance(narrow.answers([leaves, leaves])[1], SystemExit)
    assert narrow.answers([lambda: 1]) == [1]


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (StoreForbiddenError("403"), Undeleted.REFUSED),
        (StoreUnavailableError("503"), Undeleted.FAILED),
        (NoSpaceError("507"), Undeleted.FAILED),
        (None, None),
    ],
)
def test_a_deletion_that_is_tried_once_says_how_it_went(error: DilocoError | None, answer: Undeleted | None) -> None:
    class Undeletable(MemoryStore):
        def delete(self, key: str) -> None:
            if error is not None:
                raise error

    def deleting() -> Steps[Undeleted | None]:
        said: Undeleted | None = yield Delete("k")
        return said

    clock = SystemClock(monotonic_s, sleep_s, lambda: None)
    assert perform(deleting(), MemoryStore(), clock, tries_once=Undeletable()) is answer
