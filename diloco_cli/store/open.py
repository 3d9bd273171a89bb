"""Opens the store at a URL. Only this module reads URLs: clients get the parsed parts, never the raw string,
because fsspec would also open chained URLs and dozens of other schemes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from diloco_cli.config.store_url import without_credentials
from diloco_cli.environment import environment_value
from diloco_cli.errors import UsageError
from diloco_cli.paths import install_hint
from diloco_cli.store.port import BadKeyError, Store, StoreBrokenError, StoreForbiddenError, check_key
from diloco_cli.store.wrapper import PrefixedStore

SCHEMES = ("gs", "s3", "file", "memory")
CLIENT_VARIABLE = "DILOCO_STORE_CLIENT"
CLIENTS = ("default", "obstore")
"""default: gcsfs for gs, s3fs for s3, our own for file. obstore: that library for all three. The objects are the same,
so that the processes of one run may choose differently."""

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
        return StoreUrl("file", str(_without_tilde(url).absolute()))
    scheme = matched[1].lower()
    if scheme not in SCHEMES:
        raise UsageError(f"unknown store scheme {scheme!r} in {url}", hint=_allowed())
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"not a store url: {error}", where=url, hint=_allowed()) from error
    if parts.query or parts.fragment or "@" in parts.netloc:
        shown = without_credentials(url)
        raise UsageError("a store url takes no user, query or fragment", where=shown, hint=_allowed())
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
    never made. Cloud clients are started at their first call, in the process that makes it. $DILOCO_STORE_CLIENT
    chooses which."""
    parsed = parse_url(url)
    is_obstore = _is_obstore(parsed)
    if is_obstore:
        _require("obstore", url, f"{install_hint('obstore')}, or unset {CLIENT_VARIABLE}")
    if parsed.scheme == "file":
        directory = _open_directory(Path(parsed.place), create)
        return _open_with_obstore(parsed) if is_obstore else directory
    if parsed.scheme == "memory":
        from diloco_cli.store.memory import shared_memory_store

        store: Store = shared_memory_store(parsed.place)
        return PrefixedStore(store, parsed.prefix) if parsed.prefix else store
    if is_obstore:
        return _open_with_obstore(parsed)
    if parsed.scheme == "gs":
        _require("gcsfs", url, "pip install gcsfs")
        from diloco_cli.store.gcs import GCSStore

        return GCSStore(parsed.place, parsed.prefix)
    _require("s3fs", url, f"{install_hint('s3')}, or {install_hint('obstore')} and set {CLIENT_VARIABLE}=obstore")
    from diloco_cli.store.s3 import S3Store

    return S3Store(parsed.place, parsed.prefix)


def client_of(url: str) -> type[Store]:
    """The class of the store that `open_store` would open here. Nothing is opened, and no package need be installed."""
    parsed = parse_url(url)
    if _is_obstore(parsed):
        from diloco_cli.store.obstore import ObstoreStore

        return ObstoreStore
    if parsed.scheme == "file":
        from diloco_cli.store.local import LocalStore

        return LocalStore
    if parsed.scheme == "memory":
        from diloco_cli.store.memory import MemoryStore

        return MemoryStore
    from diloco_cli.store.gcs import GCSStore
    from diloco_cli.store.s3 import S3Store

    return GCSStore if parsed.scheme == "gs" else S3Store


def join_url(url: str, name: str) -> str:
    """URL of the part `name` of the store at `url`, such as a run of that name. Normalised."""
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


def real_url(url: str) -> str:
    """Where it leads, normalised: a directory's without symbolic links and `..`."""
    parsed = parse_url(url)
    return str(StoreUrl("file", os.path.realpath(parsed.place)) if parsed.scheme == "file" else parsed)


def is_beside(url: str, other: str) -> bool:
    """Whether `url` lies in the same bucket as `other`; or below the directory `other`, or the one that this lies in.
    Of that one's, hidden directories do not count; none do where it holds the user's home."""
    one, two = parse_url(real_url(url)), parse_url(real_url(other))
    if one.scheme != "file" or two.scheme != "file":
        return (one.scheme, one.place) == (two.scheme, two.place)
    path, bucket = Path(one.place), Path(two.place).parent
    if path.is_relative_to(two.place):
        return True
    if not path.is_relative_to(bucket) or Path(os.path.realpath(_without_tilde("~"))).is_relative_to(bucket):
        return False
    return not any(part.startswith(".") for part in path.relative_to(bucket).parts)


def _allowed() -> str:
    return "stores are gs://bucket/prefix, s3://bucket/prefix, file:///directory, a plain path, memory://name"


def _without_tilde(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError("no such user's home here", where=path, hint="write the path out") from error


def _parse_file(url: str, host: str, path: str) -> StoreUrl:
    if host not in {"", "localhost"}:
        raise UsageError(
            f"a file url takes no host, found {host!r}", where=url, hint=f"did you mean file:///{host}{path}?"
        )
    if not path.isprintable() or not path.startswith("/"):
        raise UsageError("a file url needs an absolute path", where=url, hint="file:///directory")
    return StoreUrl("file", str(Path(path)))


def _open_directory(root: Path, create: bool) -> Store:
    from diloco_cli.store.local import LocalStore, declared_error, make_durable_root, missing_directory

    try:
        if create:
            make_durable_root(root)
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


def _chosen_client() -> str:
    chosen = environment_value(CLIENT_VARIABLE) or "default"
    if chosen not in CLIENTS:
        raise UsageError(
            f"unknown client {chosen!r}", where=CLIENT_VARIABLE, hint=f"clients are {' and '.join(CLIENTS)}"
        )
    return chosen


def _is_obstore(parsed: StoreUrl) -> bool:
    return _chosen_client() == "obstore" and parsed.scheme != "memory"


def _open_with_obstore(parsed: StoreUrl) -> Store:
    from diloco_cli.store.obstore import ObstoreStore

    return ObstoreStore(parsed.scheme, parsed.place, parsed.prefix)


def _require(module: str, url: str, command: str) -> None:
    if find_spec(module) is None:
        raise StoreBrokenError(f"the package {module} is not installed", where=url, hint=command)
