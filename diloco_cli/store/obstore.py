"""gs, s3 and file through obstore, a client written in Rust: a second implementation of the same port.

It keeps the port honest, and moves bytes outside of Python's interpreter lock. It is weaker than the others in this:
it does not show a bucket's own checksums, so that those of its objects stand in their metadata, and what other clients
wrote is checked by the run's digests alone; and a file has its name some milliseconds before it is durable, and
symbolic links below the directory are followed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from diloco_cli.errors import DilocoError
from diloco_cli.store import transfers
from diloco_cli.store.answers import (
    ConditionFailedError,
    ObjectAbsentError,
    RangeBehindEndError,
    intact,
    settled,
    within_range,
)
from diloco_cli.store.keys import check_key, check_prefix, is_between
from diloco_cli.store.local import declared_error, missing_directory
from diloco_cli.store.obstore_client import (
    missing_bucket,
    sorted_error,
    start_client,
)
from diloco_cli.store.port import Created, Exists, ObjectStat, StoreUnavailableError, holder_bytes

_READ_BYTES = 1 << 20
_LARGEST_CHECKED_BYTES = 8 << 20
"""What is larger is a payload, whose digest its record names: one pass over it is enough. A checksum of the transfer
alone would take a tenth of the time in which this client moves it over a fast network."""
_CLIENT_BYTES = [0, 1 << 20, 8 << 20, 64 << 20, 512 << 20, transfers.LARGEST_OBJECT_BYTES]
"""A client's deadline is set when it is made, so there is one for each of these sizes."""

T = TypeVar("T")
Keys = list[str]


