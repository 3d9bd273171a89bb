"""Store URLs: an allow-list of schemes, and paths made absolute against the file that names them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from diloco_cli.errors import UsageError

BUCKET_SCHEMES = ("gs", "s3")
SCHEMES = (*BUCKET_SCHEMES, "file", "memory")
ALLOWED = "allowed: gs://BUCKET/PREFIX, s3://BUCKET/PREFIX, file:///PATH, memory://NAME, or a path"
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,221}")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def without_credentials(url: str) -> str:
    """The URL for an error: without user, password and query."""
    return re.split(r"[?#]", re.sub(r"//[^/]*@", "//...@", url), maxsplit=1)[0]


def normalise_store_url(text: str, base: Path) -> str:
    """An absolute URL without a trailing slash; `base` is the folder that a relative path starts from."""
    if any(character.isspace() and character != " " for character in text) or not text.isprintable():
        raise UsageError(f"the store URL {text!r} holds a control character; {ALLOWED}")
    match = URL.fullmatch(text)
    if match is None:
        return "file://" + _absolute(_without_tilde(text), base)
    scheme, rest = match[1], match[2].rstrip("/")
    if scheme not in SCHEMES:
        raise UsageError(f"unknown store scheme '{scheme}://'; {ALLOWED}")
    if scheme == "file":
        if not rest.startswith("/"):
            raise UsageError(f"'{text}' needs an absolute path (three slashes), or write the path alone; {ALLOWED}")
        return "file://" + _absolute(Path(rest), base)
    if scheme in BUCKET_SCHEMES and BUCKET.fullmatch(rest.partition("/")[0]) is None:
        shown = without_credentials(text)
        raise UsageError(f"'{shown}' has no valid bucket name (credentials do not belong here); {ALLOWED}")
    if ".." in rest.split("/"):
        raise UsageError(f"'{text}' holds '..'; write the prefix out")
    return f"{scheme}://{rest}"


def _without_tilde(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"'{text}' names a user who has no home here; write the path out") from None


def _absolute(path: Path, base: Path) -> str:
    """The absolute path, without following links, so that the URL is the same before and after the folder exists."""
    return os.path.normpath(base.absolute() / path)
