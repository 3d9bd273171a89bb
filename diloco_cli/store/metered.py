"""Counts what goes through: requests, bytes, errors. Put it below the retries to count what the store
charges for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from diloco_cli.errors import DilocoError
from diloco_cli.store.port import Created, Exists, ObjectStat, Store
from diloco_cli.store.retry import Retrying


@dataclass(frozen=True)
class StoreCounts:
    """Totals since the start. `requests` is by verb; a failed call counts as a request and as an error, and
    its payload as sent."""

    requests: Mapping[str, int]
    errors: int
    bytes_up: int
    bytes_down: int

    @property
    def num_requests(self) -> int:
        return sum(self.requests.values())

    @property
    def num_writes(self) -> int:
        """Class A, as object stores charge: what writes or lists. Deleting is free, the rest reads (class B)."""
        return sum(self.requests.get(verb, 0) for verb in ("create", "put", "list"))


class MeteredStore:
    """Thread-safe; adds no request of its own."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self._store = store
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._errors = 0
        self._bytes_up = 0
        self._bytes_down = 0

    @property
    def counts(self) -> StoreCounts:
        """One consistent snapshot."""
        with self._lock:
            requests = MappingProxyType(dict(self._requests))
            return StoreCounts(requests, self._errors, self._bytes_up, self._bytes_down)

    @property
    def retrying(self) -> Retrying | None:
        """What the retries below report, if there are any."""
        found = getattr(self._store, "retrying", None)
        return found if isinstance(found, Retrying) else None

    def create(self, key: str, data: bytes) -> Created | Exists:
        with self._counted("create", len(data)):
            outcome = self._store.create(key, data)
        if isinstance(outcome, Exists):
            self._received(outcome.data)
        return outcome

    def get(self, key: str, most_bytes: int | None = None) -> bytes | None:
        with self._counted("get"):
            return self._received(self._store.get(key, most_bytes))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        with self._counted("get_range"):
            return self._received(self._store.get_range(key, start, end))

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        with self._counted("list"):
            return self._store.list(prefix, after, limit)

    def put(self, key: str, data: bytes) -> None:
        with self._counted("put", len(data)):
            self._store.put(key, data)

    def delete(self, key: str) -> None:
        with self._counted("delete"):
            self._store.delete(key)

    def stat(self, key: str) -> ObjectStat | None:
        with self._counted("stat"):
            return self._store.stat(key)

    @contextmanager
    def _counted(self, verb: str, num_bytes: int = 0) -> Iterator[None]:
        with self._lock:
            self._requests[verb] += 1
            self._bytes_up += num_bytes
        try:
            yield
        except DilocoError:
            with self._lock:
                self._errors += 1
            raise

    def _received(self, data: bytes | None) -> bytes | None:
        if data:
            with self._lock:
                self._bytes_down += len(data)
        return data
