"""Stores that the contract suite starts and stops by itself, on loopback."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 60.0

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
AZURITE = "diloco-test-azurite"  # of the user's cache, or of $DILOCO_TEST_AZURITE: npm install azurite there
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Which every Azurite has: published in its manual."""


@contextmanager
def s3_emulator(*buckets: str) -> Iterator[str]:
    """URL of a moto server, a process of its own, with these buckets."""
    port = _free_port()
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port) as url:
        for bucket in buckets:
            urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT"), timeout=30).close()
        yield url


@contextmanager
def azure_emulator(*containers: str) -> Iterator[str]:
    """URL of an Azurite server with these containers. Skips the test, and says why, where it is not installed."""
    folder = Path(os.environ.get("DILOCO_TEST_AZURITE") or Path.home() / ".cache" / AZURITE)
    main = folder / "node_modules/azurite/dist/src/blob/main.js"
    node = shutil.which("node")
    if node is None or not main.is_file():
        pytest.skip(
            f"no Azurite in {folder}: npm install --prefix {folder} azurite" if node else "there is no node here"
        )
    port = _free_port()
    words = [node, str(main), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with _running([*words, *options], port) as url:
        for container in containers:
            _make_container(url, container)
        yield url


def azure_environment(url: str) -> dict[str, str]:
    """Which leads az:// to an Azurite at this URL."""
    endpoint = f"{url}/{AZURE_ACCOUNT}"
    return {"AZURE_STORAGE_ACCOUNT": AZURE_ACCOUNT, "AZURE_STORAGE_KEY": AZURE_KEY, "AZURE_STORAGE_ENDPOINT": endpoint}


def _make_container(url: str, name: str) -> None:
    """By a request that is signed here, because the client under test makes none."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    lines = ["PUT", *[""] * 11, *(f"{header}:{value}" for header, value in headers.items())]
    text = "\n".join([*lines, f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}", "restype:container"])
    signature = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(signature).decode()}"
    request = urllib.request.Request(f"{url}/{AZURE_ACCOUNT}/{name}?restype=container", b"", headers, method="PUT")
    request.add_unredirected_header("Content-Type", "")
    urllib.request.urlopen(request, timeout=30).close()


@contextmanager
def _running(command: list[str], port: int) -> Iterator[str]:
    """The emulator ends with its standard input, so also when this process is killed."""
    words = ["sh", "-c", '"$@" & read _; kill $!', "sh", *command]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, stdin=subprocess.PIPE, **quiet)
    assert process.stdin is not None
    try:
        _wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        process.wait(20)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """These variables for this process and its children, until the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    """Until it takes connections."""
    ends_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < ends_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"the emulator took no connection within {START_LIMIT_S:.0f} s")
