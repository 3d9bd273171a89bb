"""The port: few verbs, each with its guarantee. One contract suite (tests/contract) runs against every
implementation.

Keys are relative to the store's prefix: `[A-Za-z0-9._-]` parts joined by `/`, never empty, never `.` or
`..`. Any verb may raise StoreError (exit 6); `retryable` tells whether the same call may work later. A verb
that raised may or may not have taken effect, except that a failed create never leaves a torn object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from diloco_cli.errors import StoreError

HOLDER_BYTES = 8 << 20
"""So much of another writer's bytes a create that lost to them tells at least; no record is longer."""


@dataclass(frozen=True)
class Created:
    """The object now holds exactly the bytes given, written by this call or by an earlier try of the same."""


@dataclass(frozen=True)
class Exists:
    """Another writer's bytes hold the key; they are `data`, or begin with it where `data` is longer than
    `holder_bytes` allows."""

    data: bytes


@dataclass(frozen=True)
class ObjectStat:
    """`modified_s` is the store's own clock, seconds since the epoch."""

    key: str
    size_bytes: int
    modified_s: float


class StoreUnavailableError(StoreError):
    """Timeouts, resets, 408, 409, 429, 5xx: retry with jitter."""

    retryable = True


class StoreForbiddenError(StoreError):
    """401, 403, an expired token, a skewed clock: retry slowly and loudly."""

    retryable = True


class StoreBrokenError(StoreError):
    """The bucket is missing or does not keep the port's contract: stop."""

    retryable = False


def holder_bytes(data: bytes) -> int:
    """How much a create of `data` reads of what it lost to: enough to tell its own bytes and any record."""
    return max(len(data), HOLDER_BYTES)


def beginning(data: bytes, max_bytes: int | None) -> bytes:
    """What `get` gives of an object that is in memory already."""
    return data if max_bytes is None or len(data) <= max_bytes else data[: max_bytes + 1]


class Store(Protocol):
    """A bucket and prefix."""

    url: str

    def create(self, key: str, data: bytes) -> Created | Exists:
        """Atomic, whole, exclusive, durable on return. Same bytes under the same key count as one's own
        success (a lost answer must not turn a success into a failure): callers put a nonce into what must be
        told apart."""
        ...

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        """The whole object, or None if there is none. Read-after-write consistent. Of an object of more than
        `max_bytes` only the first `max_bytes + 1` bytes are read and held, and checked against no checksum: the
        length of what comes tells that it is too long. Give it wherever somebody else may write."""
        ...

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes [start, end) clipped to the object's size, or None if there is no such object."""
        ...

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        """At most `limit` keys that start with `prefix` and are greater than `after`, in lexical order. May
        lag behind creates, and from page to page behind deletes: never decide by it."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Overwrite atomically. For hints only; at most once a second for one key."""
        ...

    def delete(self, key: str) -> None:
        """Remove; no error if there is nothing."""
        ...

    def stat(self, key: str) -> ObjectStat | None:
        """Size and time of last change, or None."""
        ...
