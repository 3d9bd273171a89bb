"""The endpoint that Prometheus scrapes: `GET /metrics` with a bearer token."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import DilocoError, UsageError
from diloco_cli.metrics.openmetrics import CONTENT_TYPE
from diloco_cli.paths import metrics_token_path
from diloco_cli.randomness import new_private_key
from diloco_cli.runtime.files import MAX_FILE_BYTES, make_directory

LOOPBACK, PORT = "127.0.0.1", 9464
FRESH_S = 2.0  # scrapes within share a look at the bucket
SOCKET_S = 10.0
MAX_SCRAPES = 8  # at a time


def address_of(text: str) -> tuple[str, int]:
    """`HOST:PORT`, or a port on loopback."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65_535:
        raise UsageError(f"'{text}' is no address; write HOST:PORT or a port", hint=f"--serve {LOOPBACK}:{PORT}")
    return host.strip("[]") or LOOPBACK, int(port)


def token_of(run: str) -> tuple[str, Path]:
    """The run's token on this machine, made at first use; its file is readable by its owner alone."""
    path = metrics_token_path(run)
    make_directory(path.parent)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        with path.open("rb") as file:
            token = file.read(MAX_FILE_BYTES).decode().strip()
        if token:
            return token, path
        descriptor = os.open(path, os.O_WRONLY)  # cut short by a crash
    token = new_private_key()
    with os.fdopen(descriptor, "w") as new:
        new.write(token)
    return token, path


class MetricsServer(ThreadingHTTPServer):
    """`look` gives the text, and may raise a DilocoError: then the scrape fails, which Prometheus shows as down."""

    daemon_threads = True
    request_queue_size = MAX_SCRAPES

    def __init__(self, address: tuple[str, int], token: str, look: Callable[[], str]) -> None:
        self._expected, self._look = f"Bearer {token}".encode(), look
        self._lock, self._text, self._read_s = Lock(), "", float("-inf")
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Scrape)

    def allows(self, authorization: str) -> bool:
        return hmac.compare_digest(authorization.encode(), self._expected)

    def text(self) -> str:
        with self._lock:
            if monotonic_s() - self._read_s > FRESH_S:
                self._text = self._look()
                self._read_s = monotonic_s()
            return self._text


class _Scrape(BaseHTTPRequestHandler):
    timeout = SOCKET_S
    server: MetricsServer

    def do_GET(self) -> None:
        if not self.server.allows(self.headers.get("Authorization", "")):
            return self._answer(401, "a bearer token is needed: see what `diloco status --serve` said\n")
        if self.path.partition("?")[0] != "/metrics":
            return self._answer(404, "only /metrics is here\n")
        try:
            return self._answer(200, self.server.text(), CONTENT_TYPE)
        except DilocoError as error:
            return self._answer(503, f"{error}\n")

    def _answer(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""
