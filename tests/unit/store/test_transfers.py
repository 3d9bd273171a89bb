"""Transfers: parallel parts, deadlines by size, checksums, bounds."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

import pytest

from diloco_cli.store import transfers
from diloco_cli.store.port import StoreUnavailableError

DATA = os.urandom(1000)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PROBE_BYTES", 80)
    monkeypatch.setattr(transfers, "PART_BYTES", 100)
    monkeypatch.setattr(transfers, "PARALLEL_PAYS_S", -1.0)
    monkeypatch.setattr(transfers, "pause_s", lambda attempt, error, jitter: 0.0)


class Answers:
    """A first answer that gives `quick` bytes at once and then breaks, or waits until ranges have brought 800, or says
    nothing more, or ends; and ranges of which the first `failing` tries fail."""

    def __init__(
        self, quick: int = 1000, failing: int = 0, breaks: bool = False, waits: bool = False, hangs: bool = False
    ) -> None:
        self.quick, self.failing, self.breaks, self.waits, self.hangs = quick, failing, breaks, waits, hangs
        self.fetched: list[tuple[int, int]] = []
        self.at_once = self.max_at_once = 0

    async def stream(self) -> AsyncIterator[bytes]:
        for start in range(0, self.quick, 30):
            yield DATA[start : min(start + 30, self.quick)]
        if self.breaks:
            raise ConnectionResetError
        if self.hangs:
            await asyncio.Event().wait()
        if self.waits:
            while sum(end - start for start, end in self.fetched) < 800:
                await asyncio.sleep(0)
            yield DATA[self.quick : self.quick + 100]

    async def fetch(self, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """In two pieces; the first one alone where it fails."""
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        middle = (start + end) // 2
        yield b"?" * (middle - start) if self.failing else DATA[start:middle]
        if self.failing:
            self.failing -= 1
            raise StoreUnavailableError("503")
        self.fetched.append((start, end))
        yield DATA[middle:end]

    def read(self, size: int | None = 1000, max_bytes: int | None = None) -> bytes:
        source = transfers.Download(self.stream())
        data = asyncio.run(transfers.read_in_parts(size, source, self.fetch, max_bytes))
        self.checksum = source.crc32c()
        assert self.checksum in (None, transfers.crc32c(data))
        return data


def test_a_fast_answer_is_not_disturbed_by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PARALLEL_PAYS_S", 60.0)
    answers = Answers()
    assert answers.read() == DATA
    assert answers.fetched == [] and answers.checksum is not None, "it was not added up on the way"


def test_a_small_object_and_one_of_unknown_size_come_from_the_answer_alone() -> None:
    for size, expected in ((70, DATA[:70]), (None, DATA)):
        answers = Answers(quick=len(expected))
        assert answers.read(size) == expected
        assert answers.fetched == []


def test_a_slow_answer_is_met_by_ranges_from_the_end() -> None:
    answers = Answers(quick=100, waits=True)
    assert answers.read() == DATA
    assert answers.fetched[0] == (980, 1000)
    assert len(answers.fetched) == len(set(answers.fetched)) >= 8
    assert 1 < answers.max_at_once <= transfers.FEWEST_AT_ONCE
    assert answers.checksum is None, "of a part of the bytes"


@pytest.mark.parametrize("pays_s", [-1.0, 60.0])
def test_ranges_take_the_place_of_an_answer_that_breaks(monkeypatch: pytest.MonkeyPatch, pays_s: float) -> None:
    monkeypatch.setattr(transfers, "PARALLEL_PAYS_S", pays_s)
    answers = Answers(quick=333, breaks=True)
    assert answers.read() == DATA
    assert answers.checksum is None, "of a part of the bytes"


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "CALL_DEADLINE_S", 0.1)
    monkeypatch.setattr(transfers, "SLOWEST_BYTES_PER_S", 1e9)


@pytest.mark.usefixtures("short_deadlines")
@pytest.mark.parametrize(("size", "quick"), [(70, 60), (1000, 60)], ids=["small", "large"])
def test_an_answer_that_hangs_at_its_beginning_ends_when_its_time_is_over(size: int, quick: int) -> None:
    with pytest.raises(StoreUnavailableError, match="took longer than 100 ms"):
        Answers(quick=quick, hangs=True).read(size)


@pytest.mark.usefixtures("short_deadlines")
def test_ranges_take_the_place_of_an_answer_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PARALLEL_PAYS_S", 60.0)
    monkeypatch.setattr(transfers, "SLOWEST_BYTES_PER_S", 1e3)  # so that the whole has more time than a part
    assert Answers(quick=333, hangs=True).read() == DATA


class LargeAnswer:
    """64 MiB in pieces of one, of which the last `missing` never come; what reading it takes, by tracemalloc."""

    size, piece = 64 << 20, 1 << 20

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing

    async def pieces(self) -> AsyncIterator[bytes]:
        for number in range(self.size // self.piece - self.missing):
            yield bytes([number]) * self.piece

    async def no_range(self, start: int, end: int) -> AsyncGenerator[bytes, None]:
        raise RuntimeError("no range can be had")
        yield b""

    async def read(self) -> tuple[bytes, str | None]:
        source = transfers.Download(self.pieces())
        data = await transfers.read_in_parts(self.size, source, self.no_range)
        return data, source.crc32c()


@pytest.fixture
def one_connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of the true size, from the answer alone; and memory is traced."""
    monkeypatch.undo()
    monkeypatch.setattr(transfers, "PARALLEL_PAYS_S", 600.0)
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("one_connection")
def test_a_large_object_needs_its_memory_once() -> None:
    async def peak_bytes() -> int:  # read here: asyncio.run itself writes a repr of what it returns
        data, checksum = await LargeAnswer().read()
        peak = tracemalloc.get_traced_memory()[1]
        assert len(data) == LargeAnswer.size and checksum == transfers.crc32c(data)
        return peak

    assert asyncio.run(peak_bytes()) < LargeAnswer.size + 8 * LargeAnswer.piece


