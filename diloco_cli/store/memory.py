"""A store in this process's memory: for tests, shared by threads, gone with the process."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

from diloco_cli import clock
from diloco_cli.store.port import (
    Created,
    Exists,
    ObjectStat,
    Store,
    beginning,
    check_key,
    check_prefix,
    holder_bytes,
)
from diloco_cli.store.wrappers import PrefixedStore


@dataclass(frozen=True)
class _Held:
    data: bytes
    modified_s: float


class MemoryStore:
    """One lock around one dictionary: every verb is atomic. "Durable" here: as long as the process lives."""

    def __init__(self, name: str = "anonymous") -> None:
        self.url = f"memory://{name}"
        self._lock = threading.Lock()
        self._objects: dict[str, _Held] = {}
        self._sorted_keys: list[str] = []

    def create(self, key: str, data: bytes) -> Created | Exists:
        check_key(key)
        with self._lock:
            held = self._objects.get(key)
            if held is None:
                self._write(key, data)
                return Created()
        return Created() if held.data == data else Exists(beginning(held.data, holder_bytes(data)))

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        check_key(key)
        with self._lock:
            held = self._objects.get(key)
        return None if held is None else beginning(held.data, max_bytes)

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        data = self.get(key)
        return None if data is None else data[max(0, start) : max(0, end)]

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        check_prefix(prefix)
        found: list[str] = []
        with self._lock:
            first = max(bisect_left(self._sorted_keys, prefix), bisect_right(self._sorted_keys, after))
            for key in self._sorted_keys[first : first + max(0, limit)]:
                if not key.startswith(prefix):
                    break
                found.append(key)
        return found

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        with self._lock:
            self._write(key, data)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            if self._objects.pop(key, None) is not None:
                del self._sorted_keys[bisect_left(self._sorted_keys, key)]

    def stat(self, key: str) -> ObjectStat | None:
        check_key(key)
        with self._lock:
            held = self._objects.get(key)
        return None if held is None else ObjectStat(key, len(held.data), held.modified_s)

    def _write(self, key: str, data: bytes) -> None:
        if key not in self._objects:
            insort(self._sorted_keys, key)
        self._objects[key] = _Held(bytes(data), clock.wall_s())


_shared_lock = threading.Lock()
_shared: dict[str, MemoryStore] = {}


def shared_memory_store(name: str, prefix: str = "") -> Store:
    """The one store of that name in this process, or a part of it."""
    with _shared_lock:
        store = _shared.setdefault(name, MemoryStore(name))
    return PrefixedStore(store, prefix) if prefix else store
