"""Every implementation of the store port, under one name each."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco_cli.store.local import LocalStore
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.metered import MeteredStore
from diloco_cli.store.open import join_url, open_store
from diloco_cli.store.port import Store
from diloco_cli.store.prefixed import PrefixedStore
from diloco_cli.store.retry import RetryingStore
from diloco_cli.store.wan import EmulatedLink
from tests.contract.fake_gcs import FakeGCS

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Backend:
    """`open_again` gives another client of the same store; `url` is None where other processes cannot reach
    it."""

    name: str
    open_again: Callable[[], Store]
    url: str | None = None


BACKENDS = ["local", "local-tmpfs", "memory", "retrying", "metered", "link", "prefixed", "gcs"]


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[FakeGCS]:
    with FakeGCS("bucket") as server:
        before = os.environ.get("STORAGE_EMULATOR_HOST")
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        yield server
        if before is None:
            del os.environ["STORAGE_EMULATOR_HOST"]
        else:
            os.environ["STORAGE_EMULATOR_HOST"] = before


@pytest.fixture
def gcs(gcs_server: FakeGCS) -> Iterator[FakeGCS]:
    """The server with an empty bucket and no faults."""
    gcs_server.heal()
    gcs_server.objects["bucket"].clear()
    yield gcs_server
    gcs_server.heal()


@pytest.fixture
def shared_memory_directory() -> Iterator[Path]:
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip(f"{SHARED_MEMORY} is not writable")
    path = Path(tempfile.mkdtemp(prefix="diloco-test-", dir=SHARED_MEMORY))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    name: str = request.param
    memory = MemoryStore()
    if name in {"local", "local-tmpfs"}:
        root = request.getfixturevalue("shared_memory_directory") if name == "local-tmpfs" else tmp_path / "s"
        root.mkdir(exist_ok=True)
        return Backend(name, lambda: LocalStore(root), root.as_uri())
    elif name == "gcs":
        request.getfixturevalue("gcs")
        url = join_url("gs://bucket/runs", "contract")
        return Backend(name, lambda: open_store(url), url)
    else:
        wrapped: dict[str, Callable[[], Store]] = {
            "memory": lambda: memory,
            "retrying": lambda: RetryingStore(memory),
            "metered": lambda: MeteredStore(memory),
            "link": lambda: EmulatedLink(memory, 8e9, 8e9, rtt_s=0.0002),
            "prefixed": lambda: PrefixedStore(memory, "runs/one"),
        }
        return Backend(name, wrapped[name])


@pytest.fixture
def store(backend: Backend) -> Store:
    return backend.open_again()