@pytest.mark.usefixtures("one_connection")
def test_downloads_that_failed_hold_no_memory_while_their_errors_live() -> None:
    errors = []
    for _ in range(3):
        with pytest.raises(RuntimeError) as failed:
            asyncio.run(LargeAnswer(missing=10).read())
        errors.append(failed.value)
    assert tracemalloc.get_traced_memory()[0] < 8 * LargeAnswer.piece


class SlowLink:
    """Carries a piece after the other for all who wait, each byte for so many seconds by the clock of its loop."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.turn = asyncio.Lock()
        self.carried = 0

    async def carry(self, start: int, end: int) -> AsyncGenerator[bytes, None]:
        for first in range(start, end, 10):
            piece = DATA[first : min(first + 10, end)]
            async with self.turn:  # in the order of asking: everybody gets an equal share
                await asyncio.sleep(len(piece) / self.bytes_per_s)
            self.carried += len(piece)
            yield piece


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer instead of waiting for it."""

    jumped_s = 0.0

    def time(self) -> float:
        return self.jumped_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.jumped_s = max(self.jumped_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def test_parts_that_share_a_link_slower_than_each_alone_would_need_all_arrive_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "CALL_DEADLINE_S", 1.0)
    monkeypatch.setattr(transfers, "SLOWEST_BYTES_PER_S", 50.0)
    link = SlowLink(bytes_per_s=60.0)

    async def read() -> bytes:
        return await transfers.read_in_parts(1000, transfers.Download(link.carry(0, 1000)), link.carry)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(read()) == DATA
    assert link.carried <= len(DATA) + 100, "no part came twice"


@pytest.mark.parametrize("size", [0, 1, 100 * transfers.MOST_PARTS, 100 * transfers.MOST_PARTS + 1, 5 << 40])
def test_no_object_has_more_parts_than_s3_takes(size: int) -> None:
    """5 TiB: the longest object there. With parts of one length, moments of 21 billion parameters had too many."""
    cuts = transfers.spans(0, size)
    assert len(cuts) <= transfers.MOST_PARTS
    assert [start for start, _ in cuts] == [0, *[end for _, end in cuts[:-1]]][: len(cuts)]
    assert (cuts[-1][1] if cuts else 0) == size


@pytest.mark.parametrize("bound", [0, 500, 510, 999])
def test_an_answer_without_a_size_is_left_when_it_passes_the_bound(bound: int) -> None:
    answers = Answers(hangs=True)
    assert answers.read(None, max_bytes=bound) == DATA[: bound + 1], "one byte more than the bound"


def test_a_range_that_is_answered_with_too_much_spoils_nothing() -> None:
    """A proxy may answer with the whole object; ranges behind this one have come already."""

    async def whole(start: int, end: int) -> AsyncGenerator[bytes, None]:
        yield DATA[:30]
        yield DATA[30:]

    async def read() -> tuple[bytes, bytes]:
        download = transfers.Download(aiter(whole(0, 0)))
        download.make_room(1000)
        await download.place_all(100, 1000, Answers().fetch(100, 1000))
        before = download.data()
        with pytest.raises(StoreUnavailableError, match="longer than"):
            await download.place_all(50, 90, whole(50, 90))
        return before[100:], download.data()[100:]

    before, after = asyncio.run(read())
    assert before == after == DATA[100:]


@pytest.mark.parametrize(
    ("num_bytes", "bytes_per_s", "connections"),
    [(1 << 30, None, 4), (1 << 30, 50e3, 4), (1 << 30, 9e6, 9), (1 << 30, 1e9, 16), (256 << 20, 1e9, 4), (1, 1e9, 4)],
)
def test_a_slow_link_is_not_divided_among_many(num_bytes: int, bytes_per_s: float | None, connections: int) -> None:
    assert transfers.parts_at_once(num_bytes, bytes_per_s) == connections


def test_a_failed_range_is_repeated_so_often_and_then_ends_everything() -> None:
    answers = Answers(quick=100, failing=transfers.PART_TRIES - 1, breaks=True)
    assert answers.read() == DATA
    with pytest.raises(StoreUnavailableError, match="503"):
        Answers(quick=100, failing=1000, breaks=True).read()
