"""What is particular to S3: uploads in parts, its errors, its addresses."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from diloco_cli.errors import NoSpaceError
from diloco_cli.store import transfers
from diloco_cli.store.bucket import ConditionFailedError, ObjectAbsentError, RangeBehindEndError
from diloco_cli.store.port import (
    Created,
    Exists,
    StoreBrokenError,
    StoreForbiddenError,
    StoreGoneError,
    StoreThrottledError,
    StoreUnavailableError,
    UploadDamagedError,
)
from diloco_cli.store.proof import checks_uploads
from diloco_cli.store.s3 import S3Store
from diloco_cli.store.s3_client import sorted_error
from tests.contract.fault_proxy import FaultProxy

DATA = os.urandom((12 << 20) + 123)


@pytest.fixture
def store(s3: FaultProxy, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> S3Store:
    """Parts of 5 MiB, the least that S3 takes."""
    monkeypatch.setattr(transfers, "UPLOAD_IN_PARTS_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(transfers, "ALWAYS_IN_PARTS_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(transfers, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(transfers, "pause_s", lambda attempt, error, jitter: 0.0)
    return S3Store("bucket", f"s3/{request.node.name}")


def uploads_under_way(store: S3Store) -> list[Any]:
    return list(store._call(None, "list_multipart_uploads").get("Uploads", []))


def test_a_service_that_takes_wrong_checksums_is_not_believed(s3: FaultProxy, store: S3Store) -> None:
    """The emulator is one: it keeps the checksum that it is sent."""
    assert not checks_uploads(store, "trial") and store.get("trial") is None
    answer = store.create("small", b"small")
    assert isinstance(answer, Created) and not answer.checked


def test_a_service_that_refuses_them_is(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    async def refuses(verb: str, key: str | None, **parts: Any) -> dict[str, Any]:
        if verb in ("put_object", "upload_part") and parts["ChecksumCRC32C"] != transfers.crc32c(parts["Body"]):
            tried.append(verb)
            raise refused(verb, "BadDigest", 400)
        return {"UploadId": "upload", "ETag": "etag"}

    monkeypatch.setattr(store, "_request", refuses)
    assert checks_uploads(store, "trial") and tried == ["put_object", "upload_part"]  # each is refused once
    answer = store.create("small", b"small")
    assert isinstance(answer, Created) and answer.checked


def refused(verb: str, code: str = "AccessDenied", status: int = 403) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, verb)


@pytest.mark.parametrize("deletes", [True, False])
def test_a_syncer_starts_where_its_policy_allows_nothing_but_creates(
    s3: FaultProxy, store: S3Store, monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    """templates/bucket-policy/s3/syncer.json: each object is written with if-none-match."""
    passes = store._request

    async def by_policy(verb: str, key: str | None, **parts: Any) -> dict[str, Any]:
        creates = verb in ("put_object", "complete_multipart_upload")
        if (creates and parts.get("IfNoneMatch") != "*") or (verb == "delete_object" and not deletes):
            raise refused(verb)
        return await passes(verb, key, **parts)

    monkeypatch.setattr(store, "_request", by_policy)
    assert not checks_uploads(store, "trial")  # the emulator takes any checksum
    assert (store.stat("trial") is None) is deletes
    assert not checks_uploads(store, "trial") and store.create("small", b"small") == Created()


@pytest.mark.parametrize(
    ("code", "status", "tries"), [("AccessDenied", 403, 1), ("NotImplemented", 501, 1), ("InternalError", 500, 2)]
)
def test_a_trial_without_an_answer_proves_nothing_and_comes_to_an_end(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, code: str, status: int, tries: int
) -> None:
    tried: list[str] = []

    async def refuses(verb: str, key: str | None, **parts: Any) -> dict[str, Any]:
        tried.append(verb)
        raise refused(verb, code, status)

    monkeypatch.setattr(store, "_request", refuses)
    assert not checks_uploads(store, "trial", lambda seconds: None) and len(tried) >= tries


def test_a_large_object_goes_up_in_parts_and_exclusively(s3: FaultProxy, store: S3Store) -> None:
    assert store.create("large", DATA) == Created()
    assert store.get("large") == DATA
    assert store.create("large", DATA[::-1]) == Exists(DATA)
    assert store.create("large", DATA) == Created()
    assert uploads_under_way(store) == []  # the parts of the losers too are gone


def test_uploads_go_in_parts_once_one_connection_was_seen_to_be_slow(
    s3: FaultProxy, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "ALWAYS_IN_PARTS_FROM_BYTES", 1 << 40)

    def num_requests(key: str) -> int:
        before = s3.faults.requests
        store.create(key, DATA)
        return s3.faults.requests - before

    monkeypatch.setattr(transfers, "PARALLEL_PAYS_S", 1e9)
    assert [num_requests("unknown"), num_requests("fast")] == [1, 1]
    monkeypatch.setattr(transfers, "PARALLEL_PAYS_S", 1e-9)
    assert num_requests("slow") == 1 + 3 + 1
    assert store.get("slow") == DATA


def test_a_failed_part_is_repeated_by_itself(s3: FaultProxy, store: S3Store) -> None:
    before = s3.faults.requests
    s3.faults.inject("503", "PUT", times=2)
    s3.faults.inject("409", "PUT")
    assert store.create("large", DATA) == Created()
    assert s3.faults.requests - before == 1 + 3 + 3 + 1  # begin, three parts, three repetitions, complete
    assert store.get("large") == DATA


def test_a_lost_completion_is_recognised_as_ones_own(s3: FaultProxy, store: S3Store) -> None:
    store.get("warm/up")
    begun = store._call("large", "create_multipart_upload")  # so that only the last POST is hit
    store._call("large", "abort_multipart_upload", UploadId=begun["UploadId"])
    original = store._send_parts

    async def send_then_lose(*arguments: Any) -> list[dict[str, Any]]:
        parts = await original(*arguments)
        s3.faults.inject("lost_answer", "POST")
        return parts

    store._send_parts = send_then_lose  # type: ignore[method-assign]
    assert store.create("large", DATA) == Created()
    assert s3.faults.num_pending() == 0


def test_an_upload_that_fails_for_good_leaves_nothing_that_costs_money(s3: FaultProxy, store: S3Store) -> None:
    s3.faults.inject("503", "PUT", times=3 * transfers.PART_TRIES)
    with pytest.raises(StoreUnavailableError):
        store.create("large", DATA)
    s3.faults.heal()
    assert store.get("large") is None
    assert uploads_under_way(store) == []


def answer(code: str, status: int, **headers: str) -> Exception:
    """As s3fs raises it: an error of its own, caused by botocore's."""
    about = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    cause = ClientError({"Error": {"Code": code, "Message": "text"}, "ResponseMetadata": about}, "PutObject")
    error = OSError(5, "text")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answer("SlowDown", 503), StoreThrottledError),
        (answer("ConditionalRequestConflict", 409), StoreUnavailableError),
        (answer("InternalError", 200), StoreUnavailableError),  # a completion may fail behind a 200
        (answer("RequestTimeout", 400), StoreUnavailableError),
        (answer("BadDigest", 400), UploadDamagedError),
        (answer("NoSuchUpload", 404), StoreUnavailableError),
        (EndpointConnectionError(endpoint_url="https://s3.example.com"), StoreUnavailableError),
        (TimeoutError(), StoreUnavailableError),
        (ConnectionResetError(), StoreUnavailableError),
        (answer("QuotaExceeded", 403), NoSpaceError),
        (answer("XMinioStorageFull", 507), NoSpaceError),
        (answer("XMinioAdminBucketQuotaExceeded", 400), NoSpaceError),
        (answer("507", 507), NoSpaceError),
        (answer("AccessDenied", 403), StoreForbiddenError),
        (answer("403", 403), StoreForbiddenError),
        (answer("ExpiredToken", 400), StoreForbiddenError),
        (answer("SignatureDoesNotMatch", 403), StoreForbiddenError),
        (NoCredentialsError(), StoreForbiddenError),
        (answer("NoSuchBucket", 404), StoreGoneError),
        (answer("PermanentRedirect", 301), StoreBrokenError),
        (answer("NotImplemented", 501), StoreBrokenError),
        (answer("EntityTooLarge", 400), StoreBrokenError),
        (ValueError("a bug"), StoreBrokenError),
        (answer("NoSuchKey", 404), ObjectAbsentError),
        (answer("404", 404), ObjectAbsentError),
        (answer("PreconditionFailed", 412), ConditionFailedError),
        (answer("InvalidRange", 416), RangeBehindEndError),
    ],
    ids=lambda value: getattr(value, "__name__", repr(getattr(value, "__cause__", None) or value)[:60]),
)
def test_every_answer_has_its_class(error: Exception, expected: type[Exception]) -> None:
    assert type(sorted_error(error, "s3://bucket/k")) is expected


