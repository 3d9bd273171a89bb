"""A proxy that breaks what passes: python -m tests.contract.fault_proxy --upstream http://127.0.0.1:5000 [--rates ...]

Stands before any store that speaks plain http on this machine (the S3 emulator, the fake GCS). Each request is read
whole, sent on with its Host header unchanged, and the answer is read whole, so that every fault happens at a known
place.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext

import aiohttp
from aiohttp import web
from yarl import URL

from tests.contract.faults import Faults, FaultyServer, LoopbackServer, add_arguments

_MAX_BODY_BYTES = 2 << 30
_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
    "proxy-connection",
    "expect",
}


class FaultProxy(FaultyServer):
    """`with FaultProxy(upstream) as proxy: ... proxy.url; proxy.faults.inject("503")`."""

    def __init__(self, upstream: str, port: int = 0, seed: int = 0) -> None:
        self.faults = Faults(_error, seed)
        self.server = LoopbackServer(self._app, port)
        self._upstream = upstream.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._one_write = asyncio.Lock()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self.faults.middleware])
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        app.cleanup_ctx.append(self._connected)
        return app

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        # Nothing is repeated here, and nothing decompressed: what the client sees is what the store said.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            yield

    async def _pass_on(self, request: web.Request) -> web.Response:
        """Writes go one after the other: the S3 emulator looks for an object and writes it in two steps, so that of two
        conditional writes at once both could win."""
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        body = await request.read()
        try:
            async with nullcontext() if request.method in ("GET", "HEAD") else self._one_write:
                return await self._forward(request, headers, body)
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=f"upstream: {error}")

    async def _forward(self, request: web.Request, headers: dict[str, str], body: bytes) -> web.Response:
        assert self._session is not None
        url = URL(self._upstream + request.raw_path, encoded=True)
        async with self._session.request(
            request.method,
            url,
            headers=headers,
            data=body,
            allow_redirects=False,
            skip_auto_headers=("Content-Type", "Accept-Encoding"),  # they may be signed
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in {*_HOP_BY_HOP, "content-length"}}
            if request.method == "HEAD" and "Content-Length" in answer.headers:
                kept["Content-Length"] = answer.headers["Content-Length"]
            return web.Response(status=answer.status, headers=kept, body=await answer.read())


def _error(status: int) -> web.Response:
    """As S3 writes errors; the fake GCS's clients look at the status alone."""
    code = {503: "SlowDown", 429: "TooManyRequests", 409: "ConditionalRequestConflict", 403: "AccessDenied"}[status]
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
    return web.Response(status=status, text=text, content_type="application/xml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--upstream", required=True, help="http://127.0.0.1:PORT of the store")
    add_arguments(parser)
    arguments = parser.parse_args()
    FaultProxy(arguments.upstream, arguments.port, arguments.seed).serve_until_killed(arguments)


if __name__ == "__main__":
    main()
