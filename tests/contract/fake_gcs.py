"""A small Google Cloud Storage that keeps its promises: JSON API, generations and preconditions, three kinds
of upload, ranges, paging, batch delete; and server-side faults to order. Listens on loopback only."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import google_crc32c
from aiohttp import web

Kind = Literal["503", "429", "403", "stall", "cut_body", "lost_answer", "flip_bit"]
"""lost_answer: the effect happens, then the connection is reset. cut_body: half of the download, then a
reset. flip_bit: one bit of the stored bytes is wrong on its way down."""


@dataclass
class Blob:
    data: bytes
    generation: int
    updated: str = field(default_factory=lambda: datetime.now(UTC).isoformat().replace("+00:00", "Z"))

    @property
    def crc32c(self) -> str:
        return base64.b64encode(google_crc32c.value(self.data).to_bytes(4, "big")).decode()


@dataclass
class Fault:
    kind: Kind
    method: str


class FakeGCS:
    """`with FakeGCS() as server: ... server.url`. Objects live in `server.objects[bucket][name]`."""

    def __init__(self, *buckets: str) -> None:
        self.objects: dict[str, dict[str, Blob]] = {bucket: {} for bucket in buckets}
        self.requests = 0
        self.url = ""
        self._faults: deque[Fault] = deque()
        self._sessions: dict[str, tuple[str, str, bool, str | None, bytearray]] = {}
        self._finished: dict[str, dict[str, str]] = {}
        self.keeps_half = False  # of each chunk of a resumable upload, as the real one may
        self._generation = 1000
        self._released = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def __enter__(self) -> FakeGCS:
        self._thread.start()
        if not self._ready.wait(20):
            raise TimeoutError("the fake GCS did not start")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.heal()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def inject(self, kind: Kind, method: str = "", times: int = 1) -> None:
        """The next `times` requests of that HTTP method (any, if empty) suffer."""
        self._faults.extend(Fault(kind, method) for _ in range(times))

    def heal(self) -> None:
        """No faults any more; stalled requests go on."""
        self._faults.clear()
        self._loop.call_soon_threadsafe(self._released.set)

    def num_pending(self) -> int:
        """How many injected faults have not struck yet."""
        return len(self._faults)

    async def _serve(self) -> None:
        app = web.Application(client_max_size=2 << 30, middlewares=[self._trouble])
        app.add_routes(
            [
                web.post("/upload/storage/v1/b/{bucket}/o", self._upload),
                web.put("/resumable/{session}", self._chunk),
                web.post("/resumable/{session}", self._chunk),
                web.delete("/resumable/{session}", self._abandon),
                web.get("/storage/v1/b/{bucket}", self._bucket),
                web.get("/storage/v1/b/{bucket}/o", self._list),
                web.get("/storage/v1/b/{bucket}/o/{name:.+}", self._get),
                web.get("/download/storage/v1/b/{bucket}/o/{name:.+}", self._get),
                web.delete("/storage/v1/b/{bucket}/o/{name:.+}", self._delete),
                web.post("/batch/storage/v1", self._batch),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _trouble(self, request: web.Request, handler: object) -> web.StreamResponse:
        self.requests += 1
        fault = next((f for f in self._faults if f.method in {"", request.method}), None)
        if fault is None:
            return await handler(request)  # type: ignore[operator]
        self._faults.remove(fault)
        if fault.kind in {"503", "429", "403"}:
            return _error(int(fault.kind), "injected")
        if fault.kind == "stall":
            self._released.clear()
            await self._released.wait()
            return _error(503, "was stalled")
        response: web.Response = await handler(request)  # type: ignore[operator]
        if fault.kind == "flip_bit":
            body = bytearray(bytes(response.body or b""))
            body[len(body) // 2] ^= 1
            response.body = bytes(body)
            return response
        if fault.kind == "cut_body":
            body = bytes(response.body or b"")
            stream = web.StreamResponse(headers={"Content-Length": str(len(body))})
            await stream.prepare(request)
            await stream.write(body[: len(body) // 2])
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _upload(self, request: web.Request) -> web.Response:
        bucket, query = request.match_info["bucket"], request.query
        kind = query.get("uploadType")
        exclusive = query.get("ifGenerationMatch") == "0"
        if kind == "media":
            return self._store(bucket, query["name"], await request.read(), exclusive, None)
        if kind == "multipart":
            about, data = _parts(request.headers["Content-Type"], await request.read())
            return self._store(bucket, about["name"], data, exclusive, about.get("crc32c"))
        about = await request.json() if request.can_read_body else {}
        name = about.get("name") or query["name"]
        if bucket not in self.objects:
            return _error(404, "The specified bucket does not exist.")
        if exclusive and name in self.objects[bucket]:
            return _error(412, "At least one of the pre-conditions you specified did not hold.")
        session = f"s{len(self._sessions)}"
        self._sessions[session] = (bucket, name, exclusive, about.get("crc32c"), bytearray())
        return web.Response(headers={"Location": f"{self.url}/resumable/{session}?upload_id={session}"})

    async def _chunk(self, request: web.Request) -> web.Response:
        session = request.match_info["session"]
        if session in self._finished:
            return web.json_response(self._finished[session])
        bucket, name, exclusive, crc32c, received = self._sessions[session]
        first, last, total = map(int, re.findall(r"\d+", request.headers["Content-Range"]))
        data = await request.read()
        if first > len(received) or last - first + 1 != len(data):
            return _error(400, "the chunk does not follow the one before")
        received += data[len(received) - first :]  # what is there already is ignored
        if self.keeps_half and len(received) < total:
            del received[first + len(data) // 2 :]
        if len(received) < total:
            return web.Response(status=308, headers={"Range": f"bytes=0-{len(received) - 1}"})
        answer = self._store(bucket, name, bytes(received), exclusive, crc32c)
        if answer.status == 200:
            self._finished[session] = _about(bucket, name, self.objects[bucket][name])
        return answer

    async def _abandon(self, request: web.Request) -> web.Response:
        self._sessions.pop(request.match_info["session"], None)
        return web.Response(status=499)

    def _store(self, bucket: str, name: str, data: bytes, exclusive: bool, crc32c: str | None) -> web.Response:
        """No await inside: one atomic step of the server's one thread."""
        if bucket not in self.objects:
            return _error(404, "The specified bucket does not exist.")
        if exclusive and name in self.objects[bucket]:
            return _error(412, "At least one of the pre-conditions you specified did not hold.")
        self._generation += 1
        blob = Blob(data, self._generation)
        if crc32c is not None and crc32c != blob.crc32c:
            return _error(400, f"Provided CRC32C {crc32c!r} doesn't match calculated CRC32C {blob.crc32c!r}.")
        self.objects[bucket][name] = blob
        return web.json_response(_about(bucket, name, blob))

    async def _bucket(self, request: web.Request) -> web.Response:
        if request.match_info["bucket"] not in self.objects:
            return _error(404, "The specified bucket does not exist.")
        return web.json_response({"name": request.match_info["bucket"]})

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
        if blob is None:
            return _error(404, f"No such object: {bucket}/{name}")
        if request.query.get("alt") != "media":
            return web.json_response(_about(bucket, name, blob))
        headers = {"X-Goog-Hash": f"crc32c={blob.crc32c}", "X-Goog-Generation": str(blob.generation)}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
        if wanted is None:
            return web.Response(body=blob.data, headers=headers)
        first, last = wanted[1], wanted[2]
        size = len(blob.data)
        start = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1) if first and last else size
        if start >= size:
            return web.Response(status=416, text="The requested range cannot be satisfied.")
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return web.Response(status=206, body=blob.data[start:end], headers=headers)

    async def _delete(self, request: web.Request) -> web.Response:
        return self._remove(request.match_info["bucket"], request.match_info["name"])

    def _remove(self, bucket: str, name: str) -> web.Response:
        if self.objects.get(bucket, {}).pop(name, None) is None:
            return _error(404, f"No such object: {bucket}/{name}")
        return web.Response(status=204)

    async def _batch(self, request: web.Request) -> web.Response:
        from urllib.parse import unquote

        answers = []
        for bucket, name in re.findall(r"DELETE /storage/v1/b/([^/\s]+)/o/(\S+)", (await request.text())):
            status = self._remove(bucket, unquote(name.partition("?")[0])).status
            answers.append(f"--batch\nContent-Type: application/http\n\nHTTP/1.1 {status} -\n\n")
        return web.Response(
            body="".join([*answers, "--batch--"]).encode(),
            headers={"Content-Type": "multipart/mixed; boundary=batch"},
        )


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


if __name__ == "__main__":  # a server to try things against: python tests/contract/fake_gcs.py bucket
    import sys

    with FakeGCS(*(sys.argv[1:] or ["bucket"])) as server:
        print(f"STORAGE_EMULATOR_HOST={server.url}", flush=True)
        while True:
            time.sleep(3600)
