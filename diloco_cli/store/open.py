"""From a URL to a store. The only place that reads URLs: clients get the parsed parts, never the raw string,
because fsspec would also open chained URLs and dozens of other schemes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from diloco_cli.errors import UsageError
from diloco_cli.store.keys import BadKeyError, check_key
from diloco_cli.store.port import Store, StoreBrokenError, StoreForbiddenError
from diloco_cli.store.prefixed import PrefixedStore

SCHEMES = ("gs", "s3", "file", "memory")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,221}")
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True)
class StoreUrl:
    """A URL taken apart. `place` is a bucket, an absolute directory or the name of a store in memory;
    `prefix` has no slash at its ends and is empty for a directory."""

    scheme: str
    place: str
    prefix: str = ""

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{quote(self.place)}"
        return f"{self.scheme}://{self.place}" + (f"/{self.prefix}" if self.prefix else "")


def parse_url(url: str) -> StoreUrl:
    """Allowed: gs://bucket/prefix, s3://bucket/prefix, file:///directory, a plain path, memory://name."""
    if not url or not url.isprintable():
        raise UsageError(f"not a store url: {url!a}", hint=_allowed())
    matched = _SCHEME.match(url)
    if matched is None:
        if "::" in url:
            raise UsageError(f"chained urls are not supported: {url}", hint=_allowed())
        return StoreUrl("file", str(Path(url).expanduser().absolute()))
    scheme = matched[1].lower()
    if scheme not in SCHEMES:
        raise UsageError(f"unknown store scheme {scheme!r} in {url}", hint=_allowed())
    parts = urlsplit(url)
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise UsageError("a store url takes no user, query or fragment", where=url, hint=_allowed())
    if scheme == "file":
        return _parse_file(url, parts.netloc, unquote(parts.path))
    pattern = _MEMORY_NAME if scheme == "memory" else _BUCKET
    if pattern.fullmatch(parts.netloc) is None:
        raise UsageError(f"no valid bucket or store name: {parts.netloc!r}", where=url, hint=_allowed())
    prefix = parts.path.strip("/")
    if prefix:
        try:
            check_key(prefix)
        except BadKeyError as error:
            raise UsageError(error.message, where=url, hint=error.hint) from error
    return StoreUrl(scheme, parts.netloc, prefix)


def open_store(url: str, *, create: bool = False) -> Store:
    """The store at this URL. `create` makes a missing directory and demands that it is writable; buckets are
    never made. Cloud clients are started at their first call, in the process that makes it."""
    parsed = parse_url(url)
    if parsed.scheme == "file":
        return _open_directory(Path(parsed.place), create)
    if parsed.scheme == "memory":
        from diloco_cli.store.memory import shared_memory_store

        store: Store = shared_memory_store(parsed.place)
        return sub_store(store, parsed.prefix) if parsed.prefix else store
    if parsed.scheme == "gs":
        _require("gcsfs", url, "pip install gcsfs")
        from diloco_cli.store.gcs import GCSStore

        return GCSStore(parsed.place, parsed.prefix)
    raise StoreBrokenError(
        "this version has no s3 client",
        where=url,
        hint="use gs://, file:// or an s3-compatible directory mount",
    )


def sub_store(store: Store, prefix: str) -> Store:
    """The part of `store` whose keys start with `prefix/`, under keys without it."""
    return PrefixedStore(store, prefix)


def join_url(url: str, name: str) -> str:
    """URL of the part `name` of the store at `url`: where the run of that name lives. Normalised."""
    parsed = parse_url(url)
    check_key(name)
    if parsed.scheme == "file":
        return str(StoreUrl("file", str(Path(parsed.place) / name)))
    return str(StoreUrl(parsed.scheme, parsed.place, f"{parsed.prefix}/{name}".lstrip("/")))


def split_url(url: str) -> tuple[str, str]:
    """The inverse of join_url: URL of the store around, and the last part (empty if there is none)."""
    parsed = parse_url(url)
    if parsed.scheme == "file":
        path = Path(parsed.place)
        return str(StoreUrl("file", str(path.parent))), path.name
    outer, _, name = parsed.prefix.rpartition("/")
    return str(StoreUrl(parsed.scheme, parsed.place, outer)), name


def _allowed() -> str:
    return "stores are gs://bucket/prefix, s3://bucket/prefix, file:///directory, a plain path, memory://name"


def _parse_file(url: str, host: str, path: str) -> StoreUrl:
    if host not in {"", "localhost"}:
        raise UsageError(
            f"a file url takes no host, found {host!r}", where=url, hint=f"did you mean file:///{host}{path}?"
        )
    if not path.isprintable() or not path.startswith("/"):
        raise UsageError("a file url needs an absolute path", where=url, hint="file:///directory")
    return StoreUrl("file", str(Path(path)))


def _open_directory(root: Path, create: bool) -> Store:
    from diloco_cli.store.local import LocalStore, declared_error, missing_directory

    try:
        if create:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not root.is_dir():
            raise missing_directory(root)
    except OSError as error:
        raise declared_error(error, str(root)) from error
    if not os.access(root, os.R_OK | os.X_OK | (os.W_OK if create else 0)):
        wanted = "writable" if create else "readable"
        raise StoreForbiddenError(
            f"the directory is not {wanted}",
            where=str(root),
            hint="chown or chmod it, or name another directory",
        )
    return LocalStore(root)


def _require(module: str, url: str, command: str) -> None:
    if find_spec(module) is None:
        raise StoreBrokenError(f"the package {module} is not installed", where=url, hint=command)
