"""Uploads to Google Cloud Storage, each with its precondition and checksum.

small   in one request
large   through one connection, in chunks of a resumable upload
larger  in parts through several connections, which the store then composes to the object. Parts are objects below
        PARTS, and their writer deletes them; those of a killed writer are deleted after a day (store/leftovers.py).
        Composing alone may carry the condition that makes a create exclusive: the XML API's uploads in parts take none.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from diloco_cli import clock, randomness
from diloco_cli.errors import DilocoError
from diloco_cli.randomness import nonce
from diloco_cli.store import transfers
from diloco_cli.store.bucket import ConditionFailedError, ObjectAbsentError
from diloco_cli.store.gcs_client import header_values, multipart_body
from diloco_cli.store.port import (
    StoreBrokenError,
    StoreForbiddenError,
    StoreThrottledError,
    StoreUnavailableError,
    UploadDamagedError,
)
from diloco_cli.store.retry import pause_s

PARTS = "parts-of-uploads"
"""Parts of the object `key` are `parts-of-uploads/<key>/<nonce>-<number>`."""
PART_NAME = re.compile(rf"{PARTS}/.+/[0-9a-f]{{32}}-[0-9]{{2}}")
REFUSED_FOR_S = 600.0  # after a refusal, which may have been that of an old token, no more parts are made for so long
MOST_COMPOSED = 32  # parts of an object, at once
CHUNK_BYTES = 32 << 20
"""Chunks of a resumable upload, one after the other; GCS wants multiples of 256 KiB."""
_KIND = "application/octet-stream"
_DOES_NOT_COMPOSE = (ObjectAbsentError, StoreForbiddenError, StoreBrokenError)

Answer = tuple[Mapping[str, str], bytes]


class Ask(Protocol):
    """One request about an object. `path` is below the API's address, or an address. It may take the time of a transfer
    of `num_bytes`. Raises one of bucket.ANSWERS or an error of the port."""

    def __call__(
        self, method: str, path: str, *names: str, key: str, num_bytes: int = 0, **parts: Any
    ) -> Awaitable[Answer]: ...


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


class GCSUploads:
    """The uploads of one client. It learns how fast they are, and whether it may compose."""

    def __init__(self, bucket: str, prefix: str, ask: Ask, base: Callable[[], str]) -> None:
        """`base()`: the API's address."""
        self._bucket, self._prefix, self._ask, self._base = bucket, prefix, ask, base
        self._speed = transfers.UploadSpeed()
        self._composes_from_s = 0.0

    @property
    def composes(self) -> bool:
        """Whether large objects go up in parts now."""
        return clock.monotonic_s() >= self._composes_from_s

    async def send(self, wanted: Upload, in_parts: bool | None) -> None:
        """As BucketStore._upload."""
        data = wanted.data
        pays = self._speed.pays_in_parts(len(data)) if in_parts is None else in_parts
        started_s = clock.monotonic_s()
        at_once = self._speed.at_once(len(data))
        if not (pays and self.composes and await self._composed(wanted, at_once)):
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
            await self._ask("GET", "b/{}/o/{}", self._bucket, self._prefix + key, key=key, fields="size")
        except _DOES_NOT_COMPOSE:  # or may not be looked at: composing decides
            return
        raise ConditionFailedError

    async def _compose(self, wanted: Upload, sources: list[dict[str, str]]) -> None:
        key, num_bytes = wanted.key, len(wanted.data)
        parts = {"destination": {"contentType": _KIND}, "sourceObjects": sources}
        path, names = "b/{}/o/{}/compose", (self._bucket, self._prefix + key)
        _, made = await self._ask("POST", path, *names, key=key, num_bytes=num_bytes, json=parts, **wanted.condition)
        if _described(made, "crc32c") != await _checksum(wanted.data):
            raise UploadDamagedError("the parts were composed to another object", where=self._where(key))

    async def _discarded(self, name: str, persistently: bool) -> bool:
        """Delete a part; False if that is refused."""

        async def delete() -> None:
            with suppress(ObjectAbsentError):
                await self._ask("DELETE", "b/{}/o/{}", self._bucket, self._prefix + name, key=name)

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
        return self._base().replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"

    def _where(self, key: str) -> str:
        return f"gs://{self._bucket}/{self._prefix}{key}"

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
