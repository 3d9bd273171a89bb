"""s3fs as this project uses it: its session, credentials and addresses; one try a request, errors sorted."""

from __future__ import annotations

from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

from diloco_cli import clock
from diloco_cli.environment import environment_value
from diloco_cli.store import transfers
from diloco_cli.store.bucket import (
    FULL,
    RETRYABLE_STATUS,
    TOO_MANY,
    check_endpoint,
    error_of_status,
    error_text,
    missing_bucket,
    no_space,
    throttled,
)
from diloco_cli.store.port import (
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
    UploadDamagedError,
)

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
CLOCK_TOLERANCE_S = 300.0
"""S3 refuses signatures that are older or newer than 15 minutes; a third of that counts as a wrong clock here."""

THROTTLING_CODES = {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
_RETRYABLE_CODES = {
    "RequestTimeout", "RequestTimeoutException", "ServiceUnavailable", "InternalError", "OperationAborted",
    "ConditionalRequestConflict", "NoSuchUpload",
}  # fmt: skip
FULL_CODES = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}  # of Ceph, and of MinIO
_DAMAGED_CODES = {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
SKEW_CODES = {"RequestTimeTooSkewed", "RequestExpired"}
_FORBIDDEN_CODES = {
    "AccessDenied", "AllAccessDisabled", "AccountProblem", "ExpiredToken", "ExpiredTokenException", "InvalidToken",
    "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity",
}  # fmt: skip
_REGION_CODES = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_LOGIN_HINT = "aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; check the bucket's policy"
CLOCK_HINT = "set this machine's clock: timedatectl set-ntp true"


def start_client() -> Any:
    """A new file system of s3fs, connected; it belongs to the process that made it."""
    from s3fs import S3FileSystem

    class OneTryS3FileSystem(S3FileSystem):  # type: ignore[misc]
        """s3fs by itself would repeat each request five times, without our deadlines, and botocore below it would
        repeat as well."""

        retries = 1

    configured = next((name for name in ENDPOINT_VARIABLES if environment_value(name)), None)
    if configured is not None:
        check_endpoint(environment_value(configured) or "", configured)
    filesystem = OneTryS3FileSystem(
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs={
            "connect_timeout": transfers.CONNECT_TIMEOUT_S,
            "read_timeout": transfers.SILENCE_TIMEOUT_S,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "max_pool_connections": 50,
            # Ours go with every request: botocore's would only read the bytes once more.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            # A service of one's own has seldom a name for each bucket.
            **({"s3": {"addressing_style": "path"}} if configured else {}),
        },
    )
    filesystem.connect()
    # The address may also stand in ~/.aws/config, so the address that the client will use is checked.
    check_endpoint(str(filesystem.s3.meta.endpoint_url), configured or "endpoint_url")
    return filesystem


def sorted_error(error: Exception, where: str) -> Exception:
    """The port's error, or one of its answers, for what s3fs, botocore, aiohttp or fsspec raised."""
    response = _response(error)
    if response is None:
        return _without_answer(error, where)
    code = str(response.get("Error", {}).get("Code", ""))
    about = response.get("ResponseMetadata", {})
    status = int(about.get("HTTPStatusCode") or 0)
    text = error_text(error)
    if code == "NoSuchBucket":
        return missing_bucket(where)
    if code in SKEW_CODES or (status == 403 and _is_clock_off(about.get("HTTPHeaders", {}))):
        return StoreForbiddenError(f"this machine's clock is wrong: {text}", where=where, hint=CLOCK_HINT)
    if code in FULL_CODES or status == FULL:
        return no_space(text, where)
    if code in _DAMAGED_CODES:
        return UploadDamagedError(f"the bytes were damaged on their way: {text}", where=where)
    if code in THROTTLING_CODES or status == TOO_MANY:
        return throttled(text, where, about.get("HTTPHeaders", {}).get("retry-after"))
    if code in _RETRYABLE_CODES or status in RETRYABLE_STATUS:
        return StoreUnavailableError(f"the store does not answer: {code or status}: {text}", where=where)
    if code in _FORBIDDEN_CODES or status in {401, 403}:
        return StoreForbiddenError(f"not allowed: {text}", where=where, hint=_LOGIN_HINT)
    answer = error_of_status(status)
    if answer is not None:
        return answer
    hint = "name the bucket's region: AWS_DEFAULT_REGION" if code in _REGION_CODES or status == 301 else None
    return StoreBrokenError(f"the store refused the request: {code or status}: {text}", where=where, hint=hint)


def _response(error: Exception) -> dict[str, Any] | None:
    """The store's answer, from the cause of the error that s3fs raises."""
    for candidate in (error, error.__cause__):
        found = getattr(candidate, "response", None)
        if isinstance(found, dict):
            return found
    return None


def _without_answer(error: Exception, where: str) -> Exception:
    import aiohttp
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    text = error_text(error)
    logins = (
        exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.CredentialRetrievalError,
        exceptions.ProfileNotFound, exceptions.TokenRetrievalError, exceptions.SSOError,
        exceptions.RefreshWithMFAUnsupportedError, PermissionError,
    )  # fmt: skip
    passing = (
        TimeoutError, ConnectionError, EOFError, aiohttp.ClientError, exceptions.HTTPClientError,
        exceptions.ConnectionError, exceptions.IncompleteReadError, ResponseParserError,
    )  # fmt: skip
    if isinstance(error, logins):
        return StoreForbiddenError(f"not allowed: {text}", where=where, hint=_LOGIN_HINT)
    if isinstance(error, passing):
        return StoreUnavailableError(f"the store does not answer: {text}", where=where)
    return StoreBrokenError(f"the request could not be made: {text}", where=where)


def _is_clock_off(headers: dict[str, str]) -> bool:
    """Whether this machine's clock differs from the answer's date; for answers without a body, such as to HEAD."""
    try:
        store_s = parsedate_to_datetime(headers["date"]).replace(tzinfo=UTC).timestamp()
    except (KeyError, ValueError, TypeError):
        return False
    return abs(store_s - clock.wall_s()) > CLOCK_TOLERANCE_S
