"""The common part of stores over a network: the verbs of the port, made of one client's requests.

Also the answers of a bucket, common to all clients; and `check_endpoint`: where a client may send its requests, because
an address from the environment may be wrong, or set by an attacker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from shlex import quote
from typing import TypeVar
from urllib.parse import urlsplit

from diloco_cli.environment import ALLOW_HTTP_VARIABLE, environment_value
from diloco_cli.errors import DilocoError, NoSpaceError
from diloco_cli.store import transfers
from diloco_cli.store.port import (
    Created,
    Exists,
    ObjectStat,
    StoreBrokenError,
    StoreForbiddenError,
    StoreGoneError,
    StoreThrottledError,
    StoreUnavailableError,
    check_key,
    holder_bytes,
)
from diloco_cli.store.url import KINDS, parse_url, without_credentials

TOO_MANY = 429
FULL = 507  # Insufficient Storage
RETRYABLE_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
T = TypeVar("T")
_METADATA_NAMES = {"metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal"}
_METADATA_ADDRESSES = {ip_address("fd00:ec2::254"), ip_address("100.100.100.200")}


class ObjectAbsentError(Exception):
    """There is no such object."""


class ConditionFailedError(Exception):
    """A precondition did not hold: the object is there already, or is another one."""


class RangeBehindEndError(Exception):
    """A range that starts behind the end of the object."""


def short_text(text: str) -> str:
    """One printable line."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line)[:300]


def settled(holder: bytes | None, data: bytes, doubt: Exception, where: str) -> Created | Exists:
    """The outcome of a create that failed or whose answer was lost, by the bytes that its key holds now (`holder`):
    ours or another writer's. Raises `doubt` if there is no object."""
    if holder is not None:
        return Created(checked=True) if holder == data else Exists(holder)
    if isinstance(doubt, DilocoError):
        raise doubt
    raise StoreUnavailableError("the object was deleted while it was created", where=where) from doubt


@dataclass(frozen=True)
class Retention:
    """How long a bucket keeps deleted objects, and bills them; 0: not at all, None: until a person removes them.
    `turn_off` is a command."""

    kept_s: float | None
    turn_off: str


ANSWERS = (ObjectAbsentError, ConditionFailedError, RangeBehindEndError)
"""Errors of a client's request that are answers; all others are errors of the port."""
_BY_STATUS = {404: ObjectAbsentError, 412: ConditionFailedError, 416: RangeBehindEndError}


class BucketStore(ABC):
    """A bucket and prefix. The client starts at the first call, in the process that makes it: never share one store
    with a forked child. It retries only the parts of a large object."""

    def __init__(self, url: str, sorted_error: Callable[[Exception, str], Exception]) -> None:
        """`sorted_error(error, where)`: the port's error, or one of ANSWERS, for what the client raised."""
        self.url = url
        self._sorted_error = sorted_error
        self._checks_uploads = parse_url(url).kind.checks_uploads

    def create(self, key: str, data: bytes) -> Created | Exists:
        try:
            self._sent(check_key(key), data, exclusive=True)
            return Created(checked=self._checks_uploads)
        except (ConditionFailedError, StoreUnavailableError) as doubt:  # of two creates at once either may have won
            return settled(self.get(key, holder_bytes(data)), data, doubt, self._where(key))

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        check_key(key)
        try:
            data, stated = self._run(key, lambda: transfers.download(partial(self._open, key), max_bytes), None)
        except ObjectAbsentError:
            return None
        except RangeBehindEndError:
            return b""  # no range of an empty object can be had
        is_whole = max_bytes is None or len(data) <= max_bytes
        if is_whole and stated is not None and stated != transfers.crc32c(data):
            raise StoreUnavailableError("the bytes read do not match their crc32c", where=self._where(key))
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        check_key(key)
        start, end = max(0, start), max(0, end)
        if start >= end:
            return None if self.stat(key) is None else b""

        async def read() -> bytes:
            async with self._open(key, start, end) as opened:
                return b"".join([piece async for piece in opened.pieces])

        try:
            found = self._run(key, read, end - start)
        except ObjectAbsentError:
            return None
        except RangeBehindEndError:
            return b""
        if len(found) > end - start:
            raise StoreBrokenError("the store ignores byte ranges", where=self._where(key))
        return found

    @abstractmethod
    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]: ...

    def put(self, key: str, data: bytes) -> None:
        self._sent(check_key(key), data, exclusive=False)

    def delete(self, key: str) -> None:
        with suppress(ObjectAbsentError):  # S3 itself says nothing here, others do
            self._run(check_key(key), partial(self._remove, key), 0)

    def stat(self, key: str) -> ObjectStat | None:
        try:
            found: ObjectStat = self._run(check_key(key), partial(self._describe, key), 0)
            return found
        except ObjectAbsentError:
            return None

    def retention(self, key: str) -> Retention | None:
        """None if the service does not tell. May write the key. Raises StoreError."""
        return None

    def expiry(self) -> str | None:
        """The rules by which the bucket deletes what is there, as text; None if the service does not tell. Raises
        StoreError."""
        return None

    @abstractmethod
    async def _upload(self, key: str, data: bytes, exclusive: bool) -> None:
        """ConditionFailedError if `exclusive` and there is an object already. Bounds its own time."""

    @abstractmethod
    def _opened(
        self, key: str, start: int, end: int | None, version: str | None
    ) -> AbstractAsyncContextManager[transfers.Opened]:
        """Bytes [start, end), clipped to the object's size; of the named version, if one is given."""

    @abstractmethod
    async def _remove(self, key: str) -> None: ...

    @abstractmethod
    async def _describe(self, key: str) -> ObjectStat: ...

    @abstractmethod
    def _client(self) -> object:
        """The client, started at the first call."""

    def _run(self, key: str, work: Callable[[], Awaitable[T]], num_bytes: int | None) -> T:
        """Run the work in the loop of all transfers; raises one of ANSWERS or an error of the port. The work has the
        time of a transfer of `num_bytes`; None: it bounds its own time."""
        from fsspec.asyn import get_loop, sync

        async def bounded() -> T:
            return await (work() if num_bytes is None else transfers.on_time(num_bytes, work()))

        with self._sorted_errors(key):
            self._client()
            result: T = sync(get_loop(), bounded)
            return result

    def _sent(self, key: str, data: bytes, exclusive: bool) -> None:
        try:
            self._run(key, partial(self._upload, key, data, exclusive), None)
        except ObjectAbsentError as error:
            raise missing_bucket(self.url) from error

    @asynccontextmanager
    async def _open(
        self, key: str, start: int, end: int | None, version: str | None = None
    ) -> AsyncIterator[transfers.Opened]:
        try:
            with self._sorted_errors(key):
                async with self._opened(key, start, end, version) as opened:
                    yield opened
        except ANSWERS as error:
            if version is None:
                raise
            raise StoreUnavailableError("the object changed while it was read", where=self._where(key)) from error

    @contextmanager
    def _sorted_errors(self, key: str) -> Iterator[None]:
        """Turns the errors of all libraries below into those of the port."""
        try:
            yield
        except (DilocoError, *ANSWERS):
            raise
        except Exception as error:
            raise self._sorted_error(error, self._where(key)) from error

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


