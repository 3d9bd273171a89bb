"""The emulated clouds of the contract suite."""

from tests.contract.conftest import az, azure_server, gcs_server, gs, s3, s3_server

__all__ = ["az", "azure_server", "gcs_server", "gs", "s3", "s3_server"]
