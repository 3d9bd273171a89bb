"""gs, s3 and file through obstore, a client written in Rust: a second implementation of the same port.

It tests that the port fits more than one client, and moves bytes outside of Python's interpreter lock. It is weaker in
three ways. It sends no checksums and does not show a bucket's own checksums: it keeps those of its objects in their
metadata, and objects of other clients are checked by the run's digests alone. A file has its name some milliseconds
before it is durable. And symbolic links below the directory are followed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from diloco_cli.errors import DilocoError
from diloco_cli.store import transfers
from diloco_cli.store.bucket import BucketStore, ObjectAbsentError, missing_bucket
from diloco_cli.store.local import declared_error, missing_directory, sync_path
from diloco_cli.store.obstore_client import sorted_error, start_client
from diloco_cli.store.port import Created, Exists, ObjectStat, check_key, check_prefix, is_between

_READ_BYTES = 1 << 20
_MAX_CHECKED_BYTES = 8 << 20
"""A larger object is a payload, whose digest its record names: that check is enough. A checksum of the transfer would
take a further tenth of the time in which this client moves it over a fast network."""
_CLIENT_BYTES = [0, 1 << 20, 8 << 20, 64 << 20, 512 << 20, transfers.MAX_OBJECT_BYTES]
"""A client's deadline is set when it is made, so there is one for each of these sizes."""

Keys = list[str]


class ObstoreStore(BucketStore):
    """A bucket and prefix, or a directory (`scheme` file, `place` its path)."""

    sends_checksums = False

    def __init__(self, scheme: str, place: str, prefix: str = "") -> None:
        is_file = scheme == "file"
        url = Path(place).resolve().as_uri() if is_file else f"{scheme}://{place}/{prefix}".rstrip("/")
        super().__init__(url, partial(sorted_error, scheme=scheme))
        self._scheme = scheme
        self._place = place
        self._prefix = prefix
        self._lock = threading.Lock()
        self._clients: dict[tuple[int, float | None], Any] = {}

    def create(self, key: str, data: bytes) -> Created | Exists:
        outcome = super().create(key, data)
        self._make_durable(key)  # the process that created the object may have died before it did so
        return outcome

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        check_prefix(prefix)
        if limit <= 0:
            return []
        with self._sorted_errors(prefix):
            return self._listed(prefix, after, limit)

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self._make_durable(key)

    def _remove(self, key: str) -> None:
        import obstore

        with self._sorted_errors(key):
            obstore.delete(self._reader(0), key)
        self._make_durable(key)

    def _describe(self, key: str) -> ObjectStat:
        import obstore

        with self._sorted_errors(key):
            found = obstore.head(self._reader(0), key)
        return ObjectStat(key, int(found["size"]), found["last_modified"].timestamp())

    def _upload(
        self, key: str, data: bytes, *, exclusive: bool, checksum: str | None = None, in_parts: bool | None = None
    ) -> None:
        """Upload in one request, because an upload in parts cannot carry a condition."""
        import obstore

        is_file = self._scheme == "file"
        is_checked = not is_file and len(data) <= _MAX_CHECKED_BYTES
        about: Any = {transfers.CHECKSUM_NAME: transfers.crc32c(data)} if is_checked else None
        mode: Any = "create" if exclusive else "overwrite"
        try:
            with self._sorted_errors(key):
                obstore.put(self._writer(len(data)), key, data, mode=mode, use_multipart=False, attributes=about)
        except ObjectAbsentError as error:
            missing = missing_directory(Path(self._place)) if is_file else missing_bucket(self.url)
            raise missing from error

    async def _download(self, key: str, max_bytes: int | None) -> transfers.Downloaded:
        import obstore

        span: Any = None if max_bytes is None else {"range": (0, max_bytes + 1)}
        reader = self._reader(transfers.MAX_OBJECT_BYTES)  # the deadline follows from the size in the answer
        answer = await transfers.on_time(0, obstore.get_async(reader, key, options=span))
        etag = answer.meta["e_tag"]
        if self._scheme == "file":
            whole: Any = await answer.bytes_async()
            return transfers.Downloaded(await asyncio.to_thread(bytes, whole))  # not obstore's own type
        size = transfers.size_to_read(None, int(answer.meta["size"]), max_bytes)
        source = transfers.Download(_pieces(answer.stream(min_chunk_size=_READ_BYTES)))
        data = await transfers.read_in_parts(size, source, self._fetch(key, etag), max_bytes)
        stated = answer.attributes.get(transfers.CHECKSUM_NAME)
        return transfers.Downloaded(data, stated, source.crc32c())

    async def _part(self, key: str, version: str | None, start: int, end: int) -> AsyncGenerator[bytes, None]:
        import obstore

        condition = {} if version is None else {"if_match": version}
        options: Any = {"range": (start, end), **condition}
        answer = await obstore.get_async(self._reader(end - start), key, options=options)
        async for piece in _pieces(answer.stream(min_chunk_size=_READ_BYTES)):
            yield piece

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
        """fsync the file, its directory and those above it, up to the store's: obstore does not."""
        if self._scheme != "file":
            return
        path = Path(self._place, key)
        try:
            for place in (path, *path.parents[: key.count("/") + 1]):
                with suppress(FileNotFoundError):  # just deleted
                    sync_path(place)
        except OSError as error:
            raise declared_error(error, self._where(key)) from error

    def _reader(self, num_bytes: int) -> Any:
        return self._sized_client(num_bytes, transfers.SILENCE_TIMEOUT_S)

    def _writer(self, num_bytes: int) -> Any:
        return self._sized_client(num_bytes, None)

    def _sized_client(self, num_bytes: int, silence_s: float | None) -> Any:
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


def _is_key(path: str) -> bool:
    try:
        check_key(path)
    except DilocoError:
        return False
    return True


async def _pieces(stream: Any) -> AsyncIterator[bytes]:
    async for piece in stream:
        yield piece
