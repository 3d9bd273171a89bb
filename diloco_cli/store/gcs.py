"""Google Cloud Storage through gcsfs: its session, credentials and addresses, with our own requests.

Requests are made one by one (`GCSFileSystem.call`), because only so each of them carries its precondition
and checksum, and each answer can be judged. Left to itself, gcsfs repeats a create whose answer was lost,
gets "precondition failed" for its own object and reports it as somebody else's; it has no read timeout; and
its listing cache hides what others wrote.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from typing import Any

from diloco_cli import clock, randomness
from diloco_cli.errors import StoreError
from diloco_cli.randomness import nonce
from diloco_cli.store import transfers
from diloco_cli.store.answers import RangeBehindEndError, intact, settled, within_range
from diloco_cli.store.gcs_client import (
    header_values,
    missing_bucket,
    multipart_body,
    open_media,
    sorted_error,
    start_client,
    stated_crc32c,
)
from diloco_cli.store.keys import check_key, check_prefix
from diloco_cli.store.port import Created, Exists, ObjectStat, StoreBrokenError, StoreUnavailableError, holder_bytes
from diloco_cli.store.retry import pause_s

CHUNK_BYTES = 32 << 20
"""Chunks of a resumable upload, one after the other; GCS wants multiples of 256 KiB."""


class GCSStore:
    """A bucket and prefix. The client starts at the first call, in the process that makes it: never share
    one store with a forked child. Retries are not made here, but for the parts of a large object."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self._lock = threading.Lock()
        self._filesystem: Any = None

    def create(self, key: str, data: bytes) -> Created | Exists:
        name = self._name(key)
        try:
            self._upload(name, data, {"ifGenerationMatch": "0"})
            return Created()
        except (FileExistsError, StoreUnavailableError) as doubt:
            return settled(self.get(key, holder_bytes(data)), data, doubt, self._where(name))

    def get(self, key: str, most_bytes: int | None = None) -> bytes | None:
        from fsspec.asyn import sync

        name, filesystem = self._name(key), self._client()
        try:
            stated, chunks = sync(filesystem.loop, self._download, filesystem, name, most_bytes)
        except FileNotFoundError:
            return None
        except StoreError:
            raise
        except Exception as error:  # six libraries below, each with errors of its own: all are sorted here
            found = sorted_error(error, self._where(name))
            if isinstance(found, RangeBehindEndError):
                return b""  # no range of an empty object can be had
            raise found from error
        data = transfers.joined(chunks, most_bytes)
        is_whole = most_bytes is None or len(data) <= most_bytes
        return intact(data, stated if is_whole else None, self._where(name))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        name = self._name(key)
        start, end = max(0, start), max(0, end)
        if start >= end:
            return None if self.stat(key) is None else b""
        wanted = {"Range": f"bytes={start}-{end - 1}"}
        try:
            _, data = self._call("GET", name, alt="media", headers=wanted, num_bytes=end - start)
        except FileNotFoundError:
            return None
        except RangeBehindEndError:
            return b""
        return within_range(data, end - start, self._where(name))

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

    def put(self, key: str, data: bytes) -> None:
        self._upload(self._name(key), data, {})

    def delete(self, key: str) -> None:
        try:
            self._call("DELETE", self._name(key))
        except FileNotFoundError:
            return

    def stat(self, key: str) -> ObjectStat | None:
        try:
            _, body = self._call("GET", self._name(key), fields="size,updated")
        except FileNotFoundError:
            return None
        answer = self._parsed(body)
        try:
            return ObjectStat(key, int(answer["size"]), datetime.fromisoformat(answer["updated"]).timestamp())
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StoreBrokenError("the store describes the object without size or time", where=self.url) from error

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _where(self, name: str | None) -> str:
        return f"gs://{self._bucket}/{name or self._prefix}"

    async def _download(
        self, filesystem: Any, name: str, most_bytes: int | None
    ) -> tuple[str | None, transfers.Chunks]:
        """The checksum that the store states, and the object in pieces, all of one generation."""
        span = {} if most_bytes is None else {"Range": transfers.bound_header(most_bytes)}
        async with AsyncExitStack() as stack:
            opening = stack.enter_async_context(open_media(filesystem, self._bucket, name, span))
            answer = await transfers.on_time(0, opening)
            generation = answer.headers.get("X-Goog-Generation")
            fetch = partial(self._fetch, filesystem, name, generation) if generation else None
            size = transfers.size_to_read(answer.headers.get("Content-Range"), answer.content_length, most_bytes)
            chunks = await transfers.read_in_parts(size, answer.content.iter_any(), fetch, most_bytes)
            return stated_crc32c(answer.headers), chunks

    async def _fetch(self, filesystem: Any, name: str, generation: str, start: int, end: int) -> transfers.Chunks:
        span = {"Range": f"bytes={start}-{end - 1}"}
        try:
            async with open_media(filesystem, self._bucket, name, span, generation=generation) as answer:
                chunks = [chunk async for chunk in answer.content.iter_any()]
        except FileNotFoundError as error:
            raise StoreUnavailableError("the object changed while it was read", where=self._where(name)) from error
        except Exception as error:
            raise sorted_error(error, self._where(name)) from error
        if sum(map(len, chunks)) != end - start:
            raise StoreUnavailableError("a part came short", where=self._where(name))
        return chunks

    def _upload(self, name: str, data: bytes, condition: dict[str, Any]) -> None:
        """The checksum goes with the bytes: the store itself refuses what arrived damaged."""
        upload = self._client().base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
        about = {"name": name, "crc32c": transfers.crc32c(data), "contentType": "application/octet-stream"}
        try:
            if len(data) < transfers.UPLOAD_IN_PARTS_FROM_BYTES:
                boundary = nonce()  # must not occur in the data
                self._request(
                    "POST",
                    upload,
                    self._bucket,
                    where=name,
                    num_bytes=len(data),
                    headers={"Content-Type": f"multipart/related; boundary={boundary}"},
                    data=multipart_body(boundary, about, data),
                    uploadType="multipart",
                    **condition,
                )
                return
            headers, _ = self._request(
                "POST", upload, self._bucket, where=name, json=about, uploadType="resumable", **condition
            )
        except FileNotFoundError as error:
            raise missing_bucket(self._bucket, self.url) from error
        sessions = header_values(headers, "Location")
        if not sessions:
            raise StoreUnavailableError("the store began no upload session", where=self._where(name))
        self._upload_chunks(sessions[0], name, data)

    def _upload_chunks(self, session: str, name: str, data: bytes) -> None:
        """One after the other. After a failure the session itself is asked how much it has."""
        kept = failures = 0
        in_doubt = False
        while True:
            chunk = memoryview(data)[kept : kept + (0 if in_doubt else CHUNK_BYTES)]
            span = "*" if in_doubt else f"{kept}-{kept + len(chunk) - 1}"
            try:
                headers, done = self._request(
                    "PUT",
                    session,
                    where=name,
                    num_bytes=len(chunk),
                    headers={"Content-Range": f"bytes {span}/{len(data)}"},
                    data=chunk,
                )
            except FileNotFoundError as error:
                raise StoreUnavailableError("the upload's session is gone", where=self._where(name)) from error
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
                raise StoreUnavailableError("the upload makes no progress", where=self._where(name))
            failures = 0 if kept > had else failures
            in_doubt = False

    def _call(self, method: str, name: str | None, **parts: Any) -> tuple[Mapping[str, str], bytes]:
        """One request about an object, or about the bucket's list of objects."""
        if name is not None:
            return self._request(method, "b/{}/o/{}", self._bucket, name, where=name, **parts)
        try:
            return self._request(method, "b/{}/o", self._bucket, where=None, **parts)
        except FileNotFoundError as error:
            raise missing_bucket(self._bucket, self.url) from error

    def _request(
        self,
        method: str,
        path: str,
        *names: str,
        where: str | None,
        num_bytes: int = 0,
        **parts: Any,
    ) -> tuple[Mapping[str, str], bytes]:
        """One that moves so many bytes. FileNotFoundError, FileExistsError (a precondition failed),
        RangeBehindEndError, or an error of the port."""
        limit_s = transfers.deadline_s(num_bytes)
        try:
            headers, body = self._client().call(method, path, *names, timeout=limit_s, **parts)
        except (FileNotFoundError, FileExistsError, StoreError):
            raise
        except Exception as error:
            raise sorted_error(error, self._where(where)) from error
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
