"""The common part of stores over a network: where their requests may go, and whose answers count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from diloco_cli.environment import ALLOW_HTTP_VARIABLE
from diloco_cli.store.bucket import check_endpoint
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store, StoreForbiddenError, StoreUnavailableError
from tests.contract.emulators import S3_ENVIRONMENT, azure_environment, environment


@pytest.mark.parametrize(
    "address",
    ["http://10.0.0.1:9000", "http://169.254.169.254", "https://169.254.169.254", "https://metadata.google.internal",
     "http://[fd00:ec2::254]", "https://[fd00:ec2::254]", "https://[::ffff:169.254.169.254]", "https://100.100.100.200",
     "ftp://localhost", "ftp://example.com", "storage.example.com", "http://example.com", "http://localhost.example.com",
     "http://127.0.0.1.example.com", "https://", "https://metadata.", "", "http://", "http://[::1"],
)  # fmt: skip
def test_addresses_that_would_leak_are_refused(address: str) -> None:
    """Rows 18 and 22 of tests/security: plain http only for loopback; metadata hosts refused."""
    with pytest.raises(StoreForbiddenError, match="VARIABLE"):
        check_endpoint(address, "VARIABLE")


@pytest.mark.parametrize("host", ["minio.lan", "10.0.0.1", "fd00::7", "169.254.169.254"])
def test_plain_http_reaches_the_one_host_that_the_user_allows(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://[{host}]:9000" if ":" in host else f"http://{host}:9000"
    with pytest.raises(StoreForbiddenError) as refused:
        check_endpoint(address, "VARIABLE")
    if host.startswith("169"):  # hands out credentials: nobody can allow it
        monkeypatch.setenv(ALLOW_HTTP_VARIABLE, host)
        with pytest.raises(StoreForbiddenError):
            check_endpoint(address, "VARIABLE")
        return
    assert f"{ALLOW_HTTP_VARIABLE}={host}" in (refused.value.hint or "")
    monkeypatch.setenv(ALLOW_HTTP_VARIABLE, host)
    assert check_endpoint(address, "VARIABLE") == address
    for other in ("http://minio.lan.example.com", "http://10.0.0.2", "http://a.minio.lan", "http://[fd00::8]"):
        with pytest.raises(StoreForbiddenError):
            check_endpoint(other, "VARIABLE")


@pytest.mark.parametrize(
    "address",
    ["http://localhost:4443", "127.0.0.1:4443", "http://127.8.9.1", "http://[::1]:9000", "http://127.0.0.1:4443",
     "https://minio.example.com:9000", "https://storage.googleapis.com"],
)  # fmt: skip
def test_loopback_and_tls_are_allowed(address: str) -> None:
    assert check_endpoint(address, "VARIABLE").endswith(address)


class Portal(BaseHTTPRequestHandler):
    """Answers whatever is asked with its own page and a good status, as proxies do."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        page = b"<html><body>Please sign in</body></html>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def portal() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Portal) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("FORMAT.json", 1000),
    "get_range": lambda store: store.get_range("FORMAT.json", 0, 5),
    "create": lambda store: store.create("commit/0", b"x"),
    "put": lambda store: store.put("hint", b"x"),
    "stat": lambda store: store.stat("hint"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("scheme", ["gs", "s3", "az"])
def test_a_proxys_page_is_neither_an_object_nor_a_success(portal: str, scheme: str, call: str) -> None:
    settings = {"AWS_ENDPOINT_URL": portal, **S3_ENVIRONMENT, "STORAGE_EMULATOR_HOST": portal}
    settings |= azure_environment(portal)
    with environment(settings), pytest.raises(StoreUnavailableError, match="a page"):
        CALLS[call](open_store(f"{scheme}://bucket/run"))