def foreign_answer(where: str) -> StoreUnavailableError:
    """For an answer with a good status that is no store's: it must neither count as an object nor as a success."""
    return StoreUnavailableError("the answer is no store's: a page (HTML) of a proxy or a login?", where=where)


def error_of_status(status: int) -> Exception | None:
    """The one of ANSWERS that this HTTP status stands for."""
    return _BY_STATUS[status]() if status in _BY_STATUS else None


def throttled(text: str, where: str) -> StoreThrottledError:
    return StoreThrottledError(f"the store takes no more calls now: {text}", where=where)


def no_space(text: str, where: str) -> NoSpaceError:
    """A bucket's quota is used up, or the service's disks are full."""
    hint = "raise the bucket's quota or free some space; the syncer deletes what its run needs no more"
    return NoSpaceError(f"no space left in the bucket: {text}", where=where, hint=hint)


def error_text(error: Exception) -> str:
    return short_text(str(error)) or type(error).__name__


def missing_bucket(url: str) -> StoreGoneError:
    """`url`: of the bucket, or of anything in it."""
    scheme, _, path = url.partition("://")
    bucket = path.partition("/")[0]
    return StoreGoneError("no such bucket", where=url, hint=KINDS[scheme].makes_place.format(place=bucket))


def check_endpoint(url: str, where: str) -> str:
    """The URL itself, with its scheme (http if it has none). StoreForbiddenError for plain http beyond this machine,
    where the network would see credentials and payloads, but to the host that the user allows; and for the addresses
    at which clouds hand out a machine's credentials."""
    full = url if "://" in url else f"http://{url}"
    shown = f"{where}={without_credentials(url)!a}"
    try:
        parts = urlsplit(full)
    except ValueError as error:
        raise StoreForbiddenError(f"not an address: {error}", where=shown, hint="https://HOST[:PORT]") from error
    host = (parts.hostname or "").rstrip(".").lower()
    if parts.scheme not in {"http", "https"} or not host:
        raise StoreForbiddenError("not an address of a store", where=shown, hint="https://HOST[:PORT]")
    if is_metadata_host(host):
        raise StoreForbiddenError("this address hands out credentials of the machine and is no store", where=shown)
    allowed = (environment_value(ALLOW_HTTP_VARIABLE) or "").rstrip(".").lower()
    if parts.scheme == "http" and host != allowed and not is_loopback(host):
        own = f"on a network that may see keys and weights: export {ALLOW_HTTP_VARIABLE}={quote(host)}"
        raise StoreForbiddenError(
            "plain http is for loopback addresses only",
            where=shown,
            hint=f"use https://; {own}, or store: {{allow_http: {host}}} in the inventory",
        )
    return full


def is_loopback(host: str) -> bool:
    """Whether the name or address can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_metadata_host(host: str) -> bool:
    """Whether this is a cloud's metadata service: a link-local address, or one of its names."""
    if host in _METADATA_NAMES:
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_link_local) or mapped in _METADATA_ADDRESSES
