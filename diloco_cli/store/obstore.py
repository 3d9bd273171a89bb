"""s3:// and az:// through obstore, a client written in Rust that moves bytes outside of Python's interpreter lock.

An upload is one request, because only such a one carries the condition that makes a create exclusive. Objects of 256 MB
and more go up in parts through several connections, after a look whether the key is free: one request carries 5 GB at
most, and the keys of such objects end with their digest, so that whoever writes the same key writes the same bytes.
Where a bucket's policy demands the condition, parts are refused and one request carries what it can.

The client sends no checksum of ours that the service could compare, so a run reads its versions back; the checksum of a
small object stands in the object's metadata and is compared when it is read. A larger object is a payload, whose digest
its record names.

obstore reads the usual variables of both clouds itself (web identity, container and instance roles, service
principals). Read here: addresses, because they must be checked; profiles of ~/.aws, which obstore does not know; and
the names that Azure's own tools use.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from diloco_cli.environment import drop_empty, environment_value
from diloco_cli.errors import DilocoError
from diloco_cli.store import transfers
from diloco_cli.store.bucket import (
    FULL,
    RETRYABLE_STATUS,
    TOO_MANY,
    BucketStore,
    ConditionFailedError,
    ObjectAbsentError,
    RangeBehindEndError,
    Retention,
    check_endpoint,
    error_of_status,
    foreign_answer,
    missing_bucket,
    no_space,
    short_text,
    throttled,
)
from diloco_cli.store.port import (
    ObjectStat,
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
    UploadDamagedError,
    check_key,
    check_prefix,
    is_between,
)
from diloco_cli.store.url import KINDS

S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
AZURE_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
IN_PARTS_FROM_BYTES = 256 << 20
_READ_BYTES = 1 << 20
_MAX_CHECKED_BYTES = 8 << 20
"""Of an object whose checksum is kept: that of a larger one would take a tenth of the time in which it is moved."""
_LOOKUP_S = 10.0  # for a bucket's region, and for a command that prints credentials

_FOREIGN = re.compile(r"non-partial response|Header missing from response|invalid list response|invalid Content-Type")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
_SAID = re.compile(r"<Code>(\w+)</Code>\s*<Message>([^<\n]*)")
_MACHINE_ROLE = "169.254.169.254"  # asked for credentials when nothing else gives any
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "ServerBusy"}
_PASSING = {"RequestTimeout", "RequestTimeoutException", "ServiceUnavailable", "InternalError", "OperationAborted",
            "ConditionalRequestConflict", "OperationTimedOut"}  # fmt: skip
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}  # of Ceph, and of MinIO
_DAMAGED = {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "Md5Mismatch"}
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}
_FORBIDDEN = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"}
_OTHER_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}


@dataclass
class Access:
    """Where a client sends its requests, and with what credentials. `config`: settings of obstore's store."""

    config: dict[str, Any] = field(default_factory=dict)
    endpoint: str = ""
    credentials: Callable[[], Any] | None = None


