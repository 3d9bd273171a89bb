"""gcsfs as this project uses it: its session, credentials and addresses; one try a request, errors sorted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from diloco_cli.environment import environment_value, set_environment_default
from diloco_cli.store import transfers
from diloco_cli.store.bucket import (
    FULL,
    RETRYABLE_STATUS,
    TOO_MANY,
    ConditionFailedError,
    ObjectAbsentError,
    RangeBehindEndError,
    check_endpoint,
    error_text,
    no_space,
    throttled,
)
from diloco_cli.store.port import (
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
    UploadDamagedError,
)

_READ_BUFFER_BYTES = 1 << 20
"""A smaller one makes aiohttp stop and start the connection all the time."""


def start_client() -> Any:
    """A new file system of gcsfs; it belongs to the process that made it."""
    set_environment_default("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it probes each bucket over gRPC
    import aiohttp
    from gcsfs.core import GCSFileSystem

    class OneTryGCSFileSystem(GCSFileSystem):  # type: ignore[misc]
        """gcsfs by itself would try each request six times, without our deadlines."""

        _request = getattr(GCSFileSystem._request, "__wrapped__", GCSFileSystem._request)

    emulator = environment_value("STORAGE_EMULATOR_HOST")
    if emulator:
        check_endpoint(emulator, "STORAGE_EMULATOR_HOST")
    return OneTryGCSFileSystem(
        token="anon" if emulator else None,
        use_listings_cache=False,
        skip_instance_cache=True,
        requests_timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=transfers.CONNECT_TIMEOUT_S, sock_read=transfers.SILENCE_TIMEOUT_S
        ),
    )


@asynccontextmanager
async def open_media(
    filesystem: Any, bucket: str, name: str, headers: dict[str, str] | None = None, **condition: str
) -> AsyncIterator[Any]:
    """The answer to a download whose body has not been read yet; gcsfs itself gives only whole bodies. Leaving early
    closes the connection."""
    from gcsfs.retry import validate_response

    await filesystem._set_session()
    async with filesystem.session.request(
        method="GET",
        url=filesystem._format_path("b/{}/o/{}", (bucket, name)),
        params=filesystem._get_params({"alt": "media", **condition}),
        headers=filesystem._get_headers(headers),
        timeout=filesystem.requests_timeout,
        read_bufsize=_READ_BUFFER_BYTES,
    ) as answer:
        if answer.status >= 400:
            validate_response(answer.status, await answer.read(), "b/{}/o/{}", (bucket, name))
        yield answer


def multipart_body(boundary: str, about: Mapping[str, str], data: bytes) -> bytes:
    """An upload in one request: the object's description, and its bytes, in which the boundary must not occur."""
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(about)}\r\n"
    head += f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    return b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode()))


def header_values(headers: Any, name: str) -> list[str]:
    """All values of the header, which may be repeated."""
    return [str(value) for value in headers.getall(name, [])]


def sorted_error(error: Exception, where: str) -> Exception:
    """The port's error, or one of its answers, for what gcsfs, fsspec, aiohttp, requests or google.auth raised."""
    import aiohttp
    import requests
    from google.auth.exceptions import GoogleAuthError, TransportError

    if isinstance(error, FileNotFoundError):
        return ObjectAbsentError()
    if isinstance(error, FileExistsError):  # gcsfs's word for a precondition that failed
        return ConditionFailedError()
    status, text = _status(error), error_text(error)
    passing = (TimeoutError, ConnectionError, aiohttp.ClientError, requests.RequestException, TransportError)
    if status == 416:
        return RangeBehindEndError()
    if status == 400 and "crc32c" in text.lower():
        return UploadDamagedError(f"the bytes were damaged on their way: {text}", where=where)
    if status == FULL or (status == 403 and _is_over_quota(error)):
        return no_space(text, where)
    if status == TOO_MANY:
        return throttled(text, where)
    if status in RETRYABLE_STATUS or (status is None and isinstance(error, passing)):
        return StoreUnavailableError(f"the store does not answer: {text}", where=where)
    if status in {401, 403} or isinstance(error, (GoogleAuthError, PermissionError)):
        return StoreForbiddenError(
            f"not allowed: {text}",
            where=where,
            hint="gcloud auth application-default login; check the bucket's roles and this clock",
        )
    return StoreBrokenError(f"the store refused the request: {text}", where=where)


def stated_crc32c(headers: Mapping[str, str]) -> str | None:
    """The checksum of the whole object, also if the answer holds only a part of it."""
    for value in ",".join(header_values(headers, "X-Goog-Hash")).split(","):
        name, _, checksum = value.strip().partition("=")
        if name == "crc32c":
            return checksum
    return None


def _is_over_quota(error: Exception) -> bool:
    """By the store's message, the only part of a 403 beside its address that gcsfs passes on."""
    said = str(error).partition("\n")[2].lower()
    return "quota" in said and "exceed" in said


def _status(error: Exception) -> int | None:
    """The answer's HTTP status, as far as gcsfs tells: most have a code, 403 and 400 are texts."""
    code = getattr(error, "code", None) or getattr(error, "status", None)
    if code is not None and str(code).isdigit():
        return int(code)
    if str(error).startswith("Forbidden"):
        return 403
    return 400 if isinstance(error, ValueError) and str(error).startswith("Bad Request") else None
