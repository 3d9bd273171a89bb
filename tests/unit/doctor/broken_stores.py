"""Stores that break one promise each, as clones, proxies and caches do."""

from __future__ import annotations

import time
from collections import Counter

from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Exists, StoreForbiddenError, StoreGoneError, StoreUnavailableError


class ChecksThenWrites(MemoryStore):
    """Several racers may look before the first of them writes."""

    def create(self, key: str, data: bytes) -> Created | Exists:
        held = self.get(key)
        if held is not None:
            return Created() if held == data else Exists(held)
        time.sleep(0.02)
        self.put(key, data)
        return Created()


class Overwrites(MemoryStore):
    """Knows no condition at all."""

    def create(self, key: str, data: bytes) -> Created | Exists:
        self.put(key, data)
        return Created()


class DisownsItsOwn(MemoryStore):
    """A repeated create is always somebody else's."""

    def create(self, key: str, data: bytes) -> Created | Exists:
        held = self.get(key)
        return super().create(key, data) if held is None else Exists(held)


class ShowsLosersTheirOwn(MemoryStore):
    """Refuses the second writer, and shows him the wrong bytes."""

    def create(self, key: str, data: bytes) -> Created | Exists:
        outcome = super().create(key, data)
        return outcome if outcome == Created() else Exists(data)


class DropsWrites(MemoryStore):
    """Confirms every seventh create and forgets it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def create(self, key: str, data: bytes) -> Created | Exists:
        self.count += 1
        return super().create(key, data) if self.count % 7 else Created()


class TearsWrites(MemoryStore):
    """A reader can see the first half of a large object."""

    def create(self, key: str, data: bytes) -> Created | Exists:
        if self.get(key) is None and len(data) > 2_000_000:
            self.put(key, data[: len(data) // 2])
            time.sleep(0.1)
            self.put(key, data)
        return super().create(key, data)


class CutsLargeObjects(MemoryStore):
    """Keeps a million bytes at most, and says nothing."""

    def create(self, key: str, data: bytes) -> Created | Exists:
        return super().create(key, data[:999_999])


class IgnoresRanges(MemoryStore):
    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self.get(key)


class RemembersAbsence(MemoryStore):
    """Once asked for an object that was not there, it says so twice more."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered: Counter[str] = Counter()

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        if self.remembered[key] > 0:
            self.remembered[key] -= 1
            return None
        found = super().get(key, max_bytes)
        if found is None:
            self.remembered[key] = 2
        return found


class ShowsOldBytes(MemoryStore):
    """A cache before the store: what was read once stays as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[str, bytes] = {}

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        found = super().get(key, max_bytes)
        return None if found is None else self.cached.setdefault(key, found)


class ListsLate(MemoryStore):
    """The first listing of a prefix is shown for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: dict[str, list[str]] = {}

    def create(self, key: str, data: bytes) -> Created | Exists:
        self.list(key.rpartition("/")[0] + "/")
        return super().create(key, data)

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        return self.listed.setdefault(prefix, super().list(prefix, after, limit))


class ListsOutOfOrder(MemoryStore):
    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        return super().list(prefix, after, limit)[::-1]


class KeepsDeleted(MemoryStore):
    def delete(self, key: str) -> None:
        return


class Forbids(MemoryStore):
    """Credentials that may do only these verbs."""

    def __init__(self, *allowed: str) -> None:
        super().__init__()
        self.allowed = allowed

    def _check(self, verb: str) -> None:
        if verb not in self.allowed:
            raise StoreForbiddenError(f"{verb} is not allowed")

    def create(self, key: str, data: bytes) -> Created | Exists:
        self._check("create")
        return super().create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._check("put")
        super().put(key, data)

    def delete(self, key: str) -> None:
        self._check("delete")
        super().delete(key)

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        self._check("list")
        return super().list(prefix, after, limit)


class NoBucket(Forbids):
    """Nobody has made it yet."""

    def _check(self, verb: str) -> None:
        raise StoreGoneError("no such bucket")


class Hiccups(MemoryStore):
    """Every fortieth call fails in passing, as busy stores do; create fails after its effect."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def create(self, key: str, data: bytes) -> Created | Exists:
        outcome = super().create(key, data)
        self._maybe_fail()
        return outcome

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        self._maybe_fail()
        return super().get(key, max_bytes)

    def _maybe_fail(self) -> None:
        self.count += 1
        if self.count % 40 == 0:
            raise StoreUnavailableError("busy")
