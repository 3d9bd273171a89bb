"""What a bucket may answer, whichever client asks."""

from __future__ import annotations

from diloco_cli.errors import DilocoError
from diloco_cli.store import transfers
from diloco_cli.store.port import Created, Exists, StoreBrokenError, StoreUnavailableError

RETRYABLE_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}


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
    """The outcome of a create that failed or whose answer was lost, by what its key holds now. It may be somebody
    else's success, or our own, or nobody's: only reading tells. Raises the doubt where nothing is there."""
    if holder is None:
        if isinstance(doubt, DilocoError):
            raise doubt
        raise StoreUnavailableError("the object was deleted while it was created", where=where) from doubt
    return Created() if holder == data else Exists(holder)


def intact(data: bytes, stated_crc32c: str | None, where: str) -> bytes:
    """`data`, if it is what the store's own checksum says, where it has one."""
    if stated_crc32c is not None and stated_crc32c != transfers.crc32c(data):
        raise StoreUnavailableError("the bytes read do not match their crc32c", where=where)
    return data


def within_range(data: bytes, num_bytes: int, where: str) -> bytes:
    """`data`, if it is no more than was asked for."""
    if len(data) > num_bytes:
        raise StoreBrokenError("the store ignores byte ranges", where=where)
    return data
