"""Google Cloud Storage through gcsfs: its session, credentials and addresses, with our own requests.

Requests are made one by one (`GCSFileSystem._call`), so that each of them carries its precondition and
checksum, and each answer can be checked. By itself, gcsfs repeats a create whose answer was lost, gets
"precondition failed" for its own object and reports it as another writer's; it has no read timeout; and its
listing cache hides objects of other writers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from typing import Any

from diloco_cli.store import transfers
from diloco_cli.store.bucket import BucketStore, ObjectAbsentError, missing_bucket
from diloco_cli.store.gcs_client import (
    open_media,
    sorted_error,
    start_client,
    stated_crc32c,
)
from diloco_cli.store.gcs_upload import Answer, GCSUploads, Upload
from diloco_cli.store.port import (
    ObjectStat,
    StoreBrokenError,
    StoreUnavailableError,
    check_prefix,
)


class GCSStore(BucketStore):
    """Through gcsfs."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(f"gs://{bucket}/{prefix}".rstrip("/"), sorted_error)
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._uploads = GCSUploads(bucket, self._prefix, self._ask, lambda: str(self._filesystem.base))

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        page: dict[str, str] = {"prefix": self._prefix + check_prefix(prefix)}
        if after:
            page["startOffset"] = self._prefix + after  # inclusive: one key more is asked for, and dropped
        found: list[str] = []
        while len(found) < limit:
            wanted = min(transfers.LIST_PAGE, limit - len(found) + 1)
            fields = "items(name),nextPageToken"
            _, body = self._call("GET", None, maxResults=str(wanted), fields=fields, **page)
            answer = self._parsed(body)
            keys = [name.removeprefix(self._prefix) for name in self._listed(answer)]
            found.extend(key for key in keys if key > after)
            if not answer.get("nextPageToken"):
                break
            page["pageToken"] = answer["nextPageToken"]
        return found[: max(0, limit)]

    def _remove(self, key: str) -> None:
        self._call("DELETE", key)

    def _describe(self, key: str) -> ObjectStat:
        _, body = self._call("GET", key, fields="size,updated")
        answer = self._parsed(body)
        try:
            return ObjectStat(key, int(answer["size"]), datetime.fromisoformat(answer["updated"]).timestamp())
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StoreBrokenError("the store describes the object without size or time", where=self.url) from error

    async def _download(self, key: str, max_bytes: int | None) -> transfers.Downloaded:
        span = {} if max_bytes is None else {"Range": transfers.bound_header(max_bytes)}
        async with AsyncExitStack() as stack:
            media = open_media(self._filesystem, self._bucket, self._prefix + key, span)
            answer = await transfers.on_time(0, stack.enter_async_context(media))
            fetch = self._fetch(key, answer.headers.get("X-Goog-Generation"))
            size = transfers.size_to_read(answer.headers.get("Content-Range"), answer.content_length, max_bytes)
            source = transfers.Download(answer.content.iter_any())
            data = await transfers.read_in_parts(size, source, fetch, max_bytes)
            return transfers.Downloaded(data, stated_crc32c(answer.headers), source.crc32c())

    async def _part(self, key: str, version: str | None, start: int, end: int) -> AsyncGenerator[bytes, None]:
        span = {"Range": f"bytes={start}-{end - 1}"}
        condition = {} if version is None else {"generation": version}
        async with open_media(self._filesystem, self._bucket, self._prefix + key, span, **condition) as answer:
            async for piece in answer.content.iter_any():
                yield piece

    @property
    def sends_parts(self) -> bool:
        return self._uploads.composes

    def _upload(
        self, key: str, data: bytes, *, exclusive: bool, checksum: str | None = None, in_parts: bool | None = None
    ) -> None:
        """The store itself refuses bytes that arrive damaged."""
        wanted = Upload(key, data, exclusive, checksum)
        try:
            self._run(key, partial(self._uploads.send, wanted, in_parts), None)
        except ObjectAbsentError as error:
            raise missing_bucket(self.url) from error

    def _call(self, method: str, key: str | None, **parts: Any) -> Answer:
        """One request about an object, or about the bucket's list of objects."""
        if key is not None:
            return self._request(method, "b/{}/o/{}", self._bucket, self._prefix + key, key=key, **parts)
        try:
            return self._request(method, "b/{}/o", self._bucket, key="", **parts)
        except ObjectAbsentError as error:
            raise missing_bucket(self.url) from error

    def _request(self, method: str, path: str, *names: str, key: str, **parts: Any) -> Answer:
        ask = partial(self._ask, method, path, *names, key=key, **parts)
        return self._run(key, ask, transfers.deadline_s(0))

    async def _ask(self, method: str, path: str, *names: str, key: str, num_bytes: int = 0, **parts: Any) -> Answer:
        """One request that moves `num_bytes`."""
        with self._sorted_errors(key):
            call = self._filesystem._call(method, path, *names, **parts)
            headers, body = await transfers.on_time(num_bytes, call)
            return headers, bytes(body)

    def _client(self) -> Any:
        with self._lock:
            if self._filesystem is None:
                try:
                    self._filesystem = start_client()
                except OSError as error:  # such as a missing file of credentials: not a missing object
                    raise sorted_error(PermissionError(str(error)), self.url) from error
            return self._filesystem

    def _parsed(self, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise StoreUnavailableError("the answer is no json", where=self.url) from error
        if not isinstance(answer, dict):
            raise StoreBrokenError("the answer is not an object", where=self.url)
        return answer

    def _listed(self, answer: dict[str, Any]) -> Iterator[str]:
        """The names in one page of a listing."""
        items = answer.get("items", [])
        for item in items if isinstance(items, list) else [None]:
            name = item.get("name") if isinstance(item, dict) else None
            if not isinstance(name, str):
                raise StoreBrokenError("a listing holds something without a name", where=self.url)
            yield name
