"""A bucket's quota that is used up is a lack of space, for which a syncer collects, and no lack of rights."""

from __future__ import annotations

import pytest
from gcsfs.retry import validate_response

from diloco_cli.errors import NoSpaceError
from diloco_cli.store.gcs_client import sorted_error as error_of_gcs
from diloco_cli.store.obstore_client import sorted_error as error_of_obstore
from diloco_cli.store.port import StoreForbiddenError
from diloco_cli.store.retry import kind_of

OVER = b'{"error":{"code":403,"errors":[{"reason":"quotaExceeded"}],"message":"The bucket has exceeded its quota."}}'
DENIED = b'{"error":{"code":403,"message":"no permission to use the quota project"}}'
FULL = b'{"error":{"code":507,"message":"no room"}}'


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [(403, OVER, NoSpaceError), (507, FULL, NoSpaceError), (403, DENIED, StoreForbiddenError)],
)
def test_gcs_says_so_by_its_status_or_its_message(status: int, body: bytes, expected: type[Exception]) -> None:
    with pytest.raises(Exception) as raised:
        validate_response(status, body, "b/bucket/o/quota-exceeded")
    assert type(error_of_gcs(raised.value, "gs://bucket/k")) is expected


@pytest.mark.parametrize(
    "said",
    [
        "Client error with status code: 403 Forbidden: <Error><Code>QuotaExceeded</Code></Error>",
        "Server error with status code: 507 Insufficient Storage: <Error><Code>XMinioStorageFull</Code></Error>",
    ],
)
def test_obstore_says_so_in_its_text(said: str) -> None:
    found = error_of_obstore(OSError(said), "s3://bucket/k", "s3")
    assert isinstance(found, NoSpaceError) and kind_of(found) == "full"
