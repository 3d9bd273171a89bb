"""How long a bucket keeps deleted objects, what that costs a run, and whether it checks uploads' checksums."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from diloco_cli.doctor.place import Place, noise
from diloco_cli.doctor.verdicts import Finding, passed, skipped, warned
from diloco_cli.errors import StoreError
from diloco_cli.store import gcs_client, s3_client
from diloco_cli.store.open import parse_url
from diloco_cli.store.port import StoreBrokenError, StoreForbiddenError, StoreUnavailableError
from diloco_cli.units import format_duration, format_size

DAY_S = 86_400.0
STORAGE_PRICE_PER_GB_MONTH = 0.02
"""US dollars; standard storage in the cheaper regions of the public price lists."""
EXAMPLE_GB_PER_DAY = 100.0
CLIENTS = {"gs": "gcsfs", "s3": "s3fs"}
"""Packages that speak a cloud's own interface; a run may do without them (obstore)."""
WRONG_CRC32C = "AAAAAA=="
BOUNDARY = "part-of-an-examination"
OWN_DIGESTS = "every record and payload carries the run's own digest, which its readers check"

Examiner = Callable[[Place], Finding]


@dataclass(frozen=True)
class Retention:
    """How long a bucket keeps deleted objects, and bills them; 0: not at all, None: until a person removes them.
    `turn_off` is a command."""

    kept_s: float | None
    turn_off: str


def bucket_checks(url: str, written_gb_per_day: float | None) -> dict[str, Examiner]:
    """The further checks of the store at `url`, by name. `written_gb_per_day`: what a run would write there."""
    parsed = parse_url(url)
    if parsed.scheme not in CLIENTS or find_spec(CLIENTS[parsed.scheme]) is None:
        return {"checksum": lambda place: passed(OWN_DIGESTS)}
    if parsed.scheme == "gs":
        name, read, takes_damage = "soft_delete", gcs_retention, gcs_takes_damage
    else:
        name, read, takes_damage = "versioning", s3_retention, s3_takes_damage
    return {
        "checksum": lambda place: checksum(place, partial(takes_damage, parsed.place)),
        name: lambda place: retention(place, partial(read, parsed.place), written_gb_per_day),
    }


def checksum(place: Place, takes_damage: Callable[[str, bytes], bool]) -> Finding:
    """An upload whose checksum does not fit its bytes must be refused, and leave nothing. `takes_damage(name, data)`
    tries that and returns whether the store accepted it."""
    key = "checksum/wrong"
    name = f"{parse_url(place.prefix_url).prefix}/{key}"
    with place.writing(key):
        taken = place.patiently("upload", lambda: takes_damage(name, noise("checksum", 1000)))
    if taken or place.store.get(key) is not None:
        return warned("a damaged upload was accepted", f"a run still notices: {OWN_DIGESTS}")
    return passed("a damaged upload is refused")


def retention(place: Place, read: Callable[[], Retention], written_gb_per_day: float | None) -> Finding:
    """To read the retention takes a permission that a run does not need: without it the check is skipped."""
    try:
        return retention_finding(place.patiently("look", read), written_gb_per_day)
    except StoreForbiddenError:
        return skipped("these credentials may not read the bucket's settings")
    except StoreError as error:
        return skipped(f"the bucket does not tell: {error}")


def retention_finding(retention: Retention, written_gb_per_day: float | None) -> Finding:
    """A run that collects its garbage deletes about as much as it writes, so the bucket also holds, and bills, the data
    written in `kept_s`."""
    if retention.kept_s == 0:
        return passed("what is deleted is gone, and not billed")
    hint = f"a run deletes nearly all that it writes; to turn it off: {retention.turn_off}"
    if retention.kept_s is None:
        return warned("what is deleted stays, and is billed, until it is removed for good", hint)
    kept = f"what is deleted is kept, and billed, for {format_duration(retention.kept_s)}"
    if written_gb_per_day is None:
        monthly = monthly_cost(EXAMPLE_GB_PER_DAY, retention.kept_s)
        return warned(f"{kept}: ${monthly:,.2f} a month for each 100 GB a day that a run writes", hint)
    monthly = monthly_cost(written_gb_per_day, retention.kept_s)
    return warned(f"{kept}: ${monthly:,.2f} a month for this run's {format_size(1e9 * written_gb_per_day)} a day", hint)


