"""The simulated bucket as its wire shows it: a create that finds the key taken says so and nothing more."""

from __future__ import annotations

from collections.abc import Callable

from diloco_cli.store.keys import check_key, check_prefix
from diloco_cli.store.port import Created, Exists, ObjectStat, beginning


class Bucket:
    """Objects by key. Implements store.port.Store, but for two things: `Exists` carries no bytes, and one's own bytes
    count as taken, too. Clients settle that (`client.py`). Strongly consistent, but a listing does not show a key
    before `listed_from_s`, and shows one that is gone up to `listed_until_s`."""

    url = "memory://histories"

    def __init__(self, now_s: Callable[[], float] = lambda: 0.0) -> None:
        self.objects: dict[str, bytes] = {}
        self.listed_from_s: dict[str, float] = {}
        self.listed_until_s: dict[str, float] = {}
        self._now_s = now_s

    def create(self, key: str, data: bytes) -> Created | Exists:
        if key in self.objects:
            return Exists(b"")
        self.objects[check_key(key)] = data
        return Created()

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        data = self.objects.get(key)
        return None if data is None else beginning(data, max_bytes)

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        data = self.objects.get(key)
        return None if data is None else data[max(0, start) : max(0, end)]

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        check_prefix(prefix)
        now_s, hidden = self._now_s(), self.listed_from_s
        found = (key for key in self.objects if key.startswith(prefix) and key > after)
        shown = {key for key in found if hidden.get(key, now_s) <= now_s}
        for key, until_s in self.listed_until_s.items():
            if until_s > now_s and key.startswith(prefix) and key > after:
                shown.add(key)
        return sorted(shown)[:limit]

    def put(self, key: str, data: bytes) -> None:
        self.objects[check_key(key)] = data

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def stat(self, key: str) -> ObjectStat | None:
        data = self.objects.get(key)
        return None if data is None else ObjectStat(key, len(data), 0.0)
