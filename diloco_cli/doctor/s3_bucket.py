"""What only S3's own interface tells of a bucket."""

from __future__ import annotations

from typing import Any

from diloco_cli.doctor.retention import Retention
from diloco_cli.store.port import StoreBrokenError, StoreUnavailableError
from diloco_cli.store.s3_client import sorted_error, start_client

WRONG_CRC32C = "AAAAAA=="


def retention_of(bucket: str) -> Retention:
    """The bucket's versioning: an old version stays, and is billed, until a rule of the bucket expires it. Raises
    StoreError."""
    status = _call("get_bucket_versioning", bucket).get("Status")
    turn_off = (
        f"aws s3api put-bucket-versioning --bucket {bucket} --versioning-configuration Status=Suspended, and expire "
        "noncurrent versions by a lifecycle rule"
    )
    return Retention(None if status == "Enabled" else 0.0, turn_off)


def takes_damage(bucket: str, name: str, data: bytes) -> bool:
    """Whether the store takes bytes whose checksum says that they are others. Raises StoreError for any other
    refusal."""
    try:
        _call("put_object", bucket, Key=name, Body=data, ChecksumCRC32C=WRONG_CRC32C)
    except StoreUnavailableError as error:
        if "damaged" in error.message:
            return False
        raise
    except StoreBrokenError:
        return False  # an invalid request: some services say so of a checksum that does not fit
    return True


def _call(method: str, bucket: str, **parts: Any) -> dict[str, Any]:
    from fsspec.asyn import sync

    filesystem = start_client()
    try:
        found: dict[str, Any] = sync(filesystem.loop, filesystem._call_s3, method, Bucket=bucket, **parts)
    except Exception as error:  # four libraries below, each with errors of its own: all are sorted there
        raise sorted_error(error, f"s3://{bucket}") from error
    return found