def test_a_wrong_clock_is_called_a_wrong_clock() -> None:
    hours_off = format_datetime(datetime.now(UTC) + timedelta(hours=2), usegmt=True)
    now = format_datetime(datetime.now(UTC), usegmt=True)
    for error in (answer("RequestTimeTooSkewed", 403), answer("403", 403, date=hours_off)):
        found = sorted_error(error, "s3://bucket/k")
        assert isinstance(found, StoreForbiddenError)
        assert "clock" in found.message
        assert "timedatectl" in (found.hint or "")
    assert "clock" not in str(sorted_error(answer("403", 403, date=now), "s3://bucket/k"))


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    "address", ["http://storage.example.com", "http://169.254.169.254", "https://169.254.169.254/"]
)
def test_an_address_that_would_leak_is_refused_before_any_request(
    s3: FaultProxy, monkeypatch: pytest.MonkeyPatch, name: str, address: str
) -> None:
    monkeypatch.setenv(name, address)
    with pytest.raises(StoreForbiddenError):
        S3Store("bucket").get("k")


def test_an_address_in_a_configuration_file_is_checked_too(
    s3: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "config").write_text("[default]\nendpoint_url = http://storage.example.com\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    with pytest.raises(StoreForbiddenError, match="loopback"):
        S3Store("bucket").get("k")
