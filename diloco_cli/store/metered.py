"""Counts what goes through: requests, bytes, errors. Put it below the retries to count what the store
charges for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from diloco_cli.errors import DilocoError
from diloco_cli.store.port import Store
from diloco_cli.store.retry import Retrying
from diloco_cli.store.wrapper import StoreWrapper, received_bytes

T = TypeVar("T")


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
        """Class A, as object stores charge: what writes or lists. Deleting is free, the rest reads (class B)."""
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
        """What the retries below report, if there are any."""
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
