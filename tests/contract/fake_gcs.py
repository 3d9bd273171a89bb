"""A small Google Cloud Storage that keeps its promises: generations and preconditions, ranges, paging; the JSON API
with uploads in one request and composing; and server-side faults to order. Listens on loopback only.

As a process: python -m tests.contract.fake_gcs [--port P] [BUCKET ...]"""

from __future__ import annotations

import argparse
import base64
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import google_crc32c
from aiohttp import web

from tests.contract.faults import Faults, FaultyServer, Handler, Kind, LoopbackServer, add_arguments

__all__ = ["FakeGCS", "Kind"]


@dataclass
class Blob:
    data: bytes
    generation: int
    updated: str = field(default_factory=lambda: datetime.now(UTC).isoformat().replace("+00:00", "Z"))

    @cached_property
    def crc32c(self) -> str:
        return base64.b64encode(google_crc32c.value(self.data).to_bytes(4, "big")).decode()


class FakeGCS(FaultyServer):
    """`with FakeGCS("bucket") as server: ... server.url`. Objects live in `server.objects[bucket][name]`."""

    def __init__(self, *buckets: str, port: int = 0, seed: int = 0) -> None:
        self.objects: dict[str, dict[str, Blob]] = {bucket: {} for bucket in buckets}
        self.faults = Faults(lambda status: _error(status, "injected"), seed)
        self.server = LoopbackServer(self._app, port)
        self.ignores_checksums = False  # as some clones do
        self.refuses_to_compose = 0  # with this status
        self.refuses_names = ""  # that contain this, as a policy does
        self.composes_backwards = False  # broken
        self.ignores_conditions = False  # broken: a create overwrites, as some clones do
        self.settings: dict[str, dict[str, object]] = {}  # of a bucket, such as its softDeletePolicy
        self._generation = 1000
        self.num_composed = 0

    @property
    def requests(self) -> int:
        return self.faults.requests

    def inject(self, kind: Kind, method: str = "", times: int = 1) -> None:
        self.faults.inject(kind, method, times)

    def heal(self) -> None:
        self.faults.heal()

    def num_pending(self) -> int:
        return self.faults.num_pending()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=2 << 30, middlewares=[self.faults.middleware, self._paid])
        app.add_routes(
            [
                web.post("/upload/storage/v1/b/{bucket}/o", self._upload),
                web.get("/storage/v1/b/{bucket}", self._bucket),
                web.get("/storage/v1/b/{bucket}/o", self._list),
                web.get("/storage/v1/b/{bucket}/o/{name:.+}", self._get),
                web.get("/download/storage/v1/b/{bucket}/o/{name:.+}", self._get),
                web.post("/storage/v1/b/{bucket}/o/{name:.+}/compose", self._compose),
                web.delete("/storage/v1/b/{bucket}/o/{name:.+}", self._delete),
            ]
        )
        return app

    @web.middleware
    async def _paid(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        about: Any = self.settings.get(request.match_info.get("bucket", ""), {})
        if about.get("billing", {}).get("requesterPays") and "userProject" not in request.query:
            return _error(400, "Bucket is a requester pays bucket but no user project provided.")
        return await handler(request)

    async def _upload(self, request: web.Request) -> web.Response:
        about, data = _parts(request.headers["Content-Type"], await request.read())
        exclusive = request.query.get("ifGenerationMatch") == "0"
        return self._store(request.match_info["bucket"], about["name"], data, exclusive, about.get("crc32c"))

    async def _compose(self, request: web.Request) -> web.Response:
        bucket, name = request.match_info["bucket"], request.match_info["name"]
        if self.refuses_to_compose:
            return _error(self.refuses_to_compose, "no compose here")
        sources = (await request.json())["sourceObjects"]
        if not 1 <= len(sources) <= 32:
            return _error(400, "The number of source components provided is not between 1 and 32.")
        blobs = self.objects.get(bucket, {})
        found = [blobs[source["name"]] for source in sources if source["name"] in blobs]
        if [str(blob.generation) for blob in found] != [source["generation"] for source in sources]:
            return _error(404, "Object not found.")
        data = b"".join(blob.data for blob in (found[::-1] if self.composes_backwards else found))
        self.num_composed += 1
        return self._store(bucket, name, data, request.query.get("ifGenerationMatch") == "0", None)

    def _store(self, bucket: str, name: str, data: bytes, exclusive: bool, crc32c: str | None) -> web.Response:
        """No await inside: one atomic step of the server's one thread."""
        if (refusal := self._refusal(bucket, name, exclusive)) is not None:
            return refusal
        self._generation += 1
        blob = Blob(data, self._generation)
        if crc32c is not None and crc32c != blob.crc32c and not self.ignores_checksums:
            return _error(400, f"Provided CRC32C {crc32c!r} doesn't match calculated CRC32C {blob.crc32c!r}.")
        self.objects[bucket][name] = blob
        return web.json_response(_about(bucket, name, blob))

    def _refusal(self, bucket: str, name: str = "", exclusive: bool = False) -> web.Response | None:
        if bucket not in self.objects:
            return _error(404, "The specified bucket does not exist.")
        if self.refuses_names and self.refuses_names in name:
            return _error(403, "no storage.objects.create access")
        if exclusive and not self.ignores_conditions and name in self.objects[bucket]:
            return _error(412, "At least one of the pre-conditions you specified did not hold.")
        return None

    async def _bucket(self, request: web.Request) -> web.Response:
        bucket = request.match_info["bucket"]
        if (refusal := self._refusal(bucket)) is not None:
            return refusal
        return web.json_response({"name": bucket, **self.settings.get(bucket, {})})

    async def _list(self, request: web.Request) -> web.Response:
        blobs = self.objects.get(request.match_info["bucket"])
        if blobs is None:
            return _error(404, "The specified bucket does not exist.")
        query = request.query
        prefix, start = query.get("prefix", ""), query.get("startOffset", "")
        start = max(start, query.get("pageToken", ""))
        names = sorted(name for name in blobs if name.startswith(prefix) and name >= start)
        limit = min(int(query.get("maxResults", "1000")), 1000)
        answer: dict[str, object] = {"kind": "storage#objects"}
        if names:
            answer["items"] = [_about(request.match_info["bucket"], n, blobs[n]) for n in names[:limit]]
        if len(names) > limit:
            answer["nextPageToken"] = names[limit]
        return web.json_response(answer)

    async def _get(self, request: web.Request) -> web.Response:
        bucket, name = request.match_info["bucket"], request.match_info["name"]
        blob = self.objects.get(bucket, {}).get(name)
        if blob is None or request.query.get("generation", str(blob.generation)) != str(blob.generation):
            return _error(404, f"No such object: {bucket}/{name}")
        if request.query.get("alt") != "media":
            return web.json_response(_about(bucket, name, blob))
        return _media(request, blob)

    async def _delete(self, request: web.Request) -> web.Response:
        bucket, name = request.match_info["bucket"], request.match_info["name"]
        if self.objects.get(bucket, {}).pop(name, None) is None:
            return _error(404, f"No such object: {bucket}/{name}")
        return web.Response(status=204)


def _about(bucket: str, name: str, blob: Blob) -> dict[str, str]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(blob.data)),
        "generation": str(blob.generation),
        "metageneration": "1",
        "crc32c": blob.crc32c,
        "updated": blob.updated,
        "timeCreated": blob.updated,
    }


