"""What a bucket may answer, whichever client asks."""

from __future__ import annotations

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