class ObstoreStore:
    """A bucket and prefix, or a directory (`scheme` file, `place` its path). Clients start at the first call, in the
    process that makes it: never share one store with a forked child. Retries are not made here, but for the parts of a
    large object."""

    def __init__(self, scheme: str, place: str, prefix: str = "") -> None:
        self._scheme = scheme
        self._place = place
        self._prefix = prefix
        self.url = Path(place).resolve().as_uri() if scheme == "file" else f"{scheme}://{place}/{prefix}".rstrip("/")
        self._lock = threading.Lock()
        self._clients: dict[tuple[int, float | None], Any] = {}

    def create(self, key: str, data: bytes) -> Created | Exists:
        try:
            self._write(key, data, "create")
            return Created()
        except (ConditionFailedError, StoreUnavailableError) as doubt:
            holder = self.get(key, holder_bytes(data))
            if holder is not None:
                self._make_durable(key)  # its writer may have died before
            return settled(holder, data, doubt, self._where(key))

    def get(self, key: str, most_bytes: int | None = None) -> bytes | None:
        from fsspec.asyn import get_loop, sync

        check_key(key)
        try:
            stated, chunks = self._call(key, lambda: sync(get_loop(), self._download, key, most_bytes))
        except ObjectAbsentError:
            return None
        except RangeBehindEndError:
            return b""  # no range of an empty object can be had
        data = transfers.joined(chunks, most_bytes)
        is_whole = most_bytes is None or len(data) <= most_bytes
        return intact(data, stated if is_whole else None, self._where(key))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        import obstore

        path = check_key(key)
        start, end = max(0, start), max(0, end)
        if start >= end:
            return None if self.stat(key) is None else b""
        client = self._reader(end - start)
        try:
            data = self._call(key, lambda: bytes(obstore.get_range(client, path, start=start, end=end)))
        except ObjectAbsentError:
            return None
        except RangeBehindEndError:
            return b""
        return within_range(data, end - start, self._where(key))

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        check_prefix(prefix)
        return self._call(prefix, lambda: self._listed(prefix, after, limit)) if limit > 0 else []

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data, "overwrite")

    def delete(self, key: str) -> None:
        import obstore

        path = check_key(key)
        try:
            self._call(key, lambda: obstore.delete(self._reader(0), path))
        except ObjectAbsentError:
            return
        self._make_durable(key)

    def stat(self, key: str) -> ObjectStat | None:
        import obstore

        path = check_key(key)
        try:
            found = self._call(key, lambda: obstore.head(self._reader(0), path))
        except ObjectAbsentError:
            return None
        return ObjectStat(key, int(found["size"]), found["last_modified"].timestamp())

    def _write(self, key: str, data: bytes, mode: Any) -> None:
        """In one request: several parts could carry no condition."""
        import obstore

        path = check_key(key)
        is_checked = self._scheme != "file" and len(data) <= _LARGEST_CHECKED_BYTES
        about: Any = {transfers.CHECKSUM_NAME: transfers.crc32c(data)} if is_checked else None
        client = self._writer(len(data))
        try:
            self._call(key, lambda: obstore.put(client, path, data, mode=mode, use_multipart=False, attributes=about))
        except ObjectAbsentError as error:
            is_file = self._scheme == "file"
            missing = missing_directory(Path(self._place)) if is_file else missing_bucket(self._scheme, self.url)
            raise missing from error
        self._make_durable(key)

    async def _download(self, key: str, most_bytes: int | None) -> tuple[str | None, transfers.Chunks]:
        """The checksum in the object's metadata, and the object in pieces, all of one version."""
        import obstore

        span: Any = None if most_bytes is None else {"range": (0, most_bytes + 1)}
        reader = self._reader(transfers.LARGEST_OBJECT_BYTES)  # its answer is given the time of its own size
        answer = await transfers.on_time(0, obstore.get_async(reader, key, options=span))
        etag = answer.meta["e_tag"]
        if self._scheme == "file":
            whole: Any = await answer.bytes_async()
            return None, [whole]
        size = transfers.size_to_read(None, int(answer.meta["size"]), most_bytes)
        fetch = partial(self._fetch, key, etag) if etag else None
        stream = answer.stream(min_chunk_size=_READ_BYTES)
        chunks = await transfers.read_in_parts(size, _pieces(stream), fetch, most_bytes)
        stated: str | None = answer.attributes.get(transfers.CHECKSUM_NAME)
        return stated, chunks

    async def _fetch(self, key: str, etag: str, start: int, end: int) -> transfers.Chunks:
        import obstore

        options: Any = {"range": (start, end), "if_match": etag}
        try:
            answer = await obstore.get_async(self._reader(end - start), key, options=options)
            data: Any = await answer.bytes_async()
        except Exception as error:
            found = sorted_error(error, self._scheme, self._where(key))
            if isinstance(found, (ConditionFailedError, ObjectAbsentError, RangeBehindEndError)):
                raise StoreUnavailableError("the object changed while it was read", where=self._where(key)) from error
            raise found from error
        if len(data) != end - start:
            raise StoreUnavailableError("a part came short", where=self._where(key))
        return [data]

    def _listed(self, prefix: str, after: str, limit: int) -> Keys:
        """obstore lists whole directories; buckets in order, files in none."""
        import obstore

        folder = prefix.rpartition("/")[0] or None
        found: Keys = []
        for page in obstore.list(self._reader(0), folder, offset=after or None, chunk_size=transfers.LIST_PAGE):
            keys = [str(item["path"]) for item in page]
            found += [key for key in keys if is_between(key, prefix, after) and _is_key(key)]
            is_past = bool(keys) and keys[-1] > prefix and not keys[-1].startswith(prefix)
            if self._scheme != "file" and (len(found) >= limit or is_past):
                break
        return sorted(found)[:limit]

    def _make_durable(self, key: str) -> None:
        """obstore syncs nothing: the file, its directory and those above it, up to the store's."""
        if self._scheme != "file":
            return
        path = Path(self._place, key)
        try:
            for place in (path, *path.parents[: key.count("/") + 1]):
                with suppress(FileNotFoundError):  # just deleted
                    _sync(place)
        except OSError as error:
            raise declared_error(error, self._where(key)) from error

    def _reader(self, num_bytes: int) -> Any:
        return self._client(num_bytes, transfers.SILENCE_TIMEOUT_S)

    def _writer(self, num_bytes: int) -> Any:
        return self._client(num_bytes, None)

    def _client(self, num_bytes: int, silence_s: float | None) -> Any:
        size = next((size for size in _CLIENT_BYTES if num_bytes <= size), num_bytes)
        with self._lock:
            if (size, silence_s) not in self._clients:
                self._clients[size, silence_s] = self._start(transfers.deadline_s(size), silence_s)
            return self._clients[size, silence_s]

    def _start(self, limit_s: float, silence_s: float | None) -> Any:
        if self._scheme != "file":
            return start_client(self._scheme, self._place, self._prefix, limit_s, silence_s)
        from obstore.store import LocalStore

        return LocalStore(self._place)

    def _call(self, key: str, work: Callable[[], T]) -> T:
        """ObjectAbsentError, ConditionFailedError, RangeBehindEndError, or an error of the port."""
        try:
            return work()
        except DilocoError:
            raise
        except Exception as error:
            raise sorted_error(error, self._scheme, self._where(key)) from error

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


def _is_key(path: str) -> bool:
    try:
        check_key(path)
    except DilocoError:
        return False
    return True


async def _pieces(stream: Any) -> AsyncIterator[bytes]:
    async for piece in stream:
        yield piece


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
