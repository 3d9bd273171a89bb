"""Every implementation of the store port, under one name each."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco_cli.randomness import nonce
from diloco_cli.store.local import LocalStore
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore
from diloco_cli.store.url import parse_url
from diloco_cli.store.wrappers import EmulatedLink, MeteredStore, PrefixedStore
from tests.contract.emulators import S3_ENVIRONMENT, azure_emulator, azure_environment, environment, s3_emulator
from tests.contract.fake_gcs import FakeGCS
from tests.contract.fault_proxy import FaultProxy

SHARED_MEMORY = Path("/dev/shm")
REAL_URL_VARIABLES = {f"real-{scheme}": f"DILOCO_TEST_{scheme.upper()}_URL" for scheme in ("gs", "s3", "az")}


@dataclass(frozen=True)
class Backend:
    """`open_again` gives another client of the same store; `url` is None where other processes cannot reach
    it. `num_rounds`: how many rounds of a race it can take in a second or so."""

    name: str
    open_again: Callable[[], Store]
    url: str | None = None
    num_rounds: int = 100


SAMPLE = (
    "created_object_holds",
    "second_creator",
    "same_bytes",
    "eight_racing_threads",
    "missing_object_is_none",
    "range_is",
    "longer_than_the_bound",
    "lexical_order",
    "answer_was_lost",
    "forbidden_call",
    "missing_bucket",
    "deleted",
)
"""Words in the names of tests that run on s3 and az without `-m long`, which runs all of them."""
IN_PROCESS = ["memory", "retrying", "metered", "link", "prefixed"]
REMOTE = ["gs", "s3", "az"]
REAL = [name for name, variable in REAL_URL_VARIABLES.items() if os.environ.get(variable)]
BACKENDS = ["local", "local-tmpfs", *IN_PROCESS, *REMOTE, *REAL]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = getattr(item, "callspec", None)
        names = {} if parameters is None else parameters.params
        is_sampled = any(word in item.name for word in SAMPLE)
        if {names.get("backend"), names.get("bucket")} & {"s3", "az"} and not is_sampled:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[FakeGCS]:
    with FakeGCS("bucket") as server:
        yield server


@pytest.fixture
def gs(gcs_server: FakeGCS) -> Iterator[FakeGCS]:
    """The server with an empty bucket and no faults; gs:// leads to it."""
    gcs_server.heal()
    gcs_server.objects["bucket"].clear()
    with environment({"STORAGE_EMULATOR_HOST": gcs_server.url}):
        yield gcs_server
    gcs_server.heal()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[FaultProxy]:
    with s3_emulator("bucket") as url, FaultProxy(url) as proxy:
        yield proxy


@pytest.fixture
def s3(s3_server: FaultProxy) -> Iterator[FaultProxy]:
    """A proxy without faults before the S3 emulator; s3:// leads to it. Its bucket keeps what earlier tests wrote."""
    s3_server.faults.heal()
    with environment({"AWS_ENDPOINT_URL": s3_server.url, **S3_ENVIRONMENT}):
        yield s3_server
    s3_server.faults.heal()


@pytest.fixture(scope="session")
def azure_server() -> Iterator[FaultProxy]:
    with azure_emulator("bucket") as url, FaultProxy(url) as proxy:
        yield proxy


@pytest.fixture
def az(azure_server: FaultProxy) -> Iterator[FaultProxy]:
    """A proxy without faults before the Azure emulator; az:// leads to it."""
    azure_server.faults.heal()
    with environment(azure_environment(azure_server.url)):
        yield azure_server
    azure_server.faults.heal()


@pytest.fixture
def shared_memory_directory() -> Iterator[Path]:
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip(f"{SHARED_MEMORY} is not writable")
    path = Path(tempfile.mkdtemp(prefix="diloco-test-", dir=SHARED_MEMORY))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    name: str = request.param
    memory = MemoryStore()
    if name in {"local", "local-tmpfs"}:
        root = request.getfixturevalue("shared_memory_directory") if name == "local-tmpfs" else tmp_path / "s"
        root.mkdir(exist_ok=True)
        yield Backend(name, lambda: LocalStore(root), root.as_uri(), num_rounds=200)
    elif name in IN_PROCESS:
        wrapped: dict[str, Callable[[], Store]] = {
            "memory": lambda: memory,
            "retrying": lambda: RetryingStore(memory),
            "metered": lambda: MeteredStore(memory),
            "link": lambda: EmulatedLink(memory, 8e9, 8e9, rtt_s=0.0002),
            "prefixed": lambda: PrefixedStore(memory, "runs/one"),
        }
        yield Backend(name, wrapped[name])
    elif name in REAL_URL_VARIABLES:
        yield from _real_backend(name)
    else:
        request.getfixturevalue(name)
        url = f"{name}://bucket/runs/{nonce()}"  # a prefix of its own for each test
        yield Backend(name, lambda: open_store(url), url, num_rounds=10)


def _real_backend(name: str) -> Iterator[Backend]:
    """What the test wrote is deleted again."""
    url = f"{os.environ[REAL_URL_VARIABLES[name]].rstrip('/')}/contract-{nonce()}"
    yield Backend(name, lambda: RetryingStore(open_store(url), deadline_s=60), url, num_rounds=5)
    store = RetryingStore(open_store(url), deadline_s=60)
    while keys := store.list(""):
        for key in keys:
            store.delete(key)


_clients: dict[str, Store] = {}


def shared_client(url: str) -> Store:
    """A part of the store at `url`, through a client that the whole session shares: starting one takes a while."""
    parsed = parse_url(url)
    if parsed.scheme not in _clients:
        _clients[parsed.scheme] = open_store(f"{parsed.scheme}://{parsed.place}")
    return PrefixedStore(_clients[parsed.scheme], parsed.prefix)


@pytest.fixture
def store(backend: Backend) -> Store:
    if backend.name in REMOTE and backend.url is not None:
        return shared_client(backend.url)
    return backend.open_again()
