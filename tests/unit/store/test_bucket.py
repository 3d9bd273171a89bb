"""The common part of stores over a network: where their requests may go."""

from __future__ import annotations

import pytest

from diloco_cli.store.bucket import check_endpoint
from diloco_cli.store.port import StoreForbiddenError


@pytest.mark.parametrize(
    "address",
    ["http://10.0.0.1:9000", "http://169.254.169.254", "https://169.254.169.254", "https://metadata.google.internal",
     "http://[fd00:ec2::254]", "https://[fd00:ec2::254]", "https://[::ffff:169.254.169.254]", "https://100.100.100.200",
     "ftp://localhost", "ftp://example.com", "storage.example.com", "http://example.com", "http://localhost.example.com",
     "http://127.0.0.1.example.com", "https://", "https://metadata.", "", "http://", "http://[::1"],
)  # fmt: skip
def test_addresses_that_would_leak_are_refused(address: str) -> None:
    """Rows 18 and 22 of tests/security: plain http only for loopback; metadata hosts refused."""
    with pytest.raises(StoreForbiddenError, match="VARIABLE"):
        check_endpoint(address, "VARIABLE")


@pytest.mark.parametrize(
    "address",
    ["http://localhost:4443", "127.0.0.1:4443", "http://127.8.9.1", "http://[::1]:9000", "http://127.0.0.1:4443",
     "https://minio.example.com:9000", "https://storage.googleapis.com"],
)  # fmt: skip
def test_loopback_and_tls_are_allowed(address: str) -> None:
    assert check_endpoint(address, "VARIABLE").endswith(address)
