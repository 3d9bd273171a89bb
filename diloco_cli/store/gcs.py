"""Google Cloud Storage through gcsfs: its session, credentials and addresses, with our own requests.

Requests are made one by one (`GCSFileSystem.call`), because only so each of them carries its precondition
and checksum, and each answer can be judged. Left to itself, gcsfs repeats a create whose answer was lost,
gets "precondition failed" for its own object and reports it as somebody else's; it has no read timeout; and
its listing cache hides what others wrote.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from diloco_cli.environment import environment_value, set_environment_default
from diloco_cli.errors import StoreError
from diloco_cli.randomness import nonce
from diloco_cli.store.keys import check_key, check_prefix
from diloco_cli.store.port import (
    Created,
    Exists,
    ObjectStat,
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
)

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 30.0
CALL_DEADLINE_S = 60.0
SLOWEST_BYTES_PER_S = 50_000
"""An upload may take the deadline and its size at this rate. A download's size is not known beforehand: it
gets the time of the largest object."""
LARGEST_OBJECT_BYTES = 4 << 30
RESUMABLE_FROM_BYTES = 32 << 20
CHUNK_BYTES = 32 << 20
"""Chunks of a resumable upload; GCS wants multiples of 256 KiB."""
LIST_PAGE = 1000

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_RETRYABLE_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_CHECKSUM = re.compile(r"crc32c=([A-Za-z0-9+/]{6}==)")


class GCSStore:
    """A bucket and prefix. The client starts at the first call, in the process that makes it: never share
    one store with a forked child. Retries are not made here."""

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
            # Somebody else's success, or our own whose answer was lost, or no success at all: only reading
            # tells.
            holder = self.get(key)
            if holder is None:
                raise self._unavailable(name, doubt) from doubt
            return Created() if holder == data else Exists(holder)

    def get(self, key: str) -> bytes | None:
        name = self._name(key)
        try:
            headers, data = self._call("GET", name, alt="media", deadline_s=_deadline_s(LARGEST_OBJECT_BYTES))
        except FileNotFoundError:
            return None
        stated = _CHECKSUM.search(",".join(_header_values(headers, "X-Goog-Hash")))
        if stated and stated[1] != _crc32c(data):
            raise StoreUnavailableError("the bytes read do not match their crc32c", where=self._where(name))
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        name = self._name(key)
        start, end = max(0, start), max(0, end)
        if start >= end:
            return None if self.stat(key) is None else b""
        wanted = {"Range": f"bytes={start}-{end - 1}"}
        try:
            _, data = self._call("GET", name, alt="media", headers=wanted, deadline_s=_deadline_s(end - start))
        except FileNotFoundError:
            return None
        except _RangeError:
            return b""  # it starts behind the end of the object
        if len(data) > end - start:
            raise StoreBrokenError("the store ignores byte ranges", where=self._where(name))
        return data

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        page: dict[str, str] = {"prefix": self._prefix + check_prefix(prefix)}
        if after:
            page["startOffset"] = self._prefix + after  # inclusive: one key more is asked for, and dropped
        found: list[str] = []
        while len(found) < limit:
            wanted = min(LIST_PAGE, limit - len(found) + 1)
            fields = "items(name),nextPageToken"
            _, body = self._call("GET", None, maxResults=str(wanted), fields=fields, **page)
            answer = self._parsed(body)
            keys = [str(item["name"]).removeprefix(self._prefix) for item in answer.get("items", [])]
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
        return ObjectStat(key, int(answer["size"]), datetime.fromisoformat(answer["updated"]).timestamp())

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _where(self, name: str | None) -> str:
        return f"gs://{self._bucket}/{name or self._prefix}"

    def _upload(self, name: str, data: bytes, condition: dict[str, Any]) -> None:
        """The checksum goes with the bytes: the store itself refuses what arrived damaged."""
        upload = self._client().base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
        about = {"name": name, "crc32c": _crc32c(data), "contentType": "application/octet-stream"}
        try:
            if len(data) < RESUMABLE_FROM_BYTES:
                boundary = nonce()  # must not occur in the data
                self._request(
                    "POST",
                    upload,
                    self._bucket,
                    where=name,
                    deadline_s=_deadline_s(len(data)),
                    headers={"Content-Type": f"multipart/related; boundary={boundary}"},
                    data=_multipart(boundary, about, data),
                    uploadType="multipart",
                    **condition,
                )
                return
            headers, _ = self._request(
                "POST", upload, self._bucket, where=name, json=about, uploadType="resumable", **condition
            )
            session = _header_values(headers, "Location")[0]
            self._upload_chunks(session, name, data)
        except FileNotFoundError as error:
            raise self._missing_bucket() from error

    def _upload_chunks(self, session: str, name: str, data: bytes) -> None:
        start = 0
        while True:
            chunk = memoryview(data)[start : start + CHUNK_BYTES]
            headers, done = self._request(
                "PUT",
                session,
                where=name,
                deadline_s=_deadline_s(len(chunk)),
                headers={"Content-Range": f"bytes {start}-{start + len(chunk) - 1}/{len(data)}"},
                data=chunk,
            )
            if done:  # the object's description; an unfinished upload is answered with nothing but a range
                return
            kept = _header_values(headers, "Range") or ["bytes=0--1"]
            before, start = start, int(kept[0].partition("-")[2]) + 1
            if not before < start < len(data):
                raise StoreUnavailableError("the upload makes no progress", where=self._where(name))

    def _call(self, method: str, name: str | None, **parts: Any) -> tuple[Mapping[str, str], bytes]:
        """One request about an object, or about the bucket's list of objects."""
        if name is not None:
            return self._request(method, "b/{}/o/{}", self._bucket, name, where=name, **parts)
        try:
            return self._request(method, "b/{}/o", self._bucket, where=None, **parts)
        except FileNotFoundError as error:
            raise self._missing_bucket() from error

    def _request(
        self,
        method: str,
        path: str,
        *names: str,
        where: str | None,
        deadline_s: float = CALL_DEADLINE_S,
        **parts: Any,
    ) -> tuple[Mapping[str, str], bytes]:
        """FileNotFoundError, FileExistsError (a precondition failed), _RangeError, or an error of the
        port."""
        try:
            headers, body = self._client().call(method, path, *names, timeout=deadline_s, **parts)
        except (FileNotFoundError, FileExistsError, StoreError):
            raise
        except Exception as error:  # six libraries below, each with errors of its own: all are sorted here
            raise self._sorted(where, error) from error
        return headers, bytes(body)

    def _client(self) -> Any:
        with self._lock:
            if self._filesystem is None:
                try:
                    self._filesystem = _start_client()
                except OSError as error:  # such as a missing file of credentials: not a missing object
                    raise self._sorted(None, PermissionError(str(error))) from error
            return self._filesystem

    def _parsed(self, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise StoreUnavailableError("the answer is no json", where=self.url) from error
        if not isinstance(answer, dict):
            raise StoreBrokenError("the answer is not an object", where=self.url)
        return answer

    def _missing_bucket(self) -> StoreBrokenError:
        return StoreBrokenError(
            "no such bucket", where=self.url, hint=f"gcloud storage buckets create gs://{self._bucket}"
        )

    def _unavailable(self, name: str, doubt: Exception) -> StoreError:
        if isinstance(doubt, StoreError):
            return doubt
        return StoreUnavailableError("the object was deleted while it was created", where=self._where(name))

    def _sorted(self, name: str | None, error: Exception) -> Exception:
        """The port's error for what gcsfs, fsspec, aiohttp, requests or google.auth raised."""
        import aiohttp
        import requests
        from google.auth.exceptions import GoogleAuthError, TransportError

        where = self._where(name)
        status, text = _status(error), _short(error)
        passing = (
            TimeoutError,
            ConnectionError,
            aiohttp.ClientError,
            requests.RequestException,
            TransportError,
        )
        if status == 416:
            return _RangeError()
        if status == 400 and "crc32c" in text.lower():
            return StoreUnavailableError(f"the bytes were damaged on their way: {text}", where=where)
        if status in _RETRYABLE_STATUS or (status is None and isinstance(error, passing)):
            return StoreUnavailableError(f"the store does not answer: {text}", where=where)
        if status in {401, 403} or isinstance(error, (GoogleAuthError, PermissionError)):
            return StoreForbiddenError(
                f"not allowed: {text}",
                where=where,
                hint="gcloud auth application-default login; check the bucket's roles and this clock",
            )
        return StoreBrokenError(f"the store refused the request: {text}", where=where)


class _RangeError(Exception):
    """A range that starts behind the end of the object."""


def _start_client() -> Any:
    set_environment_default("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it probes each bucket over gRPC
    import aiohttp
    from gcsfs.core import GCSFileSystem

    class OneTryFileSystem(GCSFileSystem):  # type: ignore[misc]
        """gcsfs would repeat each request six times on its own, without regard for our deadlines."""

        _request = getattr(GCSFileSystem._request, "__wrapped__", GCSFileSystem._request)

    emulator = environment_value("STORAGE_EMULATOR_HOST")
    if emulator and not _is_safe_endpoint(emulator):
        raise StoreForbiddenError(
            "plain http is for loopback addresses only",
            where=f"STORAGE_EMULATOR_HOST={emulator}",
            hint="use https://, or unset STORAGE_EMULATOR_HOST",
        )
    return OneTryFileSystem(
        token="anon" if emulator else None,
        use_listings_cache=False,
        skip_instance_cache=True,
        requests_timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S),
    )


def _is_safe_endpoint(host: str) -> bool:
    parts = urlsplit(host if "://" in host else f"http://{host}")
    return parts.scheme == "https" or parts.hostname in _LOOPBACK


def _multipart(boundary: str, about: Mapping[str, str], data: bytes) -> bytes:
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(about)}\r\n"
    head += f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    return b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode()))


def _crc32c(data: bytes) -> str:
    import google_crc32c

    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def _deadline_s(num_bytes: int) -> float:
    return CALL_DEADLINE_S + num_bytes / SLOWEST_BYTES_PER_S


def _header_values(headers: Any, name: str) -> list[str]:
    return [str(value) for value in headers.getall(name, [])]


def _status(error: Exception) -> int | None:
    """The answer's HTTP status, as far as gcsfs tells: most have a code, 403 and 400 are texts."""
    code = getattr(error, "code", None) or getattr(error, "status", None)
    if code is not None and str(code).isdigit():
        return int(code)
    if str(error).startswith("Forbidden"):
        return 403
    return 400 if isinstance(error, ValueError) and str(error).startswith("Bad Request") else None


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)[:300]
