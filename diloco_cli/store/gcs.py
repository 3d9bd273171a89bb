"""Google Cloud Storage through gcsfs: its session, credentials and addresses, with our own requests.

Requests are made one by one (`GCSFileSystem._call`), so that each of them carries its precondition and checksum, and
each answer can be checked. By itself, gcsfs repeats a create whose answer was lost, gets "precondition failed" for its
own object and reports it as another writer's; it has no read timeout; and its listing cache hides objects of other
writers.

An upload goes, with its precondition and checksum,

small   in one request
large   through one connection, in chunks of a resumable upload
larger  in parts through several connections, which the store then composes to the object. Parts are objects below
        PARTS, and their writer deletes them; those of a killed writer are deleted after a day (`discard_parts`).
        Composing alone may carry the condition that makes a create exclusive: the XML API's uploads in parts take none.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from diloco_cli import clock, randomness
from diloco_cli.environment import environment_value, set_environment_default
from diloco_cli.errors import DilocoError, NoSpaceError, StoreError
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
    missing_bucket,
    no_space,
    throttled,
)
from diloco_cli.store.port import (
    Discarded,
    ObjectStat,
    StoreBrokenError,
    StoreForbiddenError,
    StoreThrottledError,
    StoreUnavailableError,
    UploadDamagedError,
    check_key,
    check_prefix,
)
from diloco_cli.store.retry import pause_s
from diloco_cli.store.url import KINDS, StoreUrl

PARTS = "parts-of-uploads"
"""Parts of the object `key` are `parts-of-uploads/<key>/<nonce>-<number>`."""
PART_NAME = re.compile(rf"{PARTS}/.+/[0-9a-f]{{32}}-[0-9]{{2}}")
OLD_PART_S = 86_400.0
REFUSED_FOR_S = 600.0  # after a refusal, which may have been that of an old token, no more parts are made for so long
MOST_COMPOSED = 32  # parts of an object, at once
CHUNK_BYTES = 32 << 20
"""Chunks of a resumable upload, one after the other; GCS wants multiples of 256 KiB."""
_READ_BUFFER_BYTES = 1 << 20
"""A smaller one makes aiohttp stop and start the connection all the time."""
_TRIAL = b"these bytes have another checksum"
_KIND = "application/octet-stream"
_DOES_NOT_COMPOSE = (ObjectAbsentError, StoreForbiddenError, StoreBrokenError)

Answer = tuple[Mapping[str, str], bytes]


@dataclass(frozen=True)
class Upload:
    """An object to be made. `given`: a checksum for it, or for every part of it, in place of its own."""

    key: str
    data: bytes
    exclusive: bool
    given: str | None = None

    @property
    def condition(self) -> dict[str, Any]:
        return {"ifGenerationMatch": "0"} if self.exclusive else {}


class GCSStore(BucketStore):
    """Through gcsfs."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(f"gs://{bucket}/{prefix}".rstrip("/"), sorted_error)
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._speed = transfers.UploadSpeed()
        self._composes_from_s = 0.0

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
    def sends_parts(self) -> bool:  # type: ignore[override]
        return clock.monotonic_s() >= self._composes_from_s

    def prove_uploads(self, key: str) -> bool:
        """Upload a few bytes with a wrong checksum, in one request and in parts: the store must refuse both. What it
        accepts is deleted, if it may be."""
        self._checks_uploads = all(self._refuses_a_wrong_checksum(key, in_parts) for in_parts in (False, True))
        return self._checks_uploads

    def _refuses_a_wrong_checksum(self, key: str, in_parts: bool) -> bool:
        """As a create, which is all that a syncer may do below this key. Raises StoreUnavailableError if the store does
        not answer; any other error proves nothing."""
        wrong = Upload(check_key(key), _TRIAL, exclusive=True, given=transfers.crc32c(_TRIAL[1:]))
        try:
            with suppress(ConditionFailedError):  # an earlier try had been accepted, and its answer was lost
                self._send(wrong, in_parts)
        except UploadDamagedError:
            return True
        except StoreUnavailableError:
            raise
        except (StoreError, NoSpaceError):
            return False
        with suppress(StoreError):
            self.delete(key)
        return False

    def retention(self, key: str) -> Retention:
        about = self._about_bucket("b/{}", fields="softDeletePolicy(retentionDurationSeconds),versioning(enabled)")
        if (about.get("versioning") or {}).get("enabled"):
            return Retention(None, f"gcloud storage buckets update gs://{self._bucket} --no-versioning")
        kept_s = float((about.get("softDeletePolicy") or {}).get("retentionDurationSeconds", 0))
        return Retention(kept_s, KINDS["gs"].keeps_nothing.format(place=self._bucket))

    def _upload(self, key: str, data: bytes, *, exclusive: bool) -> None:
        """The store itself refuses bytes that arrive damaged."""
        self._send(Upload(key, data, exclusive))

    def _send(self, wanted: Upload, in_parts: bool | None = None) -> None:
        """In parts if that pays, or if told so."""
        try:
            self._run(wanted.key, partial(self._sent, wanted, in_parts), None)
        except ObjectAbsentError as error:
            raise missing_bucket(self.url) from error

    def _about_bucket(self, path: str, **parts: Any) -> dict[str, Any]:
        """The parsed answer to a question about the bucket."""
        try:
            _, body = self._run("", partial(self._ask, "GET", path, self._bucket, key="", **parts), None)
        except ObjectAbsentError as error:
            raise missing_bucket(self.url) from error
        return self._parsed(body)

    async def _ask_of(self, method: str, key: str, action: str = "", num_bytes: int = 0, **parts: Any) -> bytes:
        """One request about an object."""
        names = self._bucket, self._prefix + key
        _, body = await self._ask(method, f"b/{{}}/o/{{}}{action}", *names, key=key, num_bytes=num_bytes, **parts)
        return body

    async def _ask(self, method: str, path: str, *names: str, key: str, num_bytes: int = 0, **parts: Any) -> Answer:
        """One request that moves `num_bytes`. `path` is below the API's address, or an address."""
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

    async def _sent(self, wanted: Upload, in_parts: bool | None) -> None:
        """In parts if that pays, or if told so. ConditionFailedError if exclusive and there is an object already."""
        data = wanted.data
        pays = self._speed.pays_in_parts(len(data)) if in_parts is None else in_parts
        started_s = clock.monotonic_s()
        at_once = self._speed.at_once(len(data))
        if not (pays and self.sends_parts and await self._composed(wanted, at_once)):
            at_once, started_s = 1, clock.monotonic_s()
            await self._through_one(wanted, pays or len(data) >= transfers.UPLOAD_IN_PARTS_FROM_BYTES)
        self._speed.note(len(data), clock.monotonic_s() - started_s, at_once)

    async def _through_one(self, wanted: Upload, in_chunks: bool) -> None:
        key, data = wanted.key, wanted.data
        about = self._about(key, wanted.given or await _checksum(data))
        if in_chunks:
            await self._send_chunks(key, memoryview(data), about, wanted.condition, CHUNK_BYTES)
            return
        boundary = nonce()  # must not occur in the data
        parts = {"data": multipart_body(boundary, about, data), "uploadType": "multipart", **wanted.condition}
        parts["headers"] = {"Content-Type": f"multipart/related; boundary={boundary}"}
        await self._ask("POST", self._upload_path(), self._bucket, key=key, num_bytes=len(data), **parts)

    async def _composed(self, wanted: Upload, at_once: int) -> bool:
        """Upload in parts; False if the store, or a policy of the bucket, refuses that."""
        data, given, own = wanted.data, wanted.given, nonce()
        part_bytes = max(transfers.PART_BYTES, -(-len(data) // MOST_COMPOSED))
        starts = range(0, len(data), part_bytes)
        names = [f"{PARTS}/{wanted.key}/{own}-{number:02d}" for number in range(len(starts))]

        async def send(name: str, start: int) -> dict[str, str]:
            part = memoryview(data)[start : start + part_bytes]
            about = self._about(name, given or await _checksum(part))
            made = await self._send_chunks(name, part, about, {}, transfers.PART_BYTES, at_once)
            return {"name": about["name"], "generation": _described(made, "generation")}

        sends = [partial(send, *part) for part in zip(names, starts, strict=True)]
        if wanted.exclusive:
            await self._refuse_existing(wanted.key)
        composed, may_discard = False, True
        try:
            sources = await transfers.on_time(len(data), transfers.in_parallel(sends, at_once))
            await self._compose(wanted, sources)
            composed = True
        except _DOES_NOT_COMPOSE:
            self._composes_from_s = clock.monotonic_s() + REFUSED_FOR_S
        finally:
            discards = [partial(self._discarded, name, composed) for name in names]
            may_discard = all(await transfers.in_parallel(discards, at_once))
        if not may_discard:
            self._composes_from_s = clock.monotonic_s() + REFUSED_FOR_S
        return composed

    async def _refuse_existing(self, key: str) -> None:
        """Raises ConditionFailedError if there is an object: composing would find it after all parts had gone up."""
        try:
            await self._ask_of("GET", key, fields="size")
        except _DOES_NOT_COMPOSE:  # or may not be looked at: composing decides
            return
        raise ConditionFailedError

    async def _compose(self, wanted: Upload, sources: Sequence[dict[str, str]]) -> None:
        parts = {"json": {"destination": {"contentType": _KIND}, "sourceObjects": sources}, **wanted.condition}
        made = await self._ask_of("POST", wanted.key, "/compose", len(wanted.data), **parts)
        if _described(made, "crc32c") != await _checksum(wanted.data):
            raise UploadDamagedError("the parts were composed to another object", where=self._where(wanted.key))

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

    async def _send_chunks(
        self,
        key: str,
        data: memoryview,
        about: dict[str, str],
        condition: dict[str, Any],
        chunk_bytes: int,
        at_once: int = 1,
    ) -> bytes:
        """Upload one chunk after the other; the object's description. After a failure, ask the session how many bytes
        it has. `at_once`: so many uploads share the link."""
        begin = partial(self._begun, key, about, condition)
        session = await (begin() if at_once == 1 else transfers.persist(begin))
        kept = failures = 0
        in_doubt = False
        while True:
            chunk = data[kept : kept + (0 if in_doubt else chunk_bytes)]
            span = {"Content-Range": f"bytes {'*' if in_doubt else f'{kept}-{kept + len(chunk) - 1}'}/{len(data)}"}
            num_bytes = len(chunk) * at_once
            try:
                headers, done = await self._ask("PUT", session, key=key, num_bytes=num_bytes, headers=span, data=chunk)
            except ObjectAbsentError as error:
                raise StoreUnavailableError("the upload's session is gone", where=self._where(key)) from error
            except UploadDamagedError:
                raise
            except StoreUnavailableError as error:
                if isinstance(error, StoreThrottledError):
                    self._speed.throttled()
                failures += 1
                if failures == transfers.PART_TRIES:
                    raise
                in_doubt = True
                await asyncio.sleep(pause_s(failures, error, randomness.jitter()))
                continue
            if done:  # an unfinished upload is answered with nothing but a range
                return done
            had, kept = kept, _kept_bytes(headers)
            if kept >= len(data) or (kept <= had and not in_doubt):
                raise StoreUnavailableError("the upload makes no progress", where=self._where(key))
            failures = 0 if kept > had else failures
            in_doubt = False

    async def _begun(self, key: str, about: dict[str, str], condition: dict[str, Any]) -> str:
        """The address of a new resumable upload."""
        headers, _ = await self._ask(
            "POST", self._upload_path(), self._bucket, key=key, json=about, uploadType="resumable", **condition
        )
        sessions = header_values(headers, "Location")
        if not sessions:
            raise StoreUnavailableError("the store began no upload session", where=self._where(key))
        return sessions[0]

    def _upload_path(self) -> str:
        return str(self._filesystem.base).replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"

    def _about(self, key: str, checksum: str) -> dict[str, str]:
        return {"name": self._prefix + key, "crc32c": checksum, "contentType": _KIND}


async def _checksum(data: bytes | memoryview) -> str:
    """Beside what the loop of all transfers does."""
    return await asyncio.to_thread(transfers.crc32c, data)


def _described(description: bytes, name: str) -> str:
    """A field of an object's description. Raises StoreUnavailableError if there is none."""
    try:
        return str(json.loads(description)[name])
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise StoreUnavailableError("the store does not describe the object that it took") from error


def _kept_bytes(headers: Any) -> int:
    """How much of an unfinished upload the store has, by its answer `Range: bytes=0-N`."""
    last = next(iter(header_values(headers, "Range")), "").rpartition("-")[2]
    return int(last) + 1 if last.isdecimal() else 0


def discard_parts(url: StoreUrl) -> Discarded:
    """Delete the parts that no upload has used for a day, as far as the store allows it."""
    store = GCSStore(url.place, url.prefix)
    sizes: list[int] = []
    with suppress(DilocoError):
        keys = store.list(f"{PARTS}/")
        while keys:
            for key in filter(PART_NAME.fullmatch, keys):
                with suppress(DilocoError):
                    found = store.stat(key)
                    if found is not None and clock.wall_s() - found.modified_s >= OLD_PART_S:
                        store.delete(key)
                        sizes.append(found.size_bytes)
            keys = store.list(f"{PARTS}/", after=keys[-1])
    return Discarded(len(sizes), sum(sizes))


def start_client() -> Any:
    """A new file system of gcsfs; it belongs to the process that made it."""
    set_environment_default("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it probes each bucket over gRPC
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
        use_listings_cache=False,
        skip_instance_cache=True,
        requests_timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=transfers.CONNECT_TIMEOUT_S, sock_read=transfers.SILENCE_TIMEOUT_S
        ),
    )


@asynccontextmanager
async def open_media(
    filesystem: Any, bucket: str, name: str, headers: dict[str, str] | None = None, **condition: str
) -> AsyncIterator[Any]:
    """The answer to a download whose body has not been read yet; gcsfs itself gives only whole bodies. Leaving early
    closes the connection."""
    from gcsfs.retry import validate_response

    await filesystem._set_session()
    async with filesystem.session.request(
        method="GET",
        url=filesystem._format_path("b/{}/o/{}", (bucket, name)),
        params=filesystem._get_params({"alt": "media", **condition}),
        headers=filesystem._get_headers(headers),
        timeout=filesystem.requests_timeout,
        read_bufsize=_READ_BUFFER_BYTES,
    ) as answer:
        if answer.status >= 400:
            validate_response(answer.status, await answer.read(), "b/{}/o/{}", (bucket, name))
        yield answer


def multipart_body(boundary: str, about: Mapping[str, str], data: bytes) -> bytes:
    """An upload in one request: the object's description, and its bytes, in which the boundary must not occur."""
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(about)}\r\n"
    head += f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    return b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode()))


def header_values(headers: Any, name: str) -> list[str]:
    """All values of the header, which may be repeated."""
    return [str(value) for value in headers.getall(name, [])]


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
    return StoreBrokenError(f"the store refused the request: {text}", where=where)


def stated_crc32c(headers: Mapping[str, str]) -> str | None:
    """The checksum of the whole object, also if the answer holds only a part of it."""
    for value in ",".join(header_values(headers, "X-Goog-Hash")).split(","):
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
