"""The port: few verbs, each with its guarantee. One contract suite (tests/contract) runs against every
implementation.

Keys are relative to the store's prefix: `[A-Za-z0-9._-]` parts joined by `/`, never empty, never `.` or
`..`. Any verb may raise StoreError (exit 6); `retryable` tells whether the same call may work later. A verb
that raised may or may not have taken effect, except that a failed create never leaves a torn object.

`check_key`: every implementation checks a key before it touches anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from diloco_cli.errors import StoreError

MAX_CONNECTIONS = 48  # of one process to a store; below what the clients keep
HOLDER_BYTES = 8 << 20
"""A create that lost returns at least so many of the other writer's bytes; no record is longer."""
MAX_KEY_CHARACTERS = 900
MAX_PART_CHARACTERS = 200
"""GCS and S3 allow 1024 bytes for a name, of which the store's prefix takes a part; file systems 255 for a
part."""
_A_PART = rf"(?!\.{{1,2}}(?:/|\Z))[A-Za-z0-9._-]{{1,{MAX_PART_CHARACTERS}}}"


@dataclass(frozen=True)
class Created:
    """The object now holds exactly the bytes given, written by this call or by an earlier try of the same. `checked`:
    this is known, because the bytes were read back, or because the store compares an upload with its checksum; else a
    store with a fault may have kept others."""

    checked: bool = field(default=False, compare=False)


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


@dataclass(frozen=True)
class Discarded:
    """What killed writers had left in a store and was removed."""

    num_files: int = 0
    num_bytes: int = 0


class StoreUnavailableError(StoreError):
    """Timeouts, resets, 408, 409, 429, 5xx: retry with jitter."""

    retryable = True


class StoreThrottledError(StoreUnavailableError):
    """Too many calls (429, SlowDown): slower ones will work."""


class UploadDamagedError(StoreUnavailableError):
    """The store has compared the bytes with the checksum that came with them, and refused them."""


class StoreForbiddenError(StoreError):
    """401, 403, an expired token, a skewed clock: retry slowly and loudly."""

    retryable = True


class StoreBrokenError(StoreError):
    """The bucket is missing or does not keep the port's contract: stop."""

    retryable = False


class StoreGoneError(StoreBrokenError):
    """There is no such bucket or directory (any more)."""


def holder_bytes(data: bytes) -> int:
    """How many bytes of the key's object a lost create of `data` reads: enough for its own bytes and any record."""
    return max(len(data), HOLDER_BYTES)


def beginning(data: bytes, max_bytes: int | None) -> bytes:
    """The part of an object in memory that `get` returns."""
    return data if max_bytes is None or len(data) <= max_bytes else data[: max_bytes + 1]


IS_GENTLE: ContextVar[Callable[[], bool]] = ContextVar("is_gentle", default=lambda: False)


@contextmanager
def gentle(holds: Callable[[], bool]) -> Iterator[None]:
    """Uploads of this thread go over one connection while `holds` says so, which is asked again after each part."""
    before = IS_GENTLE.set(holds)
    try:
        yield
    finally:
        IS_GENTLE.reset(before)


class Store(Protocol):
    """A bucket and prefix."""

    url: str

    def create(self, key: str, data: bytes) -> Created | Exists:
        """Atomic, whole, exclusive, durable on return. Same bytes under the same key count as this call's
        success (a lost answer must not turn a success into a failure): callers put a nonce into records that
        must differ between writers. Of 256 MB and more a store may only look before whether the key is free: keys of
        such objects name their digest."""
        ...

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        """The whole object, or None if there is none. Read-after-write consistent. Of an object of more than
        `max_bytes` only the first `max_bytes + 1` bytes are read and held, and checked against no checksum: the
        length of the answer shows that it is too long. Give it for every key that another process may write."""
        ...

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes [start, end) clipped to the object's size, or None if there is no such object."""
        ...

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        """At most `limit` keys that start with `prefix` and are greater than `after`, in lexical order. May
        lag behind creates, and from page to page behind deletes: no decision may depend on it."""
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


def all_keys(store: Store, prefix: str = "", after: str = "") -> Iterator[str]:
    """Those that start with `prefix` and are greater than `after`, page by page."""
    while page := store.list(prefix, after):
        yield from page
        after = page[-1]


_PART, _KEY = re.compile(_A_PART), re.compile(f"{_A_PART}(?:/{_A_PART})*")


class BadKeyError(StoreError):
    """The key could never name an object; calling again does not help."""

    retryable = False


def is_key_part(part: str) -> bool:
    """Whether `part` may stand between two slashes."""
    return _PART.fullmatch(part) is not None  # fullmatch: `$` would let a trailing newline through


def check_key(key: str) -> str:
    """The key itself; BadKeyError if it is not `[A-Za-z0-9._-]` parts joined by single slashes."""
    if len(key) > MAX_KEY_CHARACTERS or _KEY.fullmatch(key) is None:
        raise BadKeyError(
            f"not a key: {key[:MAX_PART_CHARACTERS]!a}",
            hint="keys are [A-Za-z0-9._-] parts joined by '/', without '.' and '..'",
        )
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself; BadKeyError if no key could start with it. It may be empty or end anywhere in a
    key."""
    whole, _, last = prefix.rpartition("/")
    if whole:
        check_key(whole)
    if (prefix.startswith("/")) or (last.strip(".") and not is_key_part(last)) or len(last) > MAX_PART_CHARACTERS:
        raise BadKeyError(f"not a prefix of keys: {prefix[:MAX_PART_CHARACTERS]!a}")
    return prefix


def is_between(key: str, prefix: str, after: str) -> bool:
    """Whether a listing of (prefix, after) shows the key."""
    return key > after and key.startswith(prefix)