class ObstoreStore(BucketStore):
    """A bucket and prefix. `access(place)` is asked once, when the client starts."""

    def __init__(self, scheme: str, place: str, prefix: str, access: Callable[[str], Access]) -> None:
        super().__init__(f"{scheme}://{place}/{prefix}".rstrip("/"), partial(sorted_error, scheme=scheme))
        self._scheme, self._place, self._prefix = scheme, place, prefix
        self._access = access
        self._lock = threading.Lock()
        self._clients: tuple[Any, Any, Any] | None = None
        self._takes_parts = True

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        check_prefix(prefix)
        return self._run(prefix, partial(self._listed, prefix, after, limit), 0) if limit > 0 else []

    async def _listed(self, prefix: str, after: str, limit: int) -> Any:
        """obstore lists whole folders, in order."""
        import obstore

        folder = prefix.rpartition("/")[0] or None
        found: list[str] = []
        async for page in obstore.list(self._reader, folder, offset=after or None, chunk_size=transfers.LIST_PAGE):
            keys = [str(item["path"]) for item in page]
            found += [key for key in keys if is_between(key, prefix, after) and _is_key(key)]
            is_past = bool(keys) and keys[-1] > prefix and not keys[-1].startswith(prefix)
            if len(found) >= limit or is_past:
                break
        return sorted(found)[:limit]

    async def _remove(self, key: str) -> None:
        import obstore

        await obstore.delete_async(self._reader, key)

    async def _describe(self, key: str) -> ObjectStat:
        import obstore

        found = await obstore.head_async(self._reader, key)
        if found["e_tag"] is None:
            raise foreign_answer(self._where(key))
        return ObjectStat(key, int(found["size"]), found["last_modified"].timestamp())

    async def _upload(self, key: str, data: bytes, exclusive: bool) -> None:
        if self._takes_parts and len(data) >= IN_PARTS_FROM_BYTES:
            try:
                await transfers.on_time(len(data), self._put_parts(key, data, exclusive))
                return
            except Exception as error:  # obstore has few classes
                if not isinstance(self._sorted_error(error, self._where(key)), StoreForbiddenError):
                    raise
                self._takes_parts = False
        await transfers.on_time(len(data), self._put(key, data, exclusive))

    async def _put_parts(self, key: str, data: bytes, exclusive: bool) -> None:
        import obstore

        if exclusive:
            with suppress(FileNotFoundError):
                await obstore.head_async(self._reader, key)
                raise ConditionFailedError
        part_bytes = max(transfers.PART_BYTES, -(-len(data) // transfers.MOST_PARTS))
        sizes: Any = {"chunk_size": part_bytes, "max_concurrency": transfers.uploads_at_once(len(data))}
        await obstore.put_async(self._client()[2], key, data, use_multipart=True, **sizes)

    async def _put(self, key: str, data: bytes, exclusive: bool) -> Any:
        import obstore

        is_checked = len(data) <= _MAX_CHECKED_BYTES
        about: Any = {transfers.CHECKSUM_NAME: transfers.crc32c(data)} if is_checked else None
        mode: Any = "create" if exclusive else "overwrite"
        return await obstore.put_async(self._writer, key, data, mode=mode, use_multipart=False, attributes=about)

    def retention(self, key: str) -> Retention | None:
        """A bucket that keeps versions names the one that an upload has made. Without versions Azure may still keep
        what is deleted, of which its data interface says nothing."""
        made = self._run(check_key(key), partial(self._put, key, b"version", False), 0)
        if made["version"] not in (None, "", "null"):
            return Retention(None, KINDS[self._scheme].keeps_nothing.format(place=self._place))
        return Retention(0.0, "") if self._scheme == "s3" else None

    @asynccontextmanager
    async def _opened(
        self, key: str, start: int, end: int | None, version: str | None
    ) -> AsyncIterator[transfers.Opened]:
        import obstore

        condition = {} if version is None else {"if_match": version}
        options: Any = {"range": {"offset": start} if end is None else (start, end), **condition}
        answer = await obstore.get_async(self._reader, key, options=options)
        stated = answer.attributes.get(transfers.CHECKSUM_NAME)
        pieces = _pieces(answer.stream(min_chunk_size=_READ_BYTES))
        yield transfers.Opened(pieces, int(answer.meta["size"]), answer.meta["e_tag"], stated)

    @property
    def _reader(self) -> Any:
        return self._client()[0]

    @property
    def _writer(self) -> Any:
        return self._client()[1]

    def _client(self) -> tuple[Any, Any, Any]:
        """A client for downloads, which gives up after a silence, a limit that would also count the time in which a
        body is uploaded; one for uploads; and one for uploads in parts, which repeats a part that failed."""
        with self._lock:
            if self._clients is None:
                access = self._access(self._place)
                reader = self._started(access, transfers.SILENCE_TIMEOUT_S)
                self._clients = reader, self._started(access), self._started(access, tries=transfers.PART_TRIES)
            return self._clients

    def _started(self, access: Access, silence_s: float | None = None, tries: int = 1) -> Any:
        """A store of obstore; its calls are bounded by transfers.on_time."""
        from obstore.store import AzureStore, S3Store

        options: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=transfers.CONNECT_TIMEOUT_S),
            "timeout": timedelta(seconds=transfers.deadline_s(transfers.MAX_OBJECT_BYTES)),
            "allow_http": access.endpoint.startswith("http://"),
            "default_content_type": "application/octet-stream",
        }
        if silence_s is not None:
            options["read_timeout"] = timedelta(seconds=silence_s)
        if bundle := environment_value("AWS_CA_BUNDLE"):
            options["root_certificate"] = Path(bundle).read_bytes()
        kind: Any = S3Store if self._scheme == "s3" else AzureStore
        more = {} if access.credentials is None else {"credential_provider": access.credentials}
        try:
            return kind(
                self._place,
                prefix=self._prefix or None,
                config=access.config,
                client_options=options,
                retry_config={"max_retries": tries - 1},
                **more,
            )
        except Exception as error:  # such as a key that is none
            raise _forbidden(self._scheme, _text(error), self.url) from error


def s3_store(bucket: str, prefix: str = "") -> ObstoreStore:
    return ObstoreStore("s3", bucket, prefix, s3_access)


