"""s3:// and az:// through obstore: where requests go, with what credentials, and what its errors mean."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
from fsspec.exceptions import FSTimeoutError

from diloco_cli.errors import NoSpaceError
from diloco_cli.randomness import nonce
from diloco_cli.store import obstore, transfers
from diloco_cli.store.bucket import ConditionFailedError, ObjectAbsentError, RangeBehindEndError, Retention
from diloco_cli.store.obstore import azure_access, azure_store, s3_access, s3_store, sorted_error
from diloco_cli.store.open import open_store
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
from tests.contract.emulators import AZURE_ACCOUNT, AZURE_KEY, azure_environment
from tests.contract.fault_proxy import FaultProxy

CLOUD_VARIABLES = ("AWS_", "AZURE_")


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variables, and a home without files of credentials."""
    for name in list(os.environ):
        if name.startswith(CLOUD_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(obstore, "_region_of", lambda bucket: "of the bucket")


def configured(folder: Path, config: str = "", credentials: str = "") -> None:
    (folder / ".aws").mkdir()
    (folder / ".aws/config").write_text(config)
    (folder / ".aws/credentials").write_text(credentials)


def answer(status: int, code: str = "", kind: str = "GenericError") -> Exception:
    """As obstore raises it."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>text</Message></Error>' if code else ""
    text = (
        f"Generic S3 error: Error performing GET http://h/b - Server returned non-2xx status code: {status} X: {body}"
    )
    return type(kind, (Exception,), {})(f"{text}\n\nDebug source:\nGeneric {{ ... }}")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answer(503, "SlowDown"), StoreThrottledError),
        (answer(503, "ServerBusy"), StoreThrottledError),
        (answer(429), StoreThrottledError),
        (answer(409, "ConditionalRequestConflict"), StoreUnavailableError),
        (answer(200, "InternalError"), StoreUnavailableError),
        (answer(400, "RequestTimeout"), StoreUnavailableError),
        (answer(500, "OperationTimedOut"), StoreUnavailableError),
        (answer(400, "BadDigest"), UploadDamagedError),
        (answer(400, "Md5Mismatch"), UploadDamagedError),
        (FSTimeoutError(), StoreUnavailableError),
        (type("GenericError", (Exception,), {})("error sending request"), StoreUnavailableError),
        (answer(403, "QuotaExceeded"), NoSpaceError),
        (answer(507, "XMinioStorageFull"), NoSpaceError),
        (answer(400, "XMinioAdminBucketQuotaExceeded"), NoSpaceError),
        (answer(403, "AccessDenied", "PermissionDeniedError"), StoreForbiddenError),
        (answer(400, "ExpiredToken"), StoreForbiddenError),
        (answer(403, "AuthenticationFailed"), StoreForbiddenError),
        (answer(404, "NoSuchBucket"), StoreGoneError),
        (answer(404, "ContainerNotFound"), StoreGoneError),
        (answer(301, "PermanentRedirect"), StoreBrokenError),
        (answer(501, "NotImplemented"), StoreBrokenError),
        (ValueError("a bug"), StoreBrokenError),
        (answer(404, "NoSuchKey"), ObjectAbsentError),
        (FileNotFoundError("Bulk delete request failed for key k: (code: 404)"), ObjectAbsentError),
        (answer(412, "PreconditionFailed"), ConditionFailedError),
        (answer(409, "BlobAlreadyExists", "AlreadyExistsError"), ConditionFailedError),
        (answer(416, "InvalidRange"), RangeBehindEndError),
    ],
    ids=lambda value: getattr(value, "__name__", str(value).partition("status code: ")[2][:60]),
)
def test_every_answer_has_its_class(error: Exception, expected: type[Exception]) -> None:
    found = sorted_error(error, "s3://bucket/k", "s3")
    assert type(found) is expected and "Debug" not in str(found)


@pytest.mark.parametrize(
    "error",
    [
        answer(403, "RequestTimeTooSkewed"),
        Exception("status code: 403 AuthenticationFailed Request date header too old"),
    ],
)
def test_a_wrong_clock_is_called_a_wrong_clock(error: Exception) -> None:
    found = sorted_error(error, "s3://bucket/k", "s3")
    assert isinstance(found, StoreForbiddenError) and "clock is wrong" in found.message
    assert "timedatectl" in (found.hint or "")


def test_another_region_and_missing_credentials_are_named_with_what_helps() -> None:
    region = sorted_error(answer(400, "AuthorizationHeaderMalformed"), "s3://bucket", "s3")
    assert "AWS_DEFAULT_REGION" in (getattr(region, "hint", "") or "")
    asked = Exception("Error performing PUT http://169.254.169.254/latest/api/token: timed out")
    for scheme, variable in (("s3", "AWS_ACCESS_KEY_ID"), ("az", "AZURE_STORAGE_KEY")):
        found = sorted_error(asked, f"{scheme}://bucket", scheme)
        assert isinstance(found, StoreForbiddenError) and "no credentials" in found.message
        assert variable in (found.hint or "")


@pytest.mark.parametrize(
    "name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"]
)
@pytest.mark.parametrize(
    "address", ["http://storage.example.com", "http://169.254.169.254", "https://169.254.169.254/"]
)
def test_an_address_that_would_leak_is_refused_before_any_request(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str
) -> None:
    monkeypatch.setenv(name, address)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "me")
    with pytest.raises(StoreForbiddenError, match=name):
        (s3_store if name.startswith("AWS") else azure_store)("bucket").get("k", 10)


def test_an_address_in_a_file_or_a_connection_string_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configured(tmp_path, "[default]\nendpoint_url = http://storage.example.com\n")
    with pytest.raises(StoreForbiddenError, match="loopback"):
        s3_store("bucket").get("k", 10)
    text = "AccountName=me;AccountKey=AAAA;BlobEndpoint=http://storage.example.com/me"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    with pytest.raises(StoreForbiddenError, match="loopback"):
        azure_store("bucket").get("k", 10)


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a compose file with ${AWS_ENDPOINT_URL:-}; obstore, which reads it too, would panic at the first call."""
    for name in (empty := ("AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN", "AZURE_ENDPOINT")):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "me")
    assert not s3_access("bucket").endpoint and not azure_access().endpoint and not os.environ.keys() & empty


