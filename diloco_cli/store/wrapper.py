"""A store around another one: the verbs go on to it, and something happens around each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from diloco_cli.store.port import Created, Exists, ObjectStat, Store

T = TypeVar("T")


class StoreWrapper:
    """A subclass says in `_around` what happens. As it stands, nothing does."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self._store = store

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        """The call's result. `key`: of a listing its prefix; `num_bytes`: what goes up."""
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
    """How much of an object came down with a call's answer."""
    data = answer.data if isinstance(answer, Exists) else answer
    return len(data) if isinstance(data, bytes) else 0