def monthly_cost(written_gb_per_day: float, kept_s: float) -> float:
    """US dollars a month for the deleted objects that the bucket still holds. 100 GB a day kept for 7 days: 700 GB,
    $14."""
    return written_gb_per_day * kept_s / DAY_S * STORAGE_PRICE_PER_GB_MONTH


def gcs_retention(bucket: str) -> Retention:
    """The bucket's soft delete policy and object versioning. Raises StoreError."""
    body = _ask_gcs("GET", "b/{}", bucket, fields="softDeletePolicy(retentionDurationSeconds),versioning(enabled)")
    about = json.loads(body)
    if (about.get("versioning") or {}).get("enabled"):
        return Retention(None, f"gcloud storage buckets update gs://{bucket} --no-versioning")
    kept_s = float((about.get("softDeletePolicy") or {}).get("retentionDurationSeconds", 0))
    return Retention(kept_s, f"gcloud storage buckets update gs://{bucket} --clear-soft-delete")


def gcs_takes_damage(bucket: str, name: str, data: bytes) -> bool:
    """Whether the store accepts bytes with a wrong checksum. Raises StoreError for a refusal of another
    kind."""
    about = {"name": name, "crc32c": WRONG_CRC32C, "contentType": "application/octet-stream"}
    try:
        _ask_gcs(
            "POST", "/upload", bucket, uploadType="multipart",
            data=gcs_client.multipart_body(BOUNDARY, about, data),
            headers={"Content-Type": f"multipart/related; boundary={BOUNDARY}"},
        )  # fmt: skip
    except StoreUnavailableError as error:
        if "damaged" in error.message:
            return False
        raise
    return True


def _ask_gcs(method: str, path: str, bucket: str, **parts: Any) -> bytes:
    filesystem = gcs_client.start_client()
    if path == "/upload":
        path = filesystem.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
    try:
        _, body = filesystem.call(method, path, bucket, **parts)
    except FileNotFoundError as error:
        raise StoreBrokenError("no such bucket", where=f"gs://{bucket}") from error
    except Exception as error:  # six libraries below, each with errors of its own: all are sorted there
        raise gcs_client.sorted_error(error, f"gs://{bucket}") from error
    return bytes(body)


def s3_retention(bucket: str) -> Retention:
    """The bucket's versioning: an old version stays, and is billed, until a rule of the bucket expires it. Raises
    StoreError."""
    status = _ask_s3("get_bucket_versioning", bucket).get("Status")
    turn_off = (
        f"aws s3api put-bucket-versioning --bucket {bucket} --versioning-configuration Status=Suspended, and expire "
        "noncurrent versions by a lifecycle rule"
    )
    return Retention(None if status == "Enabled" else 0.0, turn_off)


def s3_takes_damage(bucket: str, name: str, data: bytes) -> bool:
    """Whether the store accepts bytes with a wrong checksum. Raises StoreError if it does not answer, or allows
    no upload."""
    try:
        _ask_s3("put_object", bucket, Key=name, Body=data, ChecksumCRC32C=WRONG_CRC32C)
    except StoreUnavailableError as error:
        if "damaged" in error.message:
            return False
        raise
    except StoreBrokenError:
        return False  # an invalid request: some services say so of a checksum that does not fit
    return True


def _ask_s3(method: str, bucket: str, **parts: Any) -> dict[str, Any]:
    from fsspec.asyn import sync

    filesystem = s3_client.start_client()
    try:
        found: dict[str, Any] = sync(filesystem.loop, filesystem._call_s3, method, Bucket=bucket, **parts)
    except Exception as error:  # four libraries below, each with errors of its own: all are sorted there
        raise s3_client.sorted_error(error, f"s3://{bucket}") from error
    return found
