"""What a server may do to its clients, to order or by chance: one middleware before the fake GCS and inside the proxy.

lost_answer: the effect happens, then the connection is reset. cut_body: half of the answer, then a reset. flip_bit: one
bit of the answer is wrong. stall: no answer until the faults are healed, or the client gives up. trickle: the answer's
body comes byte by byte, with pauses. A number is that HTTP status, without any effect.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

from aiohttp import web

Kind = Literal["503", "429", "409", "403", "stall", "cut_body", "lost_answer", "flip_bit", "trickle"]
KINDS: tuple[str, ...] = get_args(Kind)
CONTROL_PATH = "/-/faults"
MAX_STALL_S = 600.0
TRICKLE_S = 0.1

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ErrorAnswer = Callable[[int], web.Response]


@dataclass
class AnswerFault:
    kind: Kind
    method: str


class Faults:
    """Injected faults strike first, in order; then an outage (503 to everybody); then chance, by `rates`. Safe to call
    from any thread. `delay_s`: of each request, as of a bucket that is far away."""

    def __init__(self, error_answer: ErrorAnswer, seed: int = 0) -> None:
        self.delay_s = 0.0
        self.requests = 0
        self.down_bytes = 0  # of the bodies of answers without a fault
        self.struck: Counter[str] = Counter()
        self._error_answer = error_answer
        self._random = random.Random(seed)
        self._queue: deque[AnswerFault] = deque()
        self._rates: dict[Kind, float] = {}
        self._outage_ends_s = 0.0
        self._lock = threading.Lock()
        self._stalled: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def inject(self, kind: Kind, method: str = "", times: int = 1) -> None:
        """The next `times` requests of that HTTP method (any, if empty) suffer."""
        with self._lock:
            self._queue.extend(AnswerFault(kind, method) for _ in range(times))

    def set_rates(self, rates: Mapping[Kind, float]) -> None:
        """From now on each request suffers with these probabilities, at most one fault each."""
        if unknown := set(rates) - set(KINDS):
            raise ValueError(f"unknown faults {sorted(unknown)}; known are {', '.join(KINDS)}")
        if any(rate < 0 for rate in rates.values()) or sum(rates.values()) > 1:
            raise ValueError(f"probabilities are at least 0 and together at most 1: {dict(rates)}")
        with self._lock:
            self._rates = dict(rates)

    def start_outage(self, seconds: float) -> None:
        """Nobody is served for so long."""
        self._outage_ends_s = time.monotonic() + seconds

    def heal(self) -> None:
        """No faults any more; stalled requests go on."""
        with self._lock:
            self._queue.clear()
            self._rates = {}
            stalled, self._stalled = self._stalled, []
        self._outage_ends_s = 0.0
        for loop, event in stalled:
            with contextlib.suppress(RuntimeError):  # its server is gone
                loop.call_soon_threadsafe(event.set)

    def num_pending(self) -> int:
        """How many injected faults have not struck yet."""
        return len(self._queue)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == CONTROL_PATH:
            return await self._control(request)
        self.requests += 1
        await asyncio.sleep(self.delay_s)
        kind = self._draw(request.method)
        if kind is None:
            answer = await handler(request)
            assert isinstance(answer, web.Response)
            self.down_bytes += len(answer.body or b"")  # type: ignore[arg-type]
            return answer
        self.struck[kind] += 1
        if kind.isdigit() or kind == "stall":
            if kind == "stall":
                await self._stall()
            await request.read()  # an answer before the body has come would be a reset for some clients
            return self._error_answer(503 if kind == "stall" else int(kind))
        return await self._spoil(kind, request, await handler(request))

    def _draw(self, method: str) -> Kind | None:
        with self._lock:
            fault = next((f for f in self._queue if f.method in {"", method}), None)
            if fault is not None:
                self._queue.remove(fault)
                return fault.kind
            if time.monotonic() < self._outage_ends_s:
                return "503"
            chance = self._random.random() if self._rates else 1.0
            for kind, rate in sorted(self._rates.items()):
                if chance < rate:
                    return kind
                chance -= rate
        return None

    async def _stall(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._released().wait(), MAX_STALL_S)

    def _released(self) -> asyncio.Event:
        """Set when the faults are healed."""
        released = asyncio.Event()
        with self._lock:
            self._stalled.append((asyncio.get_running_loop(), released))
        return released

    async def _trickle(self, request: web.Request, status: int, headers: Mapping[str, str], body: bytes) -> None:
        stream, released = web.StreamResponse(status=status, headers=headers), self._released()
        await stream.prepare(request)
        for place in range(len(body)):
            if released.is_set():
                return
            await stream.write(body[place : place + 1])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(released.wait(), TRICKLE_S)

    async def _spoil(self, kind: Kind, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """After the effect."""
        assert isinstance(response, web.Response)
        body = bytearray(bytes(response.body or b""))  # type: ignore[arg-type]
        if kind == "flip_bit":
            if body and response.status < 300:
                body[len(body) // 2] ^= 1
                response.body = bytes(body)
            return response
        headers = {**response.headers, "Content-Length": str(len(body))}
        if kind == "trickle" and body:
            with contextlib.suppress(ConnectionError):  # the client has had enough
                await self._trickle(request, response.status, headers, bytes(body))
        if kind == "cut_body" and body:
            stream = web.StreamResponse(status=response.status, headers=headers)
            await stream.prepare(request)
            await stream.write(body[: len(body) // 2])
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _control(self, request: web.Request) -> web.Response:
        """GET: counts. POST {"inject": KIND, "method": "", "times": 1} | {"rates": {KIND: P}} | {"outage_s": S} |
        {"heal": true}."""
        if request.method == "POST":
            wanted = await request.json()
            if wanted.get("heal"):
                self.heal()
            if "inject" in wanted:
                self.inject(wanted["inject"], wanted.get("method", ""), int(wanted.get("times", 1)))
            if "rates" in wanted:
                self.set_rates(wanted["rates"])
            if "outage_s" in wanted:
                self.start_outage(float(wanted["outage_s"]))
        counts = {"requests": self.requests, "struck": dict(self.struck), "pending": self.num_pending()}
        return web.json_response(counts)


class LoopbackServer:
    """An aiohttp application on a free (or the given) port of `host`, served by a thread of its own:
    `with server: ... server.url`."""

    host = "127.0.0.1"

    def __init__(self, app: Callable[[], web.Application], port: int = 0) -> None:
        self.url = ""
        self._app = app
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LoopbackServer:
        self._thread.start()
        if not self._ready.wait(20) or self._failure is not None:
            raise RuntimeError("the server did not start") from self._failure
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # told to whoever waits for the start
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self._port).start()
            self.url = f"http://{self.host}:{runner.addresses[0][1]}"
            self._ready.set()
            await self._stop.wait()
        finally:
            await runner.cleanup()


class FaultyServer:
    """What the servers with faults have in common: `with server: ... server.url; server.faults.inject("503")`."""

    faults: Faults
    server: LoopbackServer

    @property
    def url(self) -> str:
        return self.server.url

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.faults.heal()
        self.server.__exit__(*exc_info)

    def serve_until_killed(self, arguments: argparse.Namespace) -> None:
        """Prints the server's URL as its first line. Counts are at CONTROL_PATH."""
        self.faults.set_rates(json.loads(arguments.rates))
        self.faults.delay_s = arguments.delay_ms / 1000
        self.server.host = arguments.host
        with self:
            print(self.url, flush=True)
            if arguments.outage:
                after_s, _, for_s = arguments.outage.partition(":")
                threading.Timer(float(after_s), self.faults.start_outage, [float(for_s)]).start()
            threading.Event().wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line that all servers with faults share."""
    parser.add_argument("--host", default=LoopbackServer.host, help="another one: of a network namespace alone")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed at the start")
    parser.add_argument(
        "--rates", default="{}", help=f'json: probability of each fault, such as {{"503": 0.1}}; {KINDS}'
    )
    parser.add_argument("--seed", type=int, default=0, help="of the chance by which faults strike")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each request")
    parser.add_argument("--outage", default="", metavar="AFTER:FOR", help="seconds after the start, seconds of 503")
