"""The stores that there are, each declared once as a record, and the URLs that name them.

`KINDS` is the allow-list of schemes. Config, plan, launch, doctor, bucket policies and error messages read its records;
CONTRIBUTING.md tells how to add one. Only this module takes URLs apart: clients get the parts, never the raw text,
because the libraries below would also open chained URLs and dozens of other schemes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from diloco_cli.errors import UsageError
from diloco_cli.paths import home
from diloco_cli.store.port import BadKeyError, check_key

_BUCKET = r"[a-z0-9][a-z0-9._-]{1,221}"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_REST = r"([^@]+)"  # without the credentials that a URL may hold
_AZURE_HOST = r"([a-z0-9]+)\.(?:blob|dfs)\.core\.[a-z.]+"
OTHER_NAMES = (
    (rf"(?:wasbs?|abfss?)://([a-z0-9-]+)@{_AZURE_HOST}/{_REST}", r"az://\1/\3 with AZURE_STORAGE_ACCOUNT=\2"),
    (rf"(?:wasbs?|abfss?)://([a-z0-9-]+)@{_AZURE_HOST}", r"az://\1 with AZURE_STORAGE_ACCOUNT=\2"),
    (rf"https?://{_AZURE_HOST}/{_REST}", r"az://\2 with AZURE_STORAGE_ACCOUNT=\1"),
    (rf"https?://{_AZURE_HOST}", r"az://CONTAINER/PREFIX with AZURE_STORAGE_ACCOUNT=\1"),
    (rf"(?i:azure|wasbs?|abfss?|az)://{_REST}", r"az://\1 with AZURE_STORAGE_ACCOUNT"),
    (rf"(?i:gs|gcs)://{_REST}", r"gs://\1"),
    (rf"https?://storage\.(?:googleapis|cloud\.google)\.com/{_REST}", r"gs://\1"),
    (rf"https?://([a-z0-9.-]+)\.s3[.-][a-z0-9.-]*amazonaws\.com/{_REST}", r"s3://\1/\2"),
    (rf"https?://s3[.-][a-z0-9.-]*amazonaws\.com/{_REST}", r"s3://\1"),
    (rf"(?i:s3[an]?)://{_REST}", r"s3://\1"),
    (rf"r2://{_REST}", r"s3://\1 with AWS_ENDPOINT_URL=https://ACCOUNT.r2.cloudflarestorage.com"),
    (rf"(?:minio|ceph|rgw|b2)://{_REST}", r"s3://\1 with AWS_ENDPOINT_URL=https://HOST"),
    (rf"(https?://[^/@]+)/{_REST}", r"if this service speaks S3: s3://\2 with AWS_ENDPOINT_URL=\1"),
    (r"hf://.*", "Hugging Face keeps models and data sets, no runs: a run's store is a bucket of a cloud, or a folder"),
    (r"(?i:file)://(/.*)", r"file://\1"),
)
"""(what other tools call a store, what to write here)"""


@dataclass(frozen=True)
class StoreKind:
    """All facts of a store that others than its own module need.

    `place`: pattern of what stands between the scheme and the prefix. `opener`: `module:callable`, called with place
    and prefix. `is_bucket`: a service over a network. `is_shared`: other processes can reach it. `makes_place`: the
    command that makes a missing bucket. `policies`: folder of templates/bucket-policy; without one, `policies_hint`.
    `retention`: name of doctor's check of what a bucket keeps of deleted objects; `keeps_nothing`: how to make it keep
    nothing. `login_hint`: what to do when credentials are missing or refused. `checks_uploads`: whether what
    the store confirms need not be read back before a commit names it: GCS compares an upload with the checksum that
    comes with it, others may never look; of a directory a read would show the same memory. `leftovers`:
    `module:callable` that discards what killed writers left, called with the parsed URL. `credentials`: one that raises
    StoreForbiddenError where those that the environment names cannot be read; it asks no service.
    """

    scheme: str
    example: str
    place: str
    opener: str
    is_bucket: bool = False
    is_shared: bool = True
    makes_place: str = ""
    policies: str = ""
    policies_hint: str = ""
    retention: str = ""
    keeps_nothing: str = ""
    login_hint: str = ""
    checks_uploads: bool = False
    leftovers: str = ""
    credentials: str = ""


KINDS = {
    kind.scheme: kind
    for kind in (
        StoreKind(
            scheme="gs",
            example="gs://BUCKET/PREFIX",
            place=_BUCKET,
            opener="diloco_cli.store.gcs:GCSStore",
            is_bucket=True,
            makes_place="gcloud storage buckets create gs://{place}",
            policies="gcs",
            retention="soft_delete",
            keeps_nothing="gcloud storage buckets update gs://{place} --clear-soft-delete",
            login_hint="gcloud auth application-default login; check the bucket's roles and this machine's clock",
            checks_uploads=True,
            leftovers="diloco_cli.store.gcs:discard_parts",
            credentials="diloco_cli.store.gcs:check_credentials",
        ),
        StoreKind(
            scheme="s3",
            example="s3://BUCKET/PREFIX",
            place=_BUCKET,
            opener="diloco_cli.store.obstore:s3_store",
            is_bucket=True,
            makes_place="aws s3 mb s3://{place}",
            policies="s3",
            retention="versioning",
            keeps_nothing="aws s3api put-bucket-versioning --bucket {place} --versioning-configuration "
            "Status=Suspended, and expire noncurrent versions by a lifecycle rule",
            login_hint="aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; check the bucket's policy; "
            "if it charges who asks: AWS_REQUEST_PAYER=requester",
            credentials="diloco_cli.store.obstore:aws_profile",
        ),
        StoreKind(
            scheme="az",
            example="az://CONTAINER/PREFIX",
            place=r"[a-z0-9](?:-?[a-z0-9]){2,62}",
            opener="diloco_cli.store.obstore:azure_store",
            is_bucket=True,
            makes_place="az storage container create --name {place}",
            policies_hint="a container for the run alone: Storage Blob Data Contributor for learner, syncer, operator, "
            "Storage Blob Data Reader for reader",
            retention="versioning",
            keeps_nothing="az storage account blob-service-properties update --account-name $AZURE_STORAGE_ACCOUNT "
            "--enable-versioning false --enable-delete-retention false",
            login_hint="set AZURE_STORAGE_ACCOUNT, and AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or az login; "
            "check the container's roles and this machine's clock",
        ),
        StoreKind(
            scheme="file",
            example="file:///PATH",
            place=r"/.*",
            opener="diloco_cli.store.local:LocalStore",
            policies_hint="a directory's owner and mode are all there is",
            checks_uploads=True,
            leftovers="diloco_cli.store.local:discard_leftovers_of",
        ),
        StoreKind(
            scheme="memory",
            example="memory://NAME",
            place=r"[A-Za-z0-9._-]{1,100}",
            opener="diloco_cli.store.memory:shared_memory_store",
            is_shared=False,
        ),
    )
}


@dataclass(frozen=True)
class StoreUrl:
    """A URL taken apart. `place` is a bucket, an absolute directory or the name of a store in memory; `prefix` has no
    slash at its ends and is empty for a directory."""

    scheme: str
    place: str
    prefix: str = ""

    @property
    def kind(self) -> StoreKind:
        return KINDS[self.scheme]

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{quote(self.place)}"
        return f"{self.scheme}://{self.place}" + (f"/{self.prefix}" if self.prefix else "")


def examples() -> str:
    """The forms of a URL that are allowed."""
    return f"stores are {', '.join(kind.example for kind in KINDS.values() if kind.is_shared)}, or a path"


def is_url(text: str) -> bool:
    return _URL.fullmatch(text) is not None


def without_credentials(url: str) -> str:
    """The URL for an error: without user, password and query."""
    return re.split(r"[?#]", re.sub(r"//[^/]*@", "//...@", url), maxsplit=1)[0]


def parse_url(url: str, base: Path | None = None) -> StoreUrl:
    """The parts of a store's URL; a path counts from `base`, or from the current directory. Raises UsageError."""
    if not url or not url.isprintable():
        raise UsageError(f"not a store url: {url!a}", hint=examples())
    matched = _URL.fullmatch(url)
    if matched is None:
        if "::" in url:
            raise UsageError(f"chained urls are not supported: {url}", hint=examples())
        return StoreUrl("file", os.path.normpath((base or Path()).absolute() / without_tilde(url)))
    kind = KINDS.get(matched[1])
    if kind is None:
        raise UsageError(f"unknown store scheme {matched[1]!r} in {without_credentials(url)}", hint=_meant(url))
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"not a store url: {error}", where=without_credentials(url), hint=examples()) from error
    if parts.query or parts.fragment or "@" in parts.netloc:
        shown = without_credentials(url)
        raise UsageError("a store url takes no user, credentials, query or fragment", where=shown, hint=examples())
    if kind.scheme == "file":
        return _parse_file(url, parts.netloc, unquote(parts.path))
    if re.fullmatch(kind.place, parts.netloc) is None:
        raise UsageError(f"no valid bucket name: {parts.netloc!r}", where=url, hint=examples())
    return StoreUrl(kind.scheme, parts.netloc, _checked_prefix(parts.path.strip("/"), url))


