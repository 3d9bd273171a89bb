"""What only Google Cloud Storage's own interface tells of a bucket."""

from __future__ import annotations

import json
from typing import Any

from diloco_cli.doctor.retention import Retention
from diloco_cli.store.gcs_client import multipart_body, sorted_error, start_client
from diloco_cli.store.port import StoreBrokenError, StoreUnavailableError

WRONG_CRC32C = "AAAAAA=="
BOUNDARY = "part-of-an-examination"


def retention_of(bucket: str) -> Retention:
    """The bucket's soft delete policy and object versioning. Raises StoreError."""
    body = _call("GET", "b/{}", bucket, fields="softDeletePolicy(retentionDurationSeconds),versioning(enabled)")
    about = json.loads(body)
    if (about.get("versioning") or {}).get("enabled"):
        return Retention(None, f"gcloud storage buckets update gs://{bucket} --no-versioning")
    kept_s = float((about.get("softDeletePolicy") or {}).get("retentionDurationSeconds", 0))
    return Retention(kept_s, f"gcloud storage buckets update gs://{bucket} --clear-soft-delete")


def takes_damage(bucket: str, name: str, data: bytes) -> bool:
    """Whether the store takes bytes whose checksum says that they are others. Raises StoreError for any other
    refusal."""
    about = {"name": name, "crc32c": WRONG_CRC32C, "contentType": "application/octet-stream"}
    try:
        _call(
            "POST", "/upload", bucket, uploadType="multipart",
            data=multipart_body(BOUNDARY, about, data),
            headers={"Content-Type": f"multipart/related; boundary={BOUNDARY}"},
        )  # fmt: skip
    except StoreUnavailableError as error:
        if "damaged" in error.message:
            return False
        raise
    return True


def _call(method: str, path: str, bucket: str, **parts: Any) -> bytes:
    filesystem = start_client()
    if path == "/upload":
        path = filesystem.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
    try:
        _, body = filesystem.call(method, path, bucket, **parts)
    except FileNotFoundError as error:
        raise StoreBrokenError("no such bucket", where=f"gs://{bucket}") from error
    except Exception as error:  # six libraries below, each with errors of its own: all are sorted there
        raise sorted_error(error, f"gs://{bucket}") from error
    return bytes(body)
