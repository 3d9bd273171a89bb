"""Stores that the contract suite starts and stops by itself, on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 60.0

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@contextmanager
def s3_emulator(*buckets: str) -> Iterator[str]:
    """URL of a moto server, a process of its own, with these buckets."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/moto-api/", process)
        for bucket in buckets:
            urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT"), timeout=30).close()
        yield url
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def server(module: str, *arguments: str) -> Iterator[str]:
    """URL of the fake GCS or the fault proxy, as a process of its own."""
    command = [sys.executable, "-m", f"tests.contract.{module}", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


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
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    ends_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            raise RuntimeError(f"the emulator ended with status {process.returncode}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError(f"the emulator did not answer at {url} within {START_LIMIT_S:.0f} s")
