"""Google Cloud Storage through gcsfs: its session, credentials and addresses, with our own requests.

Requests are made one by one (`GCSFileSystem.call`), so that each of them carries its precondition and
checksum, and each answer can be checked. By itself, gcsfs repeats a create whose answer was lost, gets
"precondition failed" for its own object and reports it as another writer's; it has no read timeout; and its
listing cache hides objects of other writers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any

from diloco_cli import clock, randomness
from diloco_cli.randomness import nonce
from diloco_cli.store import transfers
from diloco_cli.store.bucket import BucketStore, ObjectAbsentError, missing_bucket
from diloco_cli.store.gcs_client import (
    header_values,
    multipart_body,
    open_media,
    sorted_error,
    start_client,
    stated_crc32c,
)
from diloco_cli.store.port import (
    ObjectStat,
    StoreBrokenError,
    StoreUnavailableError,
    UploadDamagedError,
    check_prefix,
)
from diloco_cli.store.retry import pause_s

CHUNK_BYTES = 32 << 20
"""Chunks of a resumable upload, one after the other; GCS wants multiples of 256 KiB."""


class GCSStore(BucketStore):
    """Through gcsfs."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(f"gs://{bucket}/{prefix}".rstrip("/"), sorted_error)
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._lock = threading.Lock()
        self._filesystem: Any = None

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

    async def _part(self, key: str, version: str | None, start: int, end: int) -> transfers.Chunks:
        span = {"Range": f"bytes={start}-{end - 1}"}
        condition = {} if version is None else {"generation": version}
        async with open_media(self._filesystem, self._bucket, self._prefix + key, span, **condition) as answer:
            return [chunk async for chunk in answer.content.iter_any()]

    def _upload(
        self, key: str, data: bytes, *, exclusive: bool, checksum: str | None = None, in_parts: bool | None = None
    ) -> None:
        """The store itself refuses bytes that arrive damaged."""
        upload = self._client().base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
        about = {
            "name": self._prefix + key,
            "crc32c": checksum or transfers.crc32c(data),
            "contentType": "application/octet-stream",
        }
        condition: dict[str, Any] = {"ifGenerationMatch": "0"} if exclusive else {}
        try:
            if not (len(data) >= transfers.UPLOAD_IN_PARTS_FROM_BYTES if in_parts is None else in_parts):
                boundary = nonce()  # must not occur in the data
                self._request(
                    "POST",
                    upload,
                    self._bucket,
                    key=key,
                    num_bytes=len(data),
                    headers={"Content-Type": f"multipart/related; boundary={boundary}"},
                    data=multipart_body(boundary, about, data),
                    uploadType="multipart",
                    **condition,
                )
                return
            headers, _ = self._request(
                "POST", upload, self._bucket, key=key, json=about, uploadType="resumable", **condition
            )
        except ObjectAbsentError as error:
            raise missing_bucket(self.url) from error
        sessions = header_values(headers, "Location")
        if not sessions:
            raise StoreUnavailableError("the store began no upload session", where=self._where(key))
        self._upload_chunks(sessions[0], key, data)

    def _upload_chunks(self, session: str, key: str, data: bytes) -> None:
        """Upload one chunk after the other. After a failure, ask the session how many bytes it has."""
        kept = failures = 0
        in_doubt = False
        while True:
            chunk = memoryview(data)[kept : kept + (0 if in_doubt else CHUNK_BYTES)]
            span = "*" if in_doubt else f"{kept}-{kept + len(chunk) - 1}"
            try:
                headers, done = self._request(
                    "PUT",
                    session,
                    key=key,
                    num_bytes=len(chunk),
                    headers={"Content-Range": f"bytes {span}/{len(data)}"},
                    data=chunk,
                )
            except ObjectAbsentError as error:
                raise StoreUnavailableError("the upload's session is gone", where=self._where(key)) from error
            except UploadDamagedError:
                raise
            except StoreUnavailableError as error:
                failures += 1
                if failures == transfers.PART_TRIES:
                    raise
                in_doubt = True
                clock.sleep_s(pause_s(failures, error, randomness.jitter()))
                continue
            if done:  # the object's description; an unfinished upload is answered with nothing but a range
                return
            had, kept = kept, _kept_bytes(headers)
            if kept >= len(data) or (kept <= had and not in_doubt):
                raise StoreUnavailableError("the upload makes no progress", where=self._where(key))
            failures = 0 if kept > had else failures
            in_doubt = False

    def _call(self, method: str, key: str | None, **parts: Any) -> tuple[Mapping[str, str], bytes]:
        """One request about an object, or about the bucket's list of objects."""
        if key is not None:
            return self._request(method, "b/{}/o/{}", self._bucket, self._prefix + key, key=key, **parts)
        try:
            return self._request(method, "b/{}/o", self._bucket, key="", **parts)
        except ObjectAbsentError as error:
            raise missing_bucket(self.url) from error

    def _request(
        self, method: str, path: str, *names: str, key: str, num_bytes: int = 0, **parts: Any
    ) -> tuple[Mapping[str, str], bytes]:
        """One request that moves `num_bytes`."""
        with self._sorted_errors(key):
            limit_s = transfers.deadline_s(num_bytes)
            headers, body = self._client().call(method, path, *names, timeout=limit_s, **parts)
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


def _kept_bytes(headers: Any) -> int:
    """How much of an unfinished upload the store has, by its answer `Range: bytes=0-N`."""
    last = next(iter(header_values(headers, "Range")), "").rpartition("-")[2]
    return int(last) + 1 if last.isdecimal() else 0