def _parts(content_type: str, body: bytes) -> tuple[dict[str, str], bytes]:
    """JSON and payload of a multipart/related body, with CRLF as the standard has it or LF as gcsfs sends
    it."""
    boundary = content_type.partition("boundary=")[2].strip().strip('"').encode()
    line = b"\r\n" if body.startswith(b"--" + boundary + b"\r\n") else b"\n"
    _, about, payload, _ = body.split(b"--" + boundary)
    about = about.split(line * 2, 1)[1]
    return json.loads(about), payload.split(line * 2, 1)[1].removesuffix(line)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message}}, status=status)


def _media(request: web.Request, blob: Blob) -> web.Response:
    """The bytes, or the range of them that is asked for; the checksum is always that of the whole object."""
    headers = {"X-Goog-Hash": f"crc32c={blob.crc32c}", "X-Goog-Generation": str(blob.generation)}
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if wanted is None:
        return web.Response(body=blob.data, headers=headers)
    size = len(blob.data)
    start, end = int(wanted[1]), min(size, int(wanted[2]) + 1) if wanted[2] else size
    if start >= size:
        return web.Response(status=416, text="The requested range cannot be satisfied.")
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return web.Response(status=206, body=blob.data[start:end], headers=headers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("buckets", nargs="*", default=["bucket"])
    add_arguments(parser)
    arguments = parser.parse_args()
    FakeGCS(*arguments.buckets, port=arguments.port, seed=arguments.seed).serve_until_killed(arguments)


if __name__ == "__main__":
    main()
