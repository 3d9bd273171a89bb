"""Google Cloud Storage through gcsfs: its session, credentials and addresses, with our own requests.

Requests are made one by one (`GCSFileSystem._call`), so that each of them carries its precondition and checksum, and
each answer can be checked. By itself, gcsfs repeats a create whose answer was lost, gets "precondition failed" for its
own object and reports it as another writer's; it has no read timeout; and its listing cache hides objects of other
writers.

A small object goes up in one request, a larger one in parts through several connections, which the store then composes
to the object. Parts are objects below PARTS, and their writer deletes them; those of a killed writer are deleted after
a day (`discard_parts`). Composing alone may carry the condition that makes a create exclusive: the XML API's uploads in
parts take none. Where a bucket's policy forbids parts, one request carries an object of any size.

Each request carries the checksum of its bytes, which GCS compares and refuses if it is wrong.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from diloco_cli import clock
from diloco_cli.environment import environment_value, environment_within, set_environment_default
from diloco_cli.errors import DilocoError
from diloco_cli.randomness import nonce
from diloco_cli.store import transfers
from diloco_cli.store.bucket import (
    FULL,
    RETRYABLE_STATUS,
    TOO_MANY,
    BucketStore,
    ConditionFailedError,
    ObjectAbsentError,
    RangeBehindEndError,
    Retention,
    check_endpoint,
    error_text,
    foreign_answer,
    missing_bucket,
    no_space,
    throttled,
)
from diloco_cli.store.port import (
    Discarded,
    ObjectStat,
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
    UploadDamagedError,
    all_keys,
    check_prefix,
)
from diloco_cli.store.url import KINDS, StoreUrl

CREDENTIALS_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
PAYER_VARIABLE = "GOOGLE_CLOUD_QUOTA_PROJECT"  # as Google's own tools name it
METADATA_HOST = "metadata.google.internal"  # tells a machine in Google's cloud its credentials
SPOKEN_FOR = (  # by one of them the user says where credentials are, or that none are needed
    CREDENTIALS_VARIABLE,
    "STORAGE_EMULATOR_HOST",
    "GCE_METADATA_HOST",
    "GCE_METADATA_ROOT",
    "GCE_METADATA_IP",
)
PARTS = "parts-of-uploads"
"""Parts of the object `key` are `parts-of-uploads/<key>/<nonce>-<number>`."""
PART_NAME = re.compile(rf"{PARTS}/.+/[0-9a-f]{{32}}-[0-9]{{2}}")
OLD_PART_S = 86_400.0
REFUSED_FOR_S = 600.0  # after a refusal, which may have been that of an old token, no more parts are made for so long
MOST_COMPOSED = 32  # parts of an object, at once
IN_PARTS_FROM_BYTES = 32 << 20
_READ_BUFFER_BYTES = 1 << 20
"""A smaller one makes aiohttp stop and start the connection all the time."""
_CONTENT_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")
_OF_OLD_VERSIONS = {"numNewerVersions", "daysSinceNoncurrentTime", "noncurrentTimeBefore"}
_KIND, _PAGE = "application/octet-stream", "text/html"
_DOES_NOT_COMPOSE = (ObjectAbsentError, StoreForbiddenError, StoreBrokenError)


class GCSStore(BucketStore):
    """Through gcsfs."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(f"gs://{bucket}/{prefix}".rstrip("/"), sorted_error)
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._parts_from_s = 0.0

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        page: dict[str, str] = {"prefix": self._prefix + check_prefix(prefix)}
        if after:
            page["startOffset"] = self._prefix + after  # inclusive: one key more is asked for, and dropped
        found: list[str] = []
        while len(found) < limit:
            wanted = min(transfers.LIST_PAGE, limit - len(found) + 1)
            fields = "items(name),nextPageToken"
            answer = self._about_bucket("b/{}/o", maxResults=str(wanted), fields=fields, **page)
            keys = [name.removeprefix(self._prefix) for name in self._listed(answer)]
            found.extend(key for key in keys if key > after)
            if not answer.get("nextPageToken"):
                break
            page["pageToken"] = answer["nextPageToken"]
        return found[: max(0, limit)]

    async def _remove(self, key: str) -> None:
        await self._ask_of("DELETE", key)

    async def _describe(self, key: str) -> ObjectStat:
        answer = self._parsed(await self._ask_of("GET", key, fields="size,updated"))
        try:
            return ObjectStat(key, int(answer["size"]), datetime.fromisoformat(answer["updated"]).timestamp())
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StoreBrokenError("the store describes the object without size or time", where=self.url) from error

    @asynccontextmanager
    async def _opened(
        self, key: str, start: int, end: int | None, version: str | None
    ) -> AsyncIterator[transfers.Opened]:
        """gcsfs itself gives only whole bodies. Leaving early closes the connection."""
        from gcsfs.retry import validate_response

        filesystem, names = self._filesystem, (self._bucket, self._prefix + key)
        condition = {} if version is None else {"generation": version}
        await filesystem._set_session()
        async with filesystem.session.request(
            method="GET",
            url=filesystem._format_path("b/{}/o/{}", names),
            params=filesystem._get_params({"alt": "media", **condition}),
            headers=filesystem._get_headers({"Range": f"bytes={start}-{'' if end is None else end - 1}"}),
            timeout=filesystem.requests_timeout,
            read_bufsize=_READ_BUFFER_BYTES,
        ) as answer:
            if answer.status >= 400:
                validate_response(answer.status, await answer.read(), "b/{}/o/{}", names)
            if answer.content_type == _PAGE and stated_crc32c(answer.headers) is None:
                raise foreign_answer(self._where(key))
            ranged = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            size = int(ranged[1]) if ranged else answer.content_length
            known = answer.headers.get("X-Goog-Generation") if ranged else None  # of what has no ranges, fetch none
            yield transfers.Opened(answer.content.iter_any(), size, known, stated_crc32c(answer.headers))

    def retention(self, key: str) -> Retention:
        about = self._about_bucket("b/{}", fields="softDeletePolicy(retentionDurationSeconds),versioning(enabled)")
        if (about.get("versioning") or {}).get("enabled"):
            return Retention(None, f"gcloud storage buckets update gs://{self._bucket} --no-versioning")
        kept_s = float((about.get("softDeletePolicy") or {}).get("retentionDurationSeconds", 0))
        return Retention(kept_s, KINDS["gs"].keeps_nothing.format(place=self._bucket))

    def expiry(self) -> str:
        """Of the rules that concern these keys: one may be for others, or only for versions that were replaced."""
        found = []
        for rule in (self._about_bucket("b/{}", fields="lifecycle(rule)").get("lifecycle") or {}).get("rule") or ():
            limits = rule.get("condition") or {}
            given = limits.get("matchesPrefix") or [""]
            is_here = any(self._prefix.startswith(prefix) or prefix.startswith(self._prefix) for prefix in given)
            is_of_newest = limits.get("isLive") is not False and not _OF_OLD_VERSIONS & limits.keys()
            if (rule.get("action") or {}).get("type") == "Delete" and is_here and is_of_newest:
                found.append(", ".join(f"{name}: {value}" for name, value in limits.items()))
        return "; ".join(found)

    def _about_bucket(self, path: str, **parts: Any) -> dict[str, Any]:
        """The parsed answer to a question about the bucket."""
        try:
            body = self._run("", partial(self._ask, "GET", path, self._bucket, key="", **parts), None)
        except ObjectAbsentError as error:
            raise missing_bucket(self.url) from error
        return self._parsed(body)

    async def _ask_of(self, method: str, key: str, action: str = "", num_bytes: int = 0, **parts: Any) -> bytes:
        """One request about an object."""
        names = self._bucket, self._prefix + key
        return await self._ask(method, f"b/{{}}/o/{{}}{action}", *names, key=key, num_bytes=num_bytes, **parts)

    async def _ask(self, method: str, path: str, *names: str, key: str, num_bytes: int = 0, **parts: Any) -> bytes:
        """The answer to one request that moves `num_bytes`. `path` is below the API's address, or an address."""
        with self._sorted_errors(key):
            call = self._filesystem._call(method, path, *names, **parts)
            headers, body = await transfers.on_time(num_bytes, call)
            if str(headers.get("Content-Type", "")).startswith(_PAGE):
                raise foreign_answer(self._where(key))
            return bytes(body)

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

    async def _upload(self, key: str, data: bytes, exclusive: bool) -> None:
        """The store itself refuses bytes that arrive damaged."""
        condition = {"ifGenerationMatch": "0"} if exclusive else {}
        in_parts = clock.monotonic_s() >= self._parts_from_s and len(data) >= IN_PARTS_FROM_BYTES
        if not (in_parts and await self._composed(key, data, condition)):
            await self._send(key, data, condition)

    async def _send(self, key: str, data: bytes | memoryview, condition: dict[str, str], at_once: int = 1) -> bytes:
        """One request; the object's description. `at_once`: so many uploads share the link."""
        about = {"name": self._prefix + key, "crc32c": await _checksum(data), "contentType": _KIND}
        boundary = nonce()  # must not occur in the data
        path = str(self._filesystem.base).replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
        body = io.BytesIO(multipart_body(boundary, about, data))  # bytes would go to TLS at once, and block the loop
        parts = {"data": body, "uploadType": "multipart", **condition}
        headers = {"Content-Type": f"multipart/related; boundary={boundary}"}
        return await self._ask(
            "POST", path, self._bucket, key=key, num_bytes=at_once * len(data), headers=headers, **parts
        )

    async def _composed(self, key: str, data: bytes, condition: dict[str, str]) -> bool:
        """Upload in parts; False if the store, or a policy of the bucket, refuses that: none are tried for a while."""
        spans, own = transfers.spans(0, len(data), MOST_COMPOSED), nonce()
        names = [f"{PARTS}/{key}/{own}-{number:02d}" for number in range(len(spans))]
        at_once = transfers.parts_at_once(len(data))

        async def send(name: str, start: int, end: int) -> dict[str, str]:
            made = await self._send(name, memoryview(data)[start:end], {}, at_once)
            return {"name": self._prefix + name, "generation": _described(made, "generation")}

        sends = [
            partial(transfers.persist, partial(send, name, *span)) for name, span in zip(names, spans, strict=True)
        ]
        if condition:
            await self._refuse_existing(key)
        composed = False
        try:
            parts = transfers.in_parallel(sends, partial(transfers.uploads_at_once, len(data)))
            sources = await transfers.on_time(len(data), parts)
            await self._compose(key, data, sources, condition)
            composed = True
        except _DOES_NOT_COMPOSE:
            self._parts_from_s = clock.monotonic_s() + REFUSED_FOR_S
        finally:
            discards = [partial(self._discarded, name, composed) for name in names]
            if not all(await transfers.in_parallel(discards, lambda: at_once)):
                self._parts_from_s = clock.monotonic_s() + REFUSED_FOR_S
        return composed

    async def _refuse_existing(self, key: str) -> None:
        """Raises ConditionFailedError if there is an object: composing would find it after all parts had gone up."""
        try:
            await self._ask_of("GET", key, fields="size")
        except _DOES_NOT_COMPOSE:  # or may not be looked at: composing decides
            return
        raise ConditionFailedError

    async def _compose(self, key: str, data: bytes, sources: Sequence[Any], condition: dict[str, str]) -> None:
        parts = {"json": {"destination": {"contentType": _KIND}, "sourceObjects": sources}, **condition}
        made = await self._ask_of("POST", key, "/compose", len(data), **parts)
        if _described(made, "crc32c") != await _checksum(data):
            await self._ask_of("DELETE", key, ifGenerationMatch=_described(made, "generation"))
            raise UploadDamagedError("the parts were composed to another object", where=self._where(key))

    async def _discarded(self, name: str, persistently: bool) -> bool:
        """Delete a part; False if that is refused."""

        async def delete() -> None:
            with suppress(ObjectAbsentError):
                await self._ask_of("DELETE", name)

        try:
            await (transfers.persist(delete) if persistently else delete())
        except StoreUnavailableError:
            return True
        except DilocoError:
            return False
        return True


