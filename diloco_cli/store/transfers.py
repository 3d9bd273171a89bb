"""Transfers between a bucket and this process: deadlines by size, checksums, large objects in parallel parts.

One connection to a bucket carries some ten to a hundred megabytes a second on any link, so a large object is moved in
several parts at a time. A failed part is repeated by itself: with many 503s some of a thousand parts fail every time,
and starting over would never end. If a part fails PART_TRIES times, the caller's policy decides (store/retry.py).
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from diloco_cli import clock, randomness
from diloco_cli.store.port import StoreUnavailableError
from diloco_cli.store.retry import pause_s
from diloco_cli.units import format_duration

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 30.0
CALL_DEADLINE_S = 60.0
SLOWEST_BYTES_PER_S = 50_000
"""A transfer may take the deadline of a call plus its size at this rate; the size of a download is that in its
answer."""
MAX_OBJECT_BYTES = 4 << 30
PART_BYTES = 16 << 20
MOST_PARTS = 10_000  # that S3 takes of an object; the parts of a longer one are larger
UPLOAD_IN_PARTS_FROM_BYTES = 32 << 20
ALWAYS_IN_PARTS_FROM_BYTES = 256 << 20
PROBE_BYTES = 8 << 20
PARALLEL_PAYS_S = 2.0
"""The first bytes of a download show the speed of one connection. If the rest would take longer, several are used."""
FEWEST_AT_ONCE, MOST_AT_ONCE = 4, 16
BYTES_AT_ONCE = 64 << 20
"""A connection for each so many bytes of the object, within these bounds: parts under way are at most a quarter of a
large object, where an upload copies them."""
LEAST_BYTES_PER_S = 1_000_000
"""Of each of more than FEWEST_AT_ONCE connections: one that gets little of a slow link seems silent."""
PART_TRIES = 5
LIST_PAGE = 1000
CHECKSUM_NAME = "crc32c"
"""Under this name the checksum stands in the metadata of an object whose store shows none of its own."""

_CHECKED_AT_ONCE = 1 << 20

_CONTENT_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")

T = TypeVar("T")
Pieces = AsyncIterator[bytes]
Fetch = Callable[[int, int], AsyncGenerator[bytes, None]]


@dataclass(frozen=True)
class Downloaded:
    """An object, or its beginning, all of one version; its crc32c as the store states it, and as it was computed while
    the pieces arrived, if it was."""

    data: bytes
    stated_crc32c: str | None = None
    found_crc32c: str | None = None


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


def bound_header(max_bytes: int) -> str:
    """The range of an object that a `get` with this bound asks for."""
    return f"bytes=0-{max_bytes}"


def size_to_read(content_range: str | None, content_length: int | None, max_bytes: int | None) -> int | None:
    """How many bytes of an answer's body to read, by its headers; None if they do not say. A server may ignore the
    range and send the whole object."""
    stated = _CONTENT_RANGE.fullmatch(content_range or "")
    size = int(stated[1]) if stated else content_length
    return size if size is None or max_bytes is None else min(size, max_bytes + 1)


def crc32c(data: bytes | memoryview) -> str:
    """As GCS and S3 write it: base64 of the four bytes, the highest first."""
    import google_crc32c

    checksum = 0
    for start in range(0, len(data), _CHECKED_AT_ONCE):  # it takes no view, so that a piece of one is copied
        checksum = google_crc32c.extend(checksum, bytes(data[start : start + _CHECKED_AT_ONCE]))
    return _written(checksum)


def _written(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def parts_at_once(num_bytes: int, link_bytes_per_s: float | None) -> int:
    """How many parts of an object of this size are moved at a time over a link that has been seen to carry so much."""
    carried = int((link_bytes_per_s or 0.0) / LEAST_BYTES_PER_S)
    return max(FEWEST_AT_ONCE, min(num_bytes // BYTES_AT_ONCE, carried, MOST_AT_ONCE))


@dataclass
class UploadSpeed:
    """Of a client's uploads, as last seen: through one connection, and through as many as there were."""

    alone_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    refused: bool = False

    def note(self, num_bytes: int, seconds: float, at_once: int) -> None:
        """An upload through so many connections took so long. Short ones say nothing about speed."""
        if self.refused:
            self.link_bytes_per_s, self.refused = None, False
        elif num_bytes >= PROBE_BYTES:
            self.link_bytes_per_s = num_bytes / max(seconds, 1e-6)
            if at_once == 1:
                self.alone_bytes_per_s = self.link_bytes_per_s

    def pays_in_parts(self, num_bytes: int) -> bool:
        """Whether an upload gains from several connections."""
        if num_bytes < UPLOAD_IN_PARTS_FROM_BYTES or num_bytes >= ALWAYS_IN_PARTS_FROM_BYTES:
            return num_bytes >= UPLOAD_IN_PARTS_FROM_BYTES
        return self.alone_bytes_per_s is not None and num_bytes / self.alone_bytes_per_s > PARALLEL_PAYS_S

    def at_once(self, num_bytes: int) -> int:
        """How many parts of an upload of this size go at a time."""
        return parts_at_once(num_bytes, self.link_bytes_per_s)

    def throttled(self) -> None:
        """During the upload the store took no more calls: the next one goes through few connections."""
        self.refused = True


