"""S3, and services that speak its language, through s3fs: its session, credentials and addresses, with our own
requests.

Requests are made one by one (`S3FileSystem._call_s3`), so that each of them carries its precondition and checksum, and
each answer can be checked. By itself, s3fs overwrites objects, repeats a create whose answer was lost and reports its
own object as another writer's, and caches listings. Checksums are sent as `x-amz-checksum-crc32c`, which the store
verifies, and also kept as metadata of the object, because some services do not know `x-amz-checksum-crc32c`.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from typing import Any

from diloco_cli import clock
from diloco_cli.errors import StoreError
from diloco_cli.store import transfers
from diloco_cli.store.bucket import BucketStore, ObjectAbsentError, missing_bucket
from diloco_cli.store.port import ObjectStat, StoreThrottledError, check_prefix
from diloco_cli.store.s3_client import sorted_error, start_client

_READ_BYTES = 1 << 20

SentParts = list[dict[str, Any]]


class S3Store(BucketStore):
    """Through s3fs."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(f"s3://{bucket}/{prefix}".rstrip("/"), sorted_error)
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._speed = transfers.UploadSpeed()

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

    def _remove(self, key: str) -> None:
        self._call(key, "delete_object")

    def _describe(self, key: str) -> ObjectStat:
        answer = self._call(key, "head_object")
        return ObjectStat(key, int(answer["ContentLength"]), answer["LastModified"].timestamp())

    async def _download(self, key: str, max_bytes: int | None) -> transfers.Downloaded:
        span = {} if max_bytes is None else {"Range": transfers.bound_header(max_bytes)}
        answer = await transfers.on_time(0, self._request("get_object", key, **span))
        size = transfers.size_to_read(answer.get("ContentRange"), answer.get("ContentLength"), max_bytes)
        async with answer["Body"]:  # enters the body itself or the stream it wraps, by the release of aiobotocore
            source = transfers.Download(answer["Body"].iter_chunks(_READ_BYTES))
            data = await transfers.read_in_parts(size, source, self._fetch(key, answer.get("ETag")), max_bytes)
        stated = answer.get("Metadata", {}).get(transfers.CHECKSUM_NAME)
        return transfers.Downloaded(data, stated, source.crc32c())

    async def _part(self, key: str, version: str | None, start: int, end: int) -> AsyncGenerator[bytes, None]:
        condition = {} if version is None else {"IfMatch": version}
        answer = await self._request("get_object", key, Range=f"bytes={start}-{end - 1}", **condition)
        async with answer["Body"]:
            async for piece in answer["Body"].iter_chunks(_READ_BYTES):
                yield piece

    def _upload(
        self, key: str, data: bytes, *, exclusive: bool, checksum: str | None = None, in_parts: bool | None = None
    ) -> None:
        given, checksum = checksum, checksum or transfers.crc32c(data)
        condition = {"IfNoneMatch": "*"} if exclusive else {}
        about = {"Metadata": {transfers.CHECKSUM_NAME: checksum}, "ContentType": "application/octet-stream"}
        pays = self._speed.pays_in_parts(len(data)) if in_parts is None else in_parts
        at_once = self._speed.at_once(len(data)) if pays else 1
        started_s = clock.monotonic_s()
        try:
            if pays:
                self._upload_parts(key, data, about, condition, given, at_once)
            else:
                self._call(key, "put_object", len(data), Body=data, ChecksumCRC32C=checksum, **about, **condition)
        except ObjectAbsentError as error:
            raise missing_bucket(self.url) from error
        self._speed.note(len(data), clock.monotonic_s() - started_s, at_once)

    def _upload_parts(
        self,
        key: str,
        data: bytes,
        about: dict[str, Any],
        condition: dict[str, Any],
        checksum: str | None,
        at_once: int,
    ) -> None:
        """The whole object appears with the last request, which also carries the condition."""
        begun = self._call(key, "create_multipart_upload", ChecksumAlgorithm="CRC32C", **about)
        upload = begun["UploadId"]
        try:
            parts = self._run(
                key, partial(self._send_parts, key, upload, data, checksum, at_once), transfers.deadline_s(len(data))
            )
            whole: dict[str, Any] = {"MultipartUpload": {"Parts": parts}, **condition}
            self._call(key, "complete_multipart_upload", len(data), UploadId=upload, **whole)
        except Exception:
            # Parts of an unfinished upload are kept, and billed; a bucket's lifecycle rule removes what this leaves.
            with suppress(StoreError, ObjectAbsentError):
                self._call(key, "abort_multipart_upload", UploadId=upload)
            raise

    async def _send_parts(self, key: str, upload: str, data: bytes, given: str | None, at_once: int) -> SentParts:
        """`given`: a checksum for every part in place of its own; then each part is sent once."""

        async def send(number: int, start: int, end: int) -> dict[str, Any]:
            part = data[start:end]  # a copy, because botocore takes no view: `at_once` of them at a time
            checksum = given or transfers.crc32c(part)
            try:
                with self._sorted_errors(key):
                    answer = await self._request(
                        "upload_part", key, UploadId=upload, PartNumber=number, Body=part, ChecksumCRC32C=checksum
                    )
            except StoreThrottledError:
                self._speed.throttled()
                raise
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32C": checksum}

        cuts = transfers.spans(0, len(data))
        sends = [partial(send, number, *span) for number, span in enumerate(cuts, start=1)]
        return await transfers.in_parallel(sends if given else [partial(transfers.persist, p) for p in sends], at_once)

    def _call(self, key: str | None, verb: str, num_bytes: int = 0, **parts: Any) -> dict[str, Any]:
        """One request about an object, or about the bucket, that moves `num_bytes`."""
        try:
            return self._run(key or "", partial(self._request, verb, key, **parts), transfers.deadline_s(num_bytes))
        except ObjectAbsentError as error:
            if key is None:
                raise missing_bucket(self.url) from error
            raise

    async def _request(self, verb: str, key: str | None, **parts: Any) -> dict[str, Any]:
        name = {} if key is None else {"Key": self._prefix + key}
        answer: dict[str, Any] = await self._filesystem._call_s3(verb, Bucket=self._bucket, **name, **parts)
        return answer

    def _client(self) -> object:
        with self._lock:
            if self._filesystem is None:
                self._filesystem = start_client()
            return self._filesystem
