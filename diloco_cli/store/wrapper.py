"""A store around another one: it passes the verbs on and does something around each call.

`PrefixedStore` is a part of a store as a store of its own: one run inside a bucket. `MeteredStore` counts requests,
bytes and errors; below the retries it counts what the store charges for, but for parts of large objects.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from diloco_cli.errors import DilocoError
from diloco_cli.store.port import Created, Exists, ObjectStat, Store, check_key, check_prefix
from diloco_cli.store.retry import Retrying

T = TypeVar("T")


class StoreWrapper:
    """A subclass overrides `_around`. This class itself adds nothing to a call."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self._store = store

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        """The call's result. `key`: the key, or the prefix of a listing; `num_bytes`: how many bytes it uploads."""
        return call()

    def create(self, key: str, data: bytes) -> Created | Exists:
        return self._around("create", key, lambda: self._store.create(key, data), len(data))

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        return self._around("get", key, lambda: self._store.get(key, max_bytes))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self._around("get_range", key, lambda: self._store.get_range(key, start, end))

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        return self._around("list", prefix, lambda: self._store.list(prefix, after, limit))

    def put(self, key: str, data: bytes) -> None:
        self._around("put", key, lambda: self._store.put(key, data), len(data))

    def delete(self, key: str) -> None:
        self._around("delete", key, lambda: self._store.delete(key))

    def stat(self, key: str) -> ObjectStat | None:
        return self._around("stat", key, lambda: self._store.stat(key))


def received_bytes(answer: object) -> int:
    """How many bytes of an object a call's answer holds."""
    data = answer.data if isinstance(answer, Exists) else answer
    return len(data) if isinstance(data, bytes) else 0


class PrefixedStore:
    """Every key gets `prefix/` in front; nothing outside of it can be named."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = f"{check_key(prefix)}/"
        self.url = f"{store.url.rstrip('/')}/{prefix}"

    def create(self, key: str, data: bytes) -> Created | Exists:
        return self._store.create(self._full(key), data)

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        return self._store.get(self._full(key), max_bytes)

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self._store.get_range(self._full(key), start, end)

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        keys = self._store.list(self._prefix + check_prefix(prefix), self._prefix + after if after else "", limit)
        return [key.removeprefix(self._prefix) for key in keys]

    def put(self, key: str, data: bytes) -> None:
        self._store.put(self._full(key), data)

    def delete(self, key: str) -> None:
        self._store.delete(self._full(key))

    def stat(self, key: str) -> ObjectStat | None:
        found = self._store.stat(self._full(key))
        return None if found is None else replace(found, key=key)

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)


@dataclass(frozen=True)
class StoreCounts:
    """Totals since the start. `requests` is by verb; a failed call counts as a request and as an error, and
    its payload as sent."""

    requests: Mapping[str, int]
    errors: int
    up_bytes: int
    down_bytes: int

    @property
    def num_requests(self) -> int:
        return sum(self.requests.values())

    @property
    def num_writes(self) -> int:
        """Requests of class A, as object stores charge: those that write or list. Deletes are free, reads class B."""
        return sum(self.requests.get(verb, 0) for verb in ("create", "put", "list"))


class MeteredStore(StoreWrapper):
    """Thread-safe; adds no request of its own."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._errors = 0
        self._up_bytes = 0
        self._down_bytes = 0

    @property
    def counts(self) -> StoreCounts:
        """One consistent snapshot."""
        with self._lock:
            requests = MappingProxyType(dict(self._requests))
            return StoreCounts(requests, self._errors, self._up_bytes, self._down_bytes)

    @property
    def retrying(self) -> Retrying | None:
        """The call that the RetryingStore below repeats now, if there is such a store."""
        found = getattr(self._store, "retrying", None)
        return found if isinstance(found, Retrying) else None

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        with self._lock:
            self._requests[verb] += 1
            self._up_bytes += num_bytes
        try:
            answer = call()
        except DilocoError:
            with self._lock:
                self._errors += 1
            raise
        with self._lock:
            self._down_bytes += received_bytes(answer)
        return answer
