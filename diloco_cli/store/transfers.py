"""Transfers between a bucket and this process: deadlines by size, checksums, large objects in parallel parts.

One connection to a bucket carries some ten to a hundred megabytes a second on any link, so a large object is moved in
several parts at a time. A failed part is repeated by itself: with many 503s some of a thousand parts fail every time,
and starting over would never end. If a part fails PART_TRIES times, the caller's policy decides (store/retry.py).

Connections share a link, so an upload that nobody waits for goes over one (`gentle` in port.py), and leaves the rest to
others.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from diloco_cli import randomness
from diloco_cli.quantities import format_duration
from diloco_cli.store.port import IS_GENTLE, StoreUnavailableError
from diloco_cli.store.retry import pause_s

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 30.0
CALL_DEADLINE_S = 60.0
SLOWEST_BYTES_PER_S = 50_000
"""A transfer may take the deadline of a call plus its size at this rate; the size of a download is that in its
answer."""
MAX_OBJECT_BYTES = 4 << 30
PART_BYTES = 16 << 20
MOST_PARTS = 10_000  # that S3 takes of an object; the parts of a longer one are larger
FEWEST_AT_ONCE, MOST_AT_ONCE = 4, 8
BYTES_AT_ONCE = 64 << 20
"""A connection for each so many bytes of the object, within these bounds: parts under way are at most a quarter of a
large object, where an upload copies them."""
PART_TRIES = 5
LIST_PAGE = 1000
CHECKSUM_NAME = "crc32c"
"""Under this name the checksum stands in the metadata of an object whose store shows none of its own."""

_CHECKED_AT_ONCE = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Opened:
    """An answer to a download whose body has not been read yet. `size_bytes` and `stated_crc32c`: of the whole object,
    as the store states them, if it does; `version`: names this version of the object in further requests."""

    pieces: AsyncIterator[bytes]
    size_bytes: int | None = None
    version: str | None = None
    stated_crc32c: str | None = None


Open = Callable[[int, int | None, str | None], AbstractAsyncContextManager[Opened]]
"""(start, end, version) -> an answer with these bytes; of the version, if one is given; end None: up to the last."""


def deadline_s(num_bytes: int) -> float:
    """Seconds that a transfer of this size may take."""
    return CALL_DEADLINE_S + num_bytes / SLOWEST_BYTES_PER_S


async def on_time(num_bytes: int, work: Awaitable[T]) -> T:
    """The work's result. At the deadline for this size the work is cancelled and StoreUnavailableError raised; a read
    timeout is not enough, because a server may send a byte now and then."""
    limit_s = deadline_s(num_bytes)
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise  # a timeout raised by the work itself
        raise StoreUnavailableError(f"the store took longer than {format_duration(limit_s)}") from error


def crc32c(data: bytes | memoryview) -> str:
    """As GCS and S3 write it: base64 of the four bytes, the highest first."""
    import google_crc32c

    checksum = 0
    for start in range(0, len(data), _CHECKED_AT_ONCE):  # it takes no view, so that a piece of one is copied
        checksum = google_crc32c.extend(checksum, bytes(data[start : start + _CHECKED_AT_ONCE]))
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def parts_at_once(num_bytes: int) -> int:
    """How many parts of an object of this size are moved at a time."""
    return max(FEWEST_AT_ONCE, min(num_bytes // BYTES_AT_ONCE, MOST_AT_ONCE))


def uploads_at_once(num_bytes: int) -> int:
    """How many parts of an upload are moved at a time, now."""
    return 1 if IS_GENTLE.get()() else parts_at_once(num_bytes)


def spans(start: int, end: int, most_parts: int = MOST_PARTS) -> list[tuple[int, int]]:
    """[start, end) cut into parts."""
    part_bytes = max(PART_BYTES, -(-(end - start) // most_parts))
    return [(first, min(first + part_bytes, end)) for first in range(start, end, part_bytes)]


async def download(opened_at: Open, max_bytes: int | None) -> tuple[bytes, str | None]:
    """The object, or its first `max_bytes` + 1 bytes; and the checksum that the store states. The first part shows size
    and version of the object; further parts of this version are fetched several at a time. All have the deadline of the
    size together; a part has that of all parts under way, because they share one link."""
    longest = MAX_OBJECT_BYTES if max_bytes is None else max_bytes + 1
    first_bytes = min(PART_BYTES, longest)
    async with AsyncExitStack() as stack:
        opened = await on_time(0, stack.enter_async_context(opened_at(0, first_bytes, None)))
        size = None if opened.size_bytes is None else min(opened.size_bytes, longest)
        if size is not None and size > first_bytes and opened.version is None:  # no parts of one version can be fetched
            opened = await on_time(0, stack.enter_async_context(opened_at(0, longest, None)))
        if size is None or size <= first_bytes or opened.version is None:
            data = await on_time(longest if size is None else size, _read(opened.pieces, size, longest))
            return data, opened.stated_crc32c
        # A large buffer's memory is the system's until bytes come; it writes into it, as nothing else refers to it.
        buffer = io.BytesIO(bytes(size))
        at_once = parts_at_once(size)
        parts: list[Callable[[], Awaitable[None]]] = [
            partial(persist, partial(_fetch, buffer, opened_at, *span, opened.version, at_once))
            for span in [(0, first_bytes), *spans(first_bytes, size)]
        ]

        async def first() -> None:
            try:
                await on_time(at_once * first_bytes, _place(buffer, 0, first_bytes, opened.pieces))
            except StoreUnavailableError:
                await parts[0]()

        try:
            await on_time(size, in_parallel([first, *parts[1:]], lambda: at_once))
        except BaseException:  # its traceback holds the frames, and so the buffer, until the last try has ended
            buffer.close()
            raise
        return buffer.getvalue(), opened.stated_crc32c


async def _fetch(buffer: io.BytesIO, opened_at: Open, start: int, end: int, version: str, at_once: int) -> None:
    async def fetched() -> None:
        async with opened_at(start, end, version) as opened:
            await _place(buffer, start, end, opened.pieces)

    await on_time(at_once * (end - start), fetched())


async def _place(buffer: io.BytesIO, start: int, end: int, pieces: AsyncIterator[bytes]) -> None:
    """Put bytes [start, end) into their place as they come."""
    at = start
    async for piece in pieces:
        if at + len(piece) > end:  # a proxy may answer with the whole object
            raise StoreUnavailableError("a part of the object is longer than was asked for")
        buffer.seek(at)
        buffer.write(piece)
        at += len(piece)
    if at != end:
        raise StoreUnavailableError("a part of the object came short")


async def _read(pieces: AsyncIterator[bytes], size: int | None, longest: int) -> bytes:
    """The body of one answer, of which no more than `longest` bytes are read."""
    found, held = [], 0
    async for piece in pieces:
        found.append(piece)
        held += len(piece)
        if held >= longest:
            break
    if size is not None and held < size:
        raise StoreUnavailableError("the answer ended early")
    return b"".join(found)[:longest]


async def in_parallel(parts: Sequence[Callable[[], Awaitable[T]]], at_once: Callable[[], int]) -> list[T]:
    """Their results in order, so many at a time. The first error ends all of them."""
    tasks: list[asyncio.Future[T]] = []
    under_way: set[asyncio.Future[T]] = set()
    try:
        for part in parts:
            while len(under_way) >= at_once():
                ended, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
            tasks.append(asyncio.ensure_future(part()))
            under_way.add(tasks[-1])
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def persist(part: Callable[[], Awaitable[T]]) -> T:
    """The part's result; StoreUnavailableError after PART_TRIES tries."""
    attempt = 1
    while True:
        try:
            return await part()
        except StoreUnavailableError as error:
            if attempt == PART_TRIES:
                raise
            await asyncio.sleep(pause_s(attempt, error, randomness.jitter()))
        attempt += 1