def test_a_profile_gives_keys_region_and_address_unless_variables_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configured(
        tmp_path,
        "[default]\nregion = eu-west-1\n[profile other]\nendpoint_url = https://minio.example.com\n",
        "[default]\naws_access_key_id = A\naws_secret_access_key = s%cret\n[other]\naws_access_key_id = B\n",
    )
    config = s3_access("bucket").config
    assert (config["aws_access_key_id"], config["aws_secret_access_key"]) == ("A", "s%cret")
    assert config["region"] == "eu-west-1"
    monkeypatch.setenv("AWS_PROFILE", "other")
    other = s3_access("bucket")
    assert (other.endpoint, other.config["aws_access_key_id"]) == ("https://minio.example.com", "B")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the environment")  # which obstore reads itself
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert "aws_access_key_id" not in s3_access("bucket").config and s3_access("bucket").config["region"] == "us-west-2"


def test_without_a_region_the_buckets_own_is_asked_for() -> None:
    assert s3_access("bucket").config["region"] == "of the bucket"


def test_a_profile_that_is_in_no_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreForbiddenError, match="nobody") as refused:
        s3_store("bucket").get("k", 10)
    assert refused.value.hint == "aws configure --profile nobody"


def test_a_command_that_prints_credentials_is_asked(
    s3: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "B", "Expiration": "2099-01-01T00:00:00Z"}
    (tmp_path / "print.py").write_text(f"print({json.dumps(json.dumps(printed))})")
    configured(tmp_path, f"[default]\ncredential_process = {sys.executable} {tmp_path / 'print.py'}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name)
    store = s3_store("bucket", "printed")
    store.create("k", b"x")
    assert store.get("k", 10) == b"x"
    (tmp_path / "print.py").write_text("import sys; sys.exit('log in again')")
    with pytest.raises(StoreForbiddenError, match="log in again"):
        s3_store("bucket", "printed").get("k", 10)


@pytest.mark.parametrize("setting", ["sso_session = work", "role_arn = arn:aws:iam::1:role/r"])
def test_a_single_sign_on_or_another_role_is_asked_of_the_aws_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    configured(tmp_path, f"[profile work]\n{setting}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout='{"AccessKeyId": "A", "SecretAccessKey": "B", "SessionToken": "C"}')

    monkeypatch.setattr("subprocess.run", run)
    credentials = s3_access("bucket").credentials
    assert credentials is not None
    assert credentials() == {"access_key_id": "A", "secret_access_key": "B", "token": "C", "expires_at": None}
    assert asked == [["aws", "configure", "export-credentials", "--profile", "work", "--format", "process"]]


def test_an_account_that_is_not_named_and_a_key_that_is_none_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreForbiddenError, match="no storage account") as refused:
        azure_store("data").get("k", 10)
    assert "AZURE_STORAGE_ACCOUNT" in (refused.value.hint or "")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "me")
    for name in ("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "!!")
            with pytest.raises(StoreForbiddenError) as refused:
                azure_store("data").get("k", 10)
            assert "AZURE_STORAGE_KEY" in (refused.value.hint or "")


def test_a_connection_string_names_account_key_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    key, address = "AAAA==", "https://me.example.com"
    text = f"DefaultEndpointsProtocol=https;AccountName=me;AccountKey={key};BlobEndpoint={address}/;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert azure_access().config == {"account_name": "me", "account_key": key, "endpoint": address}
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true")
    assert azure_access().config == {"use_emulator": True}


def test_an_azure_login_is_used_where_nothing_else_gives_credentials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "me")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert azure_access().config == {"account_name": "me"}
    (tmp_path / ".azure").mkdir()
    (tmp_path / ".azure/azureProfile.json").write_text("{}")
    assert azure_access().config["use_azure_cli"]
    monkeypatch.setenv("AZURE_CLIENT_ID", "a service principal")
    assert "use_azure_cli" not in azure_access().config


