"""Operations on a real store, stop signals, what merges cost, commits read ahead."""

from __future__ import annotations

import os
import signal
from threading import Barrier, Event, Lock, Thread
from typing import Any

import pytest

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.errors import DilocoError, NoSpaceError, TerminatedError
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.operations import (
    Create,
    Delete,
    Get,
    Mend,
    Now,
    Operation,
    Sleep,
    Steps,
    Together,
    Undeleted,
    together,
)
from diloco_cli.runtime import daemon
from diloco_cli.runtime.daemon import (
    LARGE_BYTES,
    Connections,
    Lanes,
    Spending,
    StopSignal,
    SystemClock,
    commits_ahead,
    perform,
    say,
)
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import StoreForbiddenError, StoreUnavailableError
from diloco_cli.store.retry import RetryingStore
from diloco_cli.store.transfers import uploads_at_once
from diloco_cli.store.wrappers import MeteredStore


def test_a_patient_stop_lets_things_finish_and_then_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ToldClock()
    monkeypatch.setattr(daemon, "monotonic_s", clock.now_s)
    monkeypatch.setattr(daemon, "sleep_s", clock.sleep_s)
    stop, impatient = StopSignal(patience_s=0.2), StopSignal()
    assert not stop.is_due() and not impatient.is_due()
    stop.ask()
    impatient.ask()
    assert stop.is_set() and not stop.is_due() and impatient.is_due()
    stop.check()
    stop.wait(60)
    assert clock.now_s() == 0.2, "it sleeps as usual while there is patience, and no longer"
    with pytest.raises(TerminatedError):
        stop.check()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_only_ask_and_the_exit_status_says_which_it_was(number: signal.Signals, status: int) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    stop = StopSignal()
    try:
        stop.hear_signals()
        os.kill(os.getpid(), number)
        stop.wait(5)
        assert stop.is_set() and stop.error().exit_status == status
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_log_that_cannot_be_written_loses_the_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb") as full:
        monkeypatch.setattr("diloco_cli.runtime.daemon.STDOUT", full.fileno())
        say("commit 3")


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


def test_saved_moments_leave_the_link_to_offers_unless_the_process_is_about_to_leave(lanes: Lanes) -> None:
    found = dict[str, int]()

    def upload(name: str, done: Event) -> Steps[None]:
        found[name] = uploads_at_once(1)
        done.set()
        yield Now()

    for name, lane, hurries in (("offer", "upload", False), ("saved", "moments", False), ("last", "moments", True)):
        lanes.hurries, done = (lambda hurries=hurries: hurries), Event()  # type: ignore[misc]
        lanes.start(lane, upload(name, done))  # type: ignore[arg-type]
        assert done.wait(WITHIN_S)
    assert found["saved"] == 1 and found["last"] == found["offer"] > 1


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


@pytest.mark.parametrize("once", [True, False])
def test_what_another_process_has_put_there_meanwhile_was_not_put_back(once: bool) -> None:
    def mending(data: bytes) -> Steps[Undeleted | None]:
        said: Undeleted | None = yield Mend("k", data, damaged=False)
        return said

    store, clock = MemoryStore(), SystemClock(monotonic_s, sleep_s, lambda: None)
    answers = [perform(mending(data), store, clock, tries_once=store if once else None) for data in (b"1", b"1", b"2")]
    assert answers == [None, None, Undeleted.FAILED] and store.get("k") == b"1"


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


COMMITS = 400


def log(commits: int = COMMITS) -> MemoryStore:
    store = MemoryStore()
    for n in range(commits):
        store.create(commit_key(n), str(n).encode())
    return store


class EightAtOnce(Rendezvous):
    """Or no commit is answered, but for the first ones: portions grow."""

    def __init__(self) -> None:
        super().__init__(8)

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        return super().get(key) if key >= commit_key(15) else key.encode()


def test_many_reads_are_under_way_and_none_beyond_the_last() -> None:
    meter = MeteredStore(EightAtOnce())
    assert list(commits_ahead(meter, last=COMMITS - 2)) == [commit_key(n).encode() for n in range(COMMITS - 1)]
    assert meter.counts.requests["get"] == COMMITS - 1


def test_a_reader_that_waits_for_the_next_commit_asks_for_it_alone_and_once_more() -> None:
    store = log()
    meter = MeteredStore(store)
    assert list(commits_ahead(meter, COMMITS)) == [] and meter.counts.requests["get"] == 2
    reading = commits_ahead(meter, COMMITS - 2)
    assert [next(reading), next(reading)] == [b"398", b"399"]
    for n in (COMMITS, COMMITS + 1):  # the first was looked for with commit 399, and was not there
        store.create(commit_key(n), b"new")
    assert list(reading) == [b"new", b"new"]


def test_an_error_of_a_read_is_the_readers() -> None:
    class NinthFails(MemoryStore):
        def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
            if key == commit_key(9):
                raise StoreUnavailableError("503")
            return b"{}"

    read = []
    with pytest.raises(StoreUnavailableError):
        for data in commits_ahead(NinthFails()):
            read.append(data)
    assert read == [b"{}"] * 9