def spans(start: int, end: int) -> list[tuple[int, int]]:
    """[start, end) cut into parts."""
    part_bytes = max(PART_BYTES, -(-(end - start) // MOST_PARTS))
    return [(first, min(first + part_bytes, end)) for first in range(start, end, part_bytes)]


async def read_in_parts(
    size_bytes: int | None, source: Download, fetch: Fetch | None, max_bytes: int | None = None
) -> bytes:
    """The first `size_bytes` of the body of an answer that has begun. `fetch(start, end)` asks for a range of the same
    generation, and raises the port's errors; None: ranges cannot be fetched. The whole transfer has the deadline of its
    size; a part has that of all parts under way, because they share one link.

    If the rest of a large object would take longer than PARALLEL_PAYS_S at the speed of its beginning, ranges are
    fetched beside the answer, from the end backwards, until both meet; if the answer breaks, ranges take its place. A
    small object comes from the answer alone, and so does one of unknown size: until the answer ends, or there are more
    than `max_bytes`.
    """
    source.make_room(size_bytes or 0)
    try:
        if size_bytes is None:
            longest = MAX_OBJECT_BYTES if max_bytes is None else max_bytes
            await on_time(longest, source.take_all(max_bytes))
        elif fetch is None or size_bytes <= PROBE_BYTES:
            await on_time(size_bytes, source.take(size_bytes))
        else:
            await on_time(size_bytes, _in_parts(size_bytes, source, fetch))
        return source.data()
    except BaseException:  # its traceback holds the frames, and so the buffer, until the last try has ended
        source.let_go()
        raise


async def _in_parts(size_bytes: int, source: Download, fetch: Fetch) -> None:
    await on_time(1, source.take(1))  # the time to the first byte says nothing about the speed
    started_s = clock.monotonic_s()
    await on_time(FEWEST_AT_ONCE * PROBE_BYTES, source.take(PROBE_BYTES))
    taken_s = max(clock.monotonic_s() - started_s, 1e-6)
    rest_s = taken_s * (size_bytes - PROBE_BYTES) / PROBE_BYTES
    at_once = parts_at_once(size_bytes, PROBE_BYTES / taken_s * MOST_AT_ONCE)  # others may be as fast as this one
    left = deque(spans(PROBE_BYTES, size_bytes))

    async def fetched(start: int, end: int) -> None:
        await on_time(at_once * (end - start), source.place_all(start, end, fetch(start, end)))

    async def from_the_back() -> None:
        while left:
            await persist(partial(fetched, *left.pop()))

    async def from_the_front() -> None:
        while left:
            start, end = left.popleft()
            try:
                await on_time(at_once * (end - start), source.take(end))
            except Exception:  # the answer broke: a range takes its place, or raises the port's error
                left.append((start, end))
                await from_the_back()

    beside = at_once - 1 if rest_s > PARALLEL_PAYS_S else 0
    await in_parallel([from_the_front, *[from_the_back] * beside], at_once)


class Download:
    """An object that arrives as a stream of pieces of any size, and as ranges beside it. Each piece goes to its place
    in one buffer, and into the crc32c, while the next ones are on their way: pieces joined at the end would need the
    memory twice, and the time of one more copy."""

    def __init__(self, stream: Pieces) -> None:
        self._stream = stream
        self._held = b""
        self._buffer = io.BytesIO()
        self._checksum = self._taken_bytes = 0

    def make_room(self, num_bytes: int) -> None:
        """For an object of this length: a buffer that grows as it fills copies megabytes again and again. A large
        one's memory is the system's until bytes come; the buffer writes into it because nothing else refers to it."""
        self._buffer = io.BytesIO(bytes(num_bytes))

    def let_go(self) -> None:
        """Free the buffer."""
        self._buffer.close()

    def data(self) -> bytes:
        """The object, once all of it has come; not copied."""
        return self._buffer.getvalue()

    def crc32c(self) -> str | None:
        """That of the object, unless ranges have brought a part of it."""
        return _written(self._checksum) if self._taken_bytes == self._buffer.seek(0, io.SEEK_END) else None

    async def take(self, end: int) -> None:
        """Read on in the stream, up to this byte of the object."""
        while (left := end - self._taken_bytes) > 0:
            piece = self._held or await anext(self._stream, b"")
            if not piece:
                raise StoreUnavailableError("the answer ended early")
            piece, self._held = piece[:left], piece[left:]
            self._add(piece)

    async def take_all(self, max_bytes: int | None) -> None:
        """The whole stream, or the first `max_bytes` + 1 bytes of it."""
        longest = math.inf if max_bytes is None else max_bytes + 1
        while self._taken_bytes < longest and (piece := await anext(self._stream, b"")):
            self._add(piece)
        if self._taken_bytes > longest:
            self._buffer.truncate(int(longest))

    async def place_all(self, start: int, end: int, pieces: AsyncGenerator[bytes, None]) -> None:
        """Put bytes [start, end) into their place as they come."""
        at = start
        async with aclosing(pieces):
            async for piece in pieces:
                if at + len(piece) > end:  # a proxy may answer with the whole object
                    raise StoreUnavailableError("a part of the object is longer than was asked for")
                self._place(at, piece)
                at += len(piece)
        if at != end:
            raise StoreUnavailableError("a part of the object came short")

    def _place(self, start: int, piece: bytes) -> None:
        self._buffer.seek(start)
        self._buffer.write(piece)

    def _add(self, piece: bytes) -> None:
        import google_crc32c

        self._place(self._taken_bytes, piece)
        self._checksum = google_crc32c.extend(self._checksum, piece)
        self._taken_bytes += len(piece)


async def in_parallel(parts: Sequence[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """Their results in order, so many at a time. The first error ends all of them."""
    gate = asyncio.Semaphore(at_once)

    async def passed(part: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await part()

    tasks = [asyncio.ensure_future(passed(part)) for part in parts]
    try:
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
