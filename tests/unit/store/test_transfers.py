"""Transfers: parallel parts, deadlines by size, checksums, bounds."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from diloco_cli.store import transfers
from diloco_cli.store.port import StoreUnavailableError, gentle

DATA = os.urandom(1000)
PART = 100


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PART_BYTES", PART)
    monkeypatch.setattr(transfers, "pause_s", lambda attempt, error, jitter: 0.0)


class Answers:
    """A store of one object. `failing`: so many answers to further parts break in their middle; `cut`: of the first
    answer only so many bytes come, then it ends, or `hangs`; `told`: whether sizes are stated; `whole`: ranges are
    ignored; `named`: versions are."""

    def __init__(
        self,
        failing: int = 0,
        cut: int = 1000,
        hangs: bool = False,
        told: bool = True,
        whole: bool = False,
        named: bool = True,
    ) -> None:
        self.failing, self.cut, self.hangs, self.told, self.whole, self.named = failing, cut, hangs, told, whole, named
        self.asked: list[tuple[int, int | None, str | None]] = []
        self.at_once = self.max_at_once = 0

    @asynccontextmanager
    async def open(self, start: int, end: int | None, version: str | None) -> AsyncIterator[transfers.Opened]:
        self.asked.append((start, end, version))
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        await asyncio.sleep(0)
        data = DATA if self.whole else DATA[start:end]
        known = None if self.whole or not self.named else "1"
        yield transfers.Opened(self.pieces(data, version), len(DATA) if self.told else None, known, "sum")
        self.at_once -= 1

    async def pieces(self, data: bytes, version: str | None) -> AsyncIterator[bytes]:
        if version is None:
            data = data[: self.cut]
        elif self.failing:
            self.failing -= 1
            yield data[:30]
            raise StoreUnavailableError("503")
        for start in range(0, len(data), 30):
            yield data[start : start + 30]
        if version is None and self.hangs:
            await asyncio.Event().wait()

    def read(self, max_bytes: int | None = None) -> bytes:
        data, stated = asyncio.run(transfers.download(self.open, max_bytes))
        assert stated == "sum"
        return data


def test_a_large_object_comes_in_parts_of_one_version_several_at_a_time() -> None:
    answers = Answers()
    assert answers.read() == DATA
    assert sorted(answers.asked) == [(0, PART, None), *[(n, n + PART, "1") for n in range(PART, 1000, PART)]]
    assert 1 < answers.max_at_once <= transfers.FEWEST_AT_ONCE + 1, "the first one stays open"


@pytest.mark.parametrize("bound", [0, 50, PART - 1, PART, 510, 999, 5000])
@pytest.mark.parametrize(
    "answers", [Answers(), Answers(told=False, whole=True), Answers(whole=True), Answers(named=False)]
)
def test_no_more_than_one_byte_beyond_the_bound_is_read(answers: Answers, bound: int) -> None:
    assert answers.read(bound) == DATA[: bound + 1]


def test_a_first_part_that_breaks_is_repeated_by_itself() -> None:
    answers = Answers(cut=50)
    assert answers.read() == DATA
    assert len(answers.asked) == 1 + 10, "no other part was thrown away"


def test_a_part_that_fails_is_repeated_so_often_and_then_ends_everything() -> None:
    assert Answers(failing=transfers.PART_TRIES - 1).read() == DATA
    with pytest.raises(StoreUnavailableError, match="503"):
        Answers(failing=1000).read()


@pytest.mark.parametrize("bound", [None, 50])
def test_an_answer_that_ends_early_is_not_taken_for_the_object(bound: int | None) -> None:
    with pytest.raises(StoreUnavailableError, match=r"ended early|came short"):
        Answers(cut=40, named=bound is not None).read(bound)


@pytest.mark.parametrize("bound", [None, 60])
def test_an_answer_that_hangs_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch, bound: int | None) -> None:
    monkeypatch.setattr(transfers, "CALL_DEADLINE_S", 0.1)
    monkeypatch.setattr(transfers, "SLOWEST_BYTES_PER_S", 1e9)
    with pytest.raises(StoreUnavailableError, match="took longer than 100 ms"):
        Answers(cut=40, hangs=True).read(bound)


class LargeObject:
    """64 MiB in pieces of one, of which the last `missing` never come."""

    size, piece = 64 << 20, 1 << 20

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing

    @asynccontextmanager
    async def open(self, start: int, end: int, version: str | None) -> AsyncIterator[transfers.Opened]:
        async def pieces() -> AsyncIterator[bytes]:
            for number in range(start // self.piece, min(end, self.size - self.missing * self.piece) // self.piece):
                yield bytes([number]) * self.piece

        yield transfers.Opened(pieces(), self.size, "1")


def test_a_large_object_needs_its_memory_once_and_none_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PART_BYTES", 16 << 20)

    async def peak_bytes() -> int:  # read here: asyncio.run itself writes a repr of what it returns
        data, _ = await transfers.download(LargeObject().open, None)
        assert len(data) == LargeObject.size
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        assert asyncio.run(peak_bytes()) < LargeObject.size + 8 * LargeObject.piece
        errors = []
        for _ in range(3):
            with pytest.raises(StoreUnavailableError) as failed:
                asyncio.run(transfers.download(LargeObject(missing=10).open, None))
            errors.append(failed.value)
        assert tracemalloc.get_traced_memory()[0] < 8 * LargeObject.piece
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, 100 * transfers.MOST_PARTS, 100 * transfers.MOST_PARTS + 1, 5 << 40])
def test_no_object_has_more_parts_than_s3_takes(size: int) -> None:
    """5 TiB: the longest object there. With parts of one length, moments of 21 billion parameters had too many."""
    cuts = transfers.spans(0, size)
    assert len(cuts) <= transfers.MOST_PARTS
    assert [start for start, _ in cuts] == [0, *[end for _, end in cuts[:-1]]][: len(cuts)]
    assert (cuts[-1][1] if cuts else 0) == size


@pytest.mark.parametrize(("num_bytes", "connections"), [(1, 4), (256 << 20, 4), (400 << 20, 6), (4 << 30, 8)])
def test_parts_under_way_are_a_quarter_of_a_large_object_at_most(num_bytes: int, connections: int) -> None:
    assert transfers.parts_at_once(num_bytes) == connections


def test_a_gentle_upload_has_one_connection_until_it_need_not_be_gentle() -> None:
    under_way, seen = [0], list[int]()

    async def part() -> None:
        under_way[0] += 1
        seen.append(under_way[0])
        await asyncio.sleep(0)
        under_way[0] -= 1

    with gentle(lambda: len(seen) < 4):
        asyncio.run(transfers.in_parallel([part] * 12, partial(transfers.uploads_at_once, 1)))
    assert seen[:4] == [1, 1, 1, 1] and max(seen) == transfers.FEWEST_AT_ONCE
    assert transfers.uploads_at_once(1) == transfers.FEWEST_AT_ONCE, "others of the thread are not gentle"


def test_the_first_part_that_fails_ends_the_others() -> None:
    begun = []

    async def part(number: int) -> int:
        begun.append(number)
        await asyncio.sleep(0)
        if number == 1:
            raise StoreUnavailableError("503")
        return number

    with pytest.raises(StoreUnavailableError, match="503"):
        asyncio.run(transfers.in_parallel([partial(part, number) for number in range(9)], lambda: 2))
    assert begun == [0, 1]
