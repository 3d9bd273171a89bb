"""S3, and services that speak its language, through s3fs: its session, credentials and addresses, with our own
requests.

Requests are made one by one (`S3FileSystem._call_s3`), because only so each of them carries its precondition and
checksum, and each answer can be judged. Left to itself, s3fs overwrites without asking, repeats a create whose answer
was lost and reports its own object as somebody else's, and caches listings. Checksums go up as `x-amz-checksum-crc32c`,
which the store verifies, and are kept as metadata of the object, so that they come down with it from services that do
not know the former.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from diloco_cli import clock
from diloco_cli.errors import StoreError
from diloco_cli.store import transfers
from diloco_cli.store.answers import (
    ConditionFailedError,
    ObjectAbsentError,
    RangeBehindEndError,
    intact,
    settled,
    within_range,
)
from diloco_cli.store.keys import check_key, check_prefix
from diloco_cli.store.port import Created, Exists, ObjectStat, StoreUnavailableError, holder_bytes
from diloco_cli.store.s3_client import (
    missing_bucket,
    sorted_error,
    start_client,
)

_READ_BYTES = 1 << 20

T = TypeVar("T")
SentParts = list[dict[str, Any]]


class S3Store:
    """A bucket and prefix. The client starts at the first call, in the process that makes it: never share one store
    with a forked child. Retries are not made here, but for the parts of a large object."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._up_bytes_per_s: float | None = None  # through one connection, when last seen

    def create(self, key: str, data: bytes) -> Created | Exists:
        name = self._name(key)
        try:
            self._upload(name, data, {"IfNoneMatch": "*"})
            return Created()
        except (ConditionFailedError, StoreUnavailableError) as doubt:
            # Also after a 409: two creates at once, of which either may have won.
            return settled(self.get(key, holder_bytes(data)), data, doubt, self._where(name))

    def get(self, key: str, most_bytes: int | None = None) -> bytes | None:
        name = self._name(key)
        try:
            stated, chunks = self._run(name, partial(self._download, name, most_bytes), None)
        except ObjectAbsentError:
            return None
        except RangeBehindEndError:
            return b""  # no range of an empty object can be had
        data = transfers.joined(chunks, most_bytes)
        is_whole = most_bytes is None or len(data) <= most_bytes
        return intact(data, stated if is_whole else None, self._where(name))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        name = self._name(key)
        start, end = max(0, start), max(0, end)
        if start >= end:
            return None if self.stat(key) is None else b""
        try:
            chunks = self._run(name, partial(self._fetch, name, start, end, {}), transfers.deadline_s(end - start))
        except ObjectAbsentError:
            return None
        except RangeBehindEndError:
            return b""
        return within_range(b"".join(chunks), end - start, self._where(name))

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        page: dict[str, Any] = {"Prefix": self._prefix + check_prefix(prefix)}
        if after:
            page["StartAfter"] = self._prefix + after
        found: list[str] = []
        while len(found) < limit:
            wanted = min(transfers.LIST_PAGE, limit - len(found))
            answer = self._call(None, "list_objects_v2", MaxKeys=wanted, **page)
            found.extend(str(item["Key"]).removeprefix(self._prefix) for item in answer.get("Contents", []))
            if not answer.get("NextContinuationToken"):
                break
            page["ContinuationToken"] = answer["NextContinuationToken"]
        return found[: max(0, limit)]

    def put(self, key: str, data: bytes) -> None:
        self._upload(self._name(key), data, {})

    def delete(self, key: str) -> None:
        try:
            self._call(self._name(key), "delete_object")
        except ObjectAbsentError:  # S3 itself says nothing here, others do
            return

    def stat(self, key: str) -> ObjectStat | None:
        try:
            answer = self._call(self._name(key), "head_object")
        except ObjectAbsentError:
            return None
        return ObjectStat(key, int(answer["ContentLength"]), answer["LastModified"].timestamp())

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _where(self, name: str | None) -> str:
        return f"s3://{self._bucket}/{name or self._prefix}"

    async def _download(self, name: str, most_bytes: int | None) -> tuple[str | None, transfers.Chunks]:
        """The checksum in the object's metadata, and the object in pieces, all of one version."""
        span = {} if most_bytes is None else {"Range": transfers.bound_header(most_bytes)}
        request = self._filesystem._call_s3("get_object", Bucket=self._bucket, Key=name, **span)
        answer = await transfers.on_time(0, request)
        etag = answer.get("ETag")
        size = transfers.size_to_read(answer.get("ContentRange"), answer.get("ContentLength"), most_bytes)
        async with answer["Body"]:  # which names itself here, or what it wraps, by the release of aiobotocore
            fetch = partial(self._fetch_part, name, etag) if etag else None
            chunks = await transfers.read_in_parts(size, answer["Body"].iter_chunks(_READ_BYTES), fetch, most_bytes)
        return answer.get("Metadata", {}).get(transfers.CHECKSUM_NAME), chunks

    async def _fetch(self, name: str, start: int, end: int, condition: dict[str, Any]) -> transfers.Chunks:
        answer = await self._filesystem._call_s3(
            "get_object", Bucket=self._bucket, Key=name, Range=f"bytes={start}-{end - 1}", **condition
        )
        async with answer["Body"]:
            return [chunk async for chunk in answer["Body"].iter_chunks(_READ_BYTES)]

    async def _fetch_part(self, name: str, etag: str, start: int, end: int) -> transfers.Chunks:
        try:
            chunks = await self._fetch(name, start, end, {"IfMatch": etag})
        except Exception as error:
            found = sorted_error(error, self._where(name))
            if isinstance(found, (ObjectAbsentError, ConditionFailedError, RangeBehindEndError)):
                raise StoreUnavailableError("the object changed while it was read", where=self._where(name)) from error
            raise found from error
        if sum(map(len, chunks)) != end - start:
            raise StoreUnavailableError("a part came short", where=self._where(name))
        return chunks

    def _upload(self, name: str, data: bytes, condition: dict[str, Any]) -> None:
        checksum = transfers.crc32c(data)
        about = {"Metadata": {transfers.CHECKSUM_NAME: checksum}, "ContentType": "application/octet-stream"}
        try:
            if transfers.upload_pays_in_parts(len(data), self._up_bytes_per_s):
                self._upload_parts(name, data, about, condition)
                return
            started_s = clock.monotonic_s()
            self._call(name, "put_object", len(data), Body=data, ChecksumCRC32C=checksum, **about, **condition)
            if len(data) >= transfers.PROBE_BYTES:
                self._up_bytes_per_s = len(data) / max(clock.monotonic_s() - started_s, 1e-6)
        except ObjectAbsentError as error:
            raise missing_bucket(self.url) from error

    def _upload_parts(self, name: str, data: bytes, about: dict[str, Any], condition: dict[str, Any]) -> None:
        """The object appears, whole, with the last request, which also carries the condition."""
        begun = self._call(name, "create_multipart_upload", ChecksumAlgorithm="CRC32C", **about)
        upload = begun["UploadId"]
        try:
            parts = self._run(name, partial(self._send_parts, name, upload, data), transfers.deadline_s(len(data)))
            self._call(
                name, "complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": parts}, **condition
            )
        except Exception:
            self._abandon(name, upload)
            raise

    async def _send_parts(self, name: str, upload: str, data: bytes) -> SentParts:
        async def send(number: int, start: int, end: int) -> dict[str, Any]:
            part = data[start:end]  # a copy, because botocore takes no view: PARALLEL_PARTS of them at a time
            checksum = transfers.crc32c(part)
            try:
                answer = await self._filesystem._call_s3(
                    "upload_part",
                    Bucket=self._bucket,
                    Key=name,
                    UploadId=upload,
                    PartNumber=number,
                    Body=part,
                    ChecksumCRC32C=checksum,
                )
            except Exception as error:
                raise sorted_error(error, self._where(name)) from error
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32C": checksum}

        cuts = transfers.spans(0, len(data))
        sends = [partial(send, number, *span) for number, span in enumerate(cuts, start=1)]
        return await transfers.in_parallel([partial(transfers.persist, part) for part in sends])

    def _abandon(self, name: str, upload: str) -> None:
        """Parts of an upload that never ends are kept, and paid for; a bucket's lifecycle rule catches the rest."""
        try:
            self._call(name, "abort_multipart_upload", UploadId=upload)
        except (StoreError, ObjectAbsentError):
            return

    def _call(self, name: str | None, verb: str, num_bytes: int = 0, **parts: Any) -> dict[str, Any]:
        """One request about an object, or about the bucket, that takes so many bytes with it."""

        async def request() -> dict[str, Any]:
            key = {"Key": name} if name is not None else {}
            answer: dict[str, Any] = await self._filesystem._call_s3(verb, Bucket=self._bucket, **key, **parts)
            return answer

        try:
            return self._run(name, request, transfers.deadline_s(num_bytes))
        except ObjectAbsentError as error:
            if name is None:
                raise missing_bucket(self.url) from error
            raise

    def _run(self, name: str | None, work: Callable[[], Awaitable[T]], limit_s: float | None) -> T:
        """ObjectAbsentError, ConditionFailedError, RangeBehindEndError, or an error of the port. Without a limit the
        work sees to its own time."""
        from fsspec.asyn import sync

        try:
            filesystem = self._started()
            result: T = sync(filesystem.loop, work, timeout=limit_s)
            return result
        except Exception as error:  # five libraries below, each with errors of its own: all are sorted here
            found = sorted_error(error, self._where(name))
            if found is error:
                raise
            raise found from error

    def _started(self) -> Any:
        with self._lock:
            if self._filesystem is None:
                self._filesystem = start_client()
            return self._filesystem