def azure_store(container: str, prefix: str = "") -> ObstoreStore:
    return ObstoreStore("az", container, prefix, lambda container: azure_access())


def s3_access(bucket: str) -> Access:
    """By the variables and files that the AWS tools read."""
    drop_empty("AWS_")  # obstore reads them, too, and takes an empty one for set
    profile = aws_profile()
    config: dict[str, Any] = {"disable_bulk_delete": True}  # a request that few other services know
    name, address = _first_set(S3_ENDPOINTS) or ("endpoint_url", profile.get("endpoint_url", ""))
    endpoint = check_endpoint(address, name).rstrip("/") if address else ""
    if endpoint:  # a service of one's own has seldom a name for each bucket
        config.update(aws_endpoint_url_s3=endpoint, virtual_hosted_style_request=False)
    region = _first_set(("AWS_REGION", "AWS_DEFAULT_REGION"))
    known = region[1] if region else profile.get("region")
    config["region"] = known or ("us-east-1" if endpoint else _region_of(bucket))
    credentials = None
    if not _first_set(("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")):
        names = {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}
        config.update({name: profile[name] for name in names & profile.keys()})
        command = _credential_command(profile)
        if command and "aws_access_key_id" not in profile:
            credentials = partial(_printed_credentials, command)
    return Access(config, endpoint, credentials)


def _first_set(names: tuple[str, ...]) -> tuple[str, str] | None:
    """The first of these variables that is set, and its value."""
    return next(((name, value) for name in names if (value := environment_value(name))), None)


def aws_profile() -> dict[str, str]:
    """The settings of the chosen profile in ~/.aws/config and ~/.aws/credentials; empty if nothing is configured."""
    chosen = _first_set(("AWS_PROFILE", "AWS_DEFAULT_PROFILE"))
    profile = chosen[1] if chosen else "default"
    found: dict[str, str] = {}
    for variable, file in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")):
        place = environment_value(variable) or f"~/.aws/{file}"
        parser = ConfigParser(interpolation=None, default_section="no such section")
        try:
            parser.read(os.path.expanduser(place))
        except (ConfigError, OSError, UnicodeDecodeError) as error:
            raise _forbidden("s3", f"the file cannot be read: {short_text(str(error))}", place) from error
        for section in (profile, f"profile {profile}"):
            found.update({"": "", **parser[section]} if parser.has_section(section) else {})
    if chosen and not found:
        message = f"the profile {profile!a} is in no file"
        raise StoreForbiddenError(message, where=chosen[0], hint=f"aws configure --profile {shlex.quote(profile)}")
    return {"profile": profile, **found}


def _credential_command(profile: dict[str, str]) -> list[str]:
    """What prints credentials: the profile's own command, or the AWS tool for a single sign-on or another role."""
    if "credential_process" in profile:
        return shlex.split(profile["credential_process"])
    if any(name.startswith(("sso_", "role_arn", "login_session")) for name in profile):
        return ["aws", "configure", "export-credentials", "--profile", profile["profile"], "--format", "process"]
    return []


