"""What obstore raises, as the port's errors."""

from __future__ import annotations

import pytest
from fsspec.exceptions import FSTimeoutError

from diloco_cli.store.obstore_client import sorted_error
from diloco_cli.store.port import StoreUnavailableError


@pytest.mark.parametrize("scheme", ["file", "gs", "s3"])
def test_a_call_that_takes_too_long_may_be_tried_again(scheme: str) -> None:
    assert type(sorted_error(FSTimeoutError(), "where", scheme)) is StoreUnavailableError
