"""Text from a bucket, a log or a user's code, as it may be shown: it must not control a terminal."""

from __future__ import annotations


def escaped(text: str, keep: str = "") -> str:
    """The text with escapes in the place of control characters, except those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()