async def _checksum(data: bytes | memoryview) -> str:
    """Beside what the loop of all transfers does."""
    return await asyncio.to_thread(transfers.crc32c, data)


def _described(description: bytes, name: str) -> str:
    """A field of an object's description. Raises StoreUnavailableError if there is none."""
    try:
        return str(json.loads(description)[name])
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise StoreUnavailableError("the store does not describe the object that it took") from error


def discard_parts(url: StoreUrl) -> Discarded:
    """Delete the parts that no upload has used for a day, as far as the store allows it."""
    store = GCSStore(url.place, url.prefix)
    sizes: list[int] = []
    with suppress(DilocoError):
        for key in filter(PART_NAME.fullmatch, all_keys(store, f"{PARTS}/")):
            with suppress(DilocoError):
                found = store.stat(key)
                if found is not None and clock.wall_s() - found.modified_s >= OLD_PART_S:
                    store.delete(key)
                    sizes.append(found.size_bytes)
    return Discarded(len(sizes), sum(sizes))


def start_client() -> Any:
    """A new file system of gcsfs; it belongs to the process that made it.

    Without credentials google.auth asks the metadata server; where there is none that takes ten seconds, in which a
    command gives up and says that the store gave no answer. So it is asked only where its name is known. That nobody
    can tell now, for want of a name server, makes no client anonymous for the rest of its life."""
    set_environment_default("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it probes each bucket over gRPC
    check_credentials()
    unknown = _unknown_metadata_host()
    with nullcontext() if unknown is None else environment_within("NO_GCE_CHECK", "true"):
        client = _connected()
    if unknown is not None and unknown.errno != socket.EAI_NONAME and client.credentials.credentials is None:
        raise StoreUnavailableError(
            f"no credentials, and no name is found now: {unknown.strerror}", where=METADATA_HOST
        )
    return client


def _unknown_metadata_host() -> socket.gaierror | None:
    """Why its name leads nowhere; None if it leads somewhere, or need not be known."""
    if not any(environment_value(name) for name in SPOKEN_FOR):
        try:
            socket.getaddrinfo(METADATA_HOST, None)
        except socket.gaierror as error:
            return error
    return None


def _connected() -> Any:
    import aiohttp
    from gcsfs.core import GCSFileSystem

    class OneTryGCSFileSystem(GCSFileSystem):  # type: ignore[misc]
        """gcsfs by itself would try each request six times, without our deadlines."""

        _request = getattr(GCSFileSystem._request, "__wrapped__", GCSFileSystem._request)

    emulator = environment_value("STORAGE_EMULATOR_HOST")
    if emulator:
        check_endpoint(emulator, "STORAGE_EMULATOR_HOST")
    return OneTryGCSFileSystem(
        token="anon" if emulator else None,
        requester_pays=environment_value(PAYER_VARIABLE) or False,
        use_listings_cache=False,
        skip_instance_cache=True,
        requests_timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=transfers.CONNECT_TIMEOUT_S, sock_read=transfers.SILENCE_TIMEOUT_S
        ),
    )