def test_wrong_credentials_are_refused_with_a_hint(az: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**azure_environment(az.url), "AZURE_STORAGE_KEY": AZURE_KEY[::-1].replace("=", "A")}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreForbiddenError) as refused:
        azure_store("bucket").get("k", 10)
    assert AZURE_ACCOUNT not in (refused.value.hint or "") and "AZURE_STORAGE_KEY" in (refused.value.hint or "")


def test_a_bucket_that_keeps_versions_is_told_by_the_version_of_an_upload(
    s3: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ENDPOINT_URL": s3.url, "ACCESS_KEY_ID": "t", "SECRET_ACCESS_KEY": "t"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    store = s3_store("bucket", "versions")
    assert store.retention("k") == Retention(0.0, "")
    for status, kept_s in (("Enabled", None), ("Suspended", 0.0)):
        body = f"<VersioningConfiguration><Status>{status}</Status></VersioningConfiguration>"
        request = Request(
            f"{s3.url}/bucket?versioning", body.encode(), {"Content-Type": "application/xml"}, method="PUT"
        )
        urlopen(request, timeout=20).close()
        found = store.retention("k")
        assert found is not None and found.kept_s == kept_s
        assert "Status=Suspended" in found.turn_off or kept_s == 0


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_a_large_object_goes_up_in_parts_of_which_a_failed_one_is_sent_again(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    proxy: FaultProxy = request.getfixturevalue(scheme)
    monkeypatch.setattr(obstore, "IN_PARTS_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(transfers, "PART_BYTES", 5 << 20)  # the least that S3 takes
    store, data = open_store(f"{scheme}://bucket/parts-{nonce()}"), os.urandom((10 << 20) + 123)
    proxy.faults.inject("503", "PUT", times=2)
    assert store.create("large", data) == Created() and store.get("large") == data
    assert proxy.faults.num_pending() == 0
    before = proxy.faults.requests
    assert store.create("large", data[::-1]) == Exists(data)
    assert proxy.faults.requests - before < 10, "no part goes up where an object is seen"


def test_where_a_policy_refuses_parts_one_request_carries_all(s3: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore, "IN_PARTS_FROM_BYTES", 1 << 10)
    store = open_store(f"s3://bucket/refused-{nonce()}")
    s3.faults.inject("403", "POST")
    assert store.create("large", b"x" * 5000) == Created()
    before = s3.faults.requests
    assert store.create("larger", b"x" * 9000) == Created() and s3.faults.requests - before == 1