def normalise_store_url(text: str, base: Path) -> str:
    """An absolute URL without a trailing slash; `base` is the folder that a relative path starts from."""
    return str(parse_url(text, base))


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
    if not path.is_relative_to(bucket) or Path(os.path.realpath(home())).is_relative_to(bucket):
        return False
    return not any(part.startswith(".") for part in path.relative_to(bucket).parts)


def _meant(url: str) -> str:
    """What to write instead of a URL with an unknown scheme."""
    plain = re.split(r"[?#]", url, maxsplit=1)[0].rstrip("/")
    found = ((re.fullmatch(pattern, plain), instead) for pattern, instead in OTHER_NAMES)
    meant = next((matched.expand(instead) for matched, instead in found if matched), None)
    if meant is None:
        return f"{examples()}; services that speak S3 (R2, MinIO, Ceph): s3:// with AWS_ENDPOINT_URL"
    return f"write {meant}" if meant.startswith(tuple(KINDS)) else meant


def without_tilde(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError("no such user's home here", where=path, hint="write the path out") from error


def _checked_prefix(prefix: str, url: str) -> str:
    if prefix:
        try:
            check_key(prefix)
        except BadKeyError as error:
            raise UsageError(error.message, where=url, hint=error.hint) from error
    return prefix


def _parse_file(url: str, host: str, path: str) -> StoreUrl:
    if host not in {"", "localhost"}:
        raise UsageError(
            f"a file url takes no host, found {host!r}", where=url, hint=f"did you mean file:///{host}{path}?"
        )
    if not path.isprintable() or not path.startswith("/"):
        raise UsageError("a file url needs an absolute path (three slashes)", where=url, hint="file:///PATH, or a path")
    return StoreUrl("file", os.path.normpath(path))
