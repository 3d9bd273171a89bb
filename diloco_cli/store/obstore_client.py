"""obstore as this project uses it: its addresses and timeouts; one try a request, errors sorted."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from diloco_cli.environment import environment_value
from diloco_cli.store import transfers
from diloco_cli.store.bucket import (
    FULL,
    RETRYABLE_STATUS,
    TOO_MANY,
    ConditionFailedError,
    ObjectAbsentError,
    RangeBehindEndError,
    check_endpoint,
    error_of_status,
    missing_bucket,
    no_space,
    short_text,
    throttled,
)
from diloco_cli.store.local import declared_error
from diloco_cli.store.port import StoreBrokenError, StoreForbiddenError, StoreUnavailableError
from diloco_cli.store.s3_client import CLOCK_HINT, ENDPOINT_VARIABLES, FULL_CODES, SKEW_CODES, THROTTLING_CODES

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
_RETRYABLE_CODES = {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"}
_LOGIN_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
_LOGIN_HINT = {
    "gs": "gcloud auth application-default login; check the bucket's roles and this clock",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; check the bucket's policy",
}


def start_client(scheme: str, bucket: str, prefix: str, limit_s: float, silence_s: float | None) -> Any:
    """A store of obstore whose requests end after `limit_s`, or after `silence_s` without a byte. The latter is for
    downloads only, because it also counts the time in which a body is uploaded."""
    from obstore.store import GCSStore, S3Store

    config, endpoint = _gs_config() if scheme == "gs" else _s3_config()
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=transfers.CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=limit_s),
        "allow_http": endpoint.startswith("http://"),
        "default_content_type": "application/octet-stream",
    }
    if silence_s is not None:
        options["read_timeout"] = timedelta(seconds=silence_s)
    kind: Any = GCSStore if scheme == "gs" else S3Store
    try:
        return kind(
            bucket, prefix=prefix or None, config=config, client_options=options, retry_config={"max_retries": 0}
        )
    except Exception as error:  # such as a file of credentials that cannot be read
        raise sorted_error(error, f"{scheme}://{bucket}/{prefix}", scheme, is_login=True) from error


def _gs_config() -> tuple[dict[str, Any], str]:
    emulator = environment_value("STORAGE_EMULATOR_HOST")
    if emulator is None:
        return {}, ""
    endpoint = check_endpoint(emulator, "STORAGE_EMULATOR_HOST").rstrip("/")
    return {"base_url": endpoint, "bearer_token": "anonymous"}, endpoint


def _s3_config() -> tuple[dict[str, Any], str]:
    config: dict[str, Any] = {"disable_bulk_delete": True}  # a request that few other services know
    if not environment_value("AWS_REGION") and not environment_value("AWS_DEFAULT_REGION"):
        config["region"] = "us-east-1"
    for name in ENDPOINT_VARIABLES:
        address = environment_value(name)
        if address is not None:
            endpoint = check_endpoint(address, name).rstrip("/")
            # A service of one's own has seldom a name for each bucket.
            config.update(aws_endpoint_url_s3=endpoint, virtual_hosted_style_request=False)
            return config, endpoint
    return config, ""


def sorted_error(error: Exception, where: str, scheme: str, *, is_login: bool = False) -> Exception:
    """The port's error, or one of its answers, for what obstore raised. Its errors have few classes, so that the status
    and the code are read from their texts."""
    full = str(error)
    text = _text(error)
    code = found[1] if (found := _CODE.search(full)) else ""
    status = int(found[1]) if (found := _STATUS.search(full)) else 0
    if scheme == "file":
        return _sorted_file_error(error, full, where)
    if code == "NoSuchBucket":
        return missing_bucket(where)
    if code in SKEW_CODES:
        return StoreForbiddenError(f"this machine's clock is wrong: {text}", where=where, hint=CLOCK_HINT)
    if code in FULL_CODES or status == FULL:
        return no_space(text, where)
    if status in {401, 403} or code in _LOGIN_CODES or is_login:
        return StoreForbiddenError(f"not allowed: {text}", where=where, hint=_LOGIN_HINT[scheme])
    if code in THROTTLING_CODES or status == TOO_MANY:
        return throttled(text, where)
    if status in RETRYABLE_STATUS or code in _RETRYABLE_CODES:
        return StoreUnavailableError(f"the store does not answer: {text}", where=where)
    answer = error_of_status(status)
    if answer is not None:
        return answer
    no_answer = type(error).__name__ == "GenericError"  # refused, reset, cut, too late
    if isinstance(error, TimeoutError) or (status == 0 and no_answer):
        return StoreUnavailableError(f"the store does not answer: {text}", where=where)
    return StoreBrokenError(f"the store refused the request: {text}", where=where)


def _sorted_file_error(error: Exception, full: str, where: str) -> Exception:
    names = {base.__name__ for base in type(error).__mro__}
    if isinstance(error, TimeoutError):  # a directory of a network that hangs
        return StoreUnavailableError(f"the store does not answer: {_text(error)}", where=where)
    if "AlreadyExistsError" in names:
        return ConditionFailedError()
    if "range was invalid" in full:
        return RangeBehindEndError()
    number = _SYSTEM_ERROR.search(full)
    if "FileNotFoundError" in names and "is directory" not in full:
        return ObjectAbsentError()
    if number is not None:
        return declared_error(OSError(int(number[1]), ""), where)
    return StoreBrokenError(f"the store refused the request: {_text(error)}", where=where)


def _text(error: Exception) -> str:
    """The error's text without the debug output that obstore adds."""
    return short_text(str(error).partition("Debug source")[0]) or type(error).__name__
