"""A part of a store as a store of its own: one run inside a bucket."""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.store.keys import check_key, check_prefix
from diloco_cli.store.port import Created, Exists, ObjectStat, Store


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