def _printed_credentials(command: list[str]) -> dict[str, Any]:
    """As obstore wants them. It asks again when they expire."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=6 * _LOOKUP_S)
        told = json.loads(done.stdout)
        expires = told.get("Expiration")
        return {
            "access_key_id": told["AccessKeyId"],
            "secret_access_key": told["SecretAccessKey"],
            "token": told.get("SessionToken"),
            "expires_at": datetime.fromisoformat(expires) if expires else None,
        }
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        said = short_text(str(getattr(error, "stderr", None) or error))
        raise PermissionError(f"{command[0]} printed no credentials: {said}") from error


def _region_of(bucket: str) -> str:
    """As AWS states it to anybody; us-east-1 if it does not answer."""
    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_LOOKUP_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as answer:
        headers = answer.headers
    except OSError:
        return "us-east-1"
    return str(headers.get("x-amz-bucket-region") or "us-east-1")


def azure_access() -> Access:
    """By the variables that Azure's tools read, and by obstore's own names for them."""
    drop_empty("AZURE_")
    told = _connection_string()
    account = _first_set(("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"))
    key = _first_set(("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"))
    token = _first_set(("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"))
    settings = {
        "account_name": account[1] if account else told.get("accountname"),
        "account_key": key[1] if key else told.get("accountkey"),
        "sas_key": (token[1] if token else told.get("sharedaccesssignature", "")).lstrip("?"),
    }
    config: dict[str, Any] = {name: value for name, value in settings.items() if value}
    if told.get("usedevelopmentstorage") == "true" or environment_value("AZURE_STORAGE_USE_EMULATOR"):
        return Access({"use_emulator": True}, "http://127.0.0.1")
    if "account_name" not in config:
        raise StoreForbiddenError("no storage account is named", hint=KINDS["az"].login_hint)
    name, address = _first_set(AZURE_ENDPOINTS) or ("BlobEndpoint", told.get("blobendpoint", ""))
    endpoint = check_endpoint(address, name).rstrip("/") if address else ""
    if endpoint:
        config["endpoint"] = endpoint
    if config.keys().isdisjoint({"account_key", "sas_key"}) and _has_azure_login():
        config["use_azure_cli"] = True
    return Access(config, endpoint)


def _connection_string() -> dict[str, str]:
    parts = (part.partition("=") for part in (environment_value("AZURE_STORAGE_CONNECTION_STRING") or "").split(";"))
    return {name.strip().lower(): value.strip() for name, _, value in parts if value}


def _has_azure_login() -> bool:
    """Whether `az login` was done here, and nothing else gives credentials."""
    other = ("AZURE_CLIENT_ID", "AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_TOKEN", "AZURE_CREDENTIAL_TYPE")
    folder = Path(environment_value("AZURE_CONFIG_DIR") or os.path.expanduser("~/.azure"))
    return not _first_set(other) and (folder / "azureProfile.json").is_file() and shutil.which("az") is not None


def sorted_error(error: Exception, where: str, scheme: str) -> Exception:
    """The port's error, or one of its answers, for what obstore raised. Its errors have few classes, so that the status
    and the code are read from their texts."""
    full, text, name = str(error), _text(error), type(error).__name__
    code = (found[1] or found[2]) if (found := _CODE.search(full)) else ""
    status = int(found[1]) if (found := _STATUS.search(full)) else 0
    if code in _NO_BUCKET:
        return missing_bucket(where)
    if (answer := _answer(error, full, code, status)) is not None:
        return answer
    if code in _SKEWED or "date header too old" in full:
        hint = "set this machine's clock: timedatectl set-ntp true"
        return StoreForbiddenError(f"this machine's clock is wrong: {text}", where=where, hint=hint)
    if code in _FULL or status == FULL:
        return no_space(text, where)
    if _MACHINE_ROLE in full:
        return _forbidden(scheme, "no credentials are configured, and this machine has no role that gives any", where)
    if status in {401, 403} or code in _FORBIDDEN or isinstance(error, PermissionError) or name in _DENIED:
        return _forbidden(scheme, text, where)
    if code in _DAMAGED:
        return UploadDamagedError(f"the bytes were damaged on their way: {text}", where=where)
    if code in _THROTTLED or status == TOO_MANY:
        return throttled(text, where)
    if status in RETRYABLE_STATUS or code in _PASSING:
        return StoreUnavailableError(f"the store does not answer: {text}", where=where)
    if code in _OTHER_REGION or "redirect without LOCATION" in full:
        hint = "name the bucket's region: export AWS_DEFAULT_REGION=..."
        return StoreBrokenError(f"the bucket is in another region: {text}", where=where, hint=hint)
    if _FOREIGN.search(full):
        return foreign_answer(where)
    no_answer = name == "GenericError"  # refused, reset, cut, too late
    if isinstance(error, TimeoutError) or (status == 0 and no_answer):
        return StoreUnavailableError(f"the store does not answer: {text}", where=where)
    return StoreBrokenError(f"the store refused the request: {text}", where=where)


def _answer(error: Exception, full: str, code: str, status: int) -> Exception | None:
    """The one of bucket.ANSWERS that the error stands for."""
    if code == "BlobAlreadyExists":
        return ConditionFailedError()
    if "Wanted range starting at" in full or "bytes 0--1/0" in full:  # Azurite answers what Azure refuses
        return RangeBehindEndError()
    return ObjectAbsentError() if isinstance(error, FileNotFoundError) else error_of_status(status)


_DENIED = {"PermissionDeniedError", "UnauthenticatedError"}


def _forbidden(scheme: str, text: str, where: str) -> StoreForbiddenError:
    return StoreForbiddenError(f"not allowed: {text}", where=where, hint=KINDS[scheme].login_hint)


def _text(error: Exception) -> str:
    """What the service said; else the error's text without the debug output that obstore adds."""
    full = str(error).partition("Debug source")[0]
    said = _SAID.search(full)
    return short_text(f"{said[1]}: {said[2]}" if said else full) or type(error).__name__


def _is_key(path: str) -> bool:
    try:
        check_key(path)
    except DilocoError:
        return False
    return True


async def _pieces(stream: Any) -> AsyncIterator[bytes]:
    async for piece in stream:
        yield piece