def check_credentials() -> None:
    """gcsfs passes over a file that it cannot read, and then asks for credentials where none are, for long."""
    place = None if environment_value("STORAGE_EMULATOR_HOST") else environment_value(CREDENTIALS_VARIABLE)
    try:
        known = None if place is None else json.loads(Path(place).read_bytes())
        reason = "" if known is None or isinstance(known, dict) else "not a JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = error_text(error)
    if reason:
        where, hint = f"{CREDENTIALS_VARIABLE}={place}", f"correct or unset it; {KINDS['gs'].login_hint}"
        raise StoreForbiddenError(f"the file of credentials cannot be read: {reason}", where=where, hint=hint)


def multipart_body(boundary: str, about: Mapping[str, str], data: bytes | memoryview) -> bytes:
    """An upload in one request: the object's description, and its bytes, in which the boundary must not occur."""
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(about)}\r\n"
    head += f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    return b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode()))


def sorted_error(error: Exception, where: str) -> Exception:
    """The port's error, or one of its answers, for what gcsfs, fsspec, aiohttp, requests or google.auth raised."""
    import aiohttp
    import requests
    from google.auth.exceptions import GoogleAuthError, TransportError

    if isinstance(error, FileNotFoundError):
        return ObjectAbsentError()
    if isinstance(error, FileExistsError):  # gcsfs's word for a precondition that failed
        return ConditionFailedError()
    status, text = _status(error), error_text(error)
    passing = (TimeoutError, ConnectionError, aiohttp.ClientError, requests.RequestException, TransportError)
    if status == 416:
        return RangeBehindEndError()
    if status == 400 and "crc32c" in text.lower():
        return UploadDamagedError(f"the bytes were damaged on their way: {text}", where=where)
    if status == FULL or (status == 403 and _is_over_quota(error)):
        return no_space(text, where)
    if status == TOO_MANY:
        return throttled(text, where)
    if status in RETRYABLE_STATUS or (status is None and isinstance(error, passing)):
        return StoreUnavailableError(f"the store does not answer: {text}", where=where)
    if status in {401, 403} or isinstance(error, (GoogleAuthError, PermissionError)):
        return StoreForbiddenError(f"not allowed: {text}", where=where, hint=KINDS["gs"].login_hint)
    if "requester pays" in text:
        hint = f"export {PAYER_VARIABLE}=PROJECT, the project that pays for the requests"
        return StoreForbiddenError(f"not allowed: {text}", where=where, hint=hint)
    return StoreBrokenError(f"the store refused the request: {text}", where=where)


def stated_crc32c(headers: Any) -> str | None:
    """The checksum of the whole object, also if the answer holds only a part of it."""
    for value in ",".join(headers.getall("X-Goog-Hash", [])).split(","):
        name, _, checksum = value.strip().partition("=")
        if name == "crc32c":
            return checksum
    return None


def _is_over_quota(error: Exception) -> bool:
    """By the store's message, the only part of a 403 beside its address that gcsfs passes on."""
    said = str(error).partition("\n")[2].lower()
    return "quota" in said and "exceed" in said


def _status(error: Exception) -> int | None:
    """The answer's HTTP status, as far as gcsfs tells: most have a code, 403 and 400 are texts."""
    code = getattr(error, "code", None) or getattr(error, "status", None)
    if code is not None and str(code).isdigit():
        return int(code)
    if str(error).startswith("Forbidden"):
        return 403
    return 400 if isinstance(error, ValueError) and str(error).startswith("Bad Request") else None
