"""What the doctor asks a bucket's own interface: how long deleted objects are kept, whether damage is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diloco_cli.doctor.place import Place
from diloco_cli.doctor.retention import Retention, _ask_s3, bucket_checks, gcs_retention, retention, s3_retention
from diloco_cli.store.deadline import Deadline
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.open import open_store
from diloco_cli.store.port import StoreBrokenError, StoreForbiddenError
from tests.contract.fake_gcs import FakeGCS
from tests.contract.fault_proxy import FaultProxy


@pytest.fixture
def settings(gcs: FakeGCS) -> Iterator[dict[str, object]]:
    """Of the bucket."""
    found: dict[str, object] = {}
    gcs.settings["bucket"] = found
    yield found
    del gcs.settings["bucket"]


def test_soft_delete_and_versioning_of_a_gcs_bucket_are_read(gcs: FakeGCS, settings: dict[str, object]) -> None:
    assert gcs_retention("bucket").kept_s == 0
    settings["softDeletePolicy"] = {"retentionDurationSeconds": "604800", "effectiveTime": "2024-03-01T00:00:00Z"}
    week = gcs_retention("bucket")
    assert week.kept_s == 7 * 86_400 and week.turn_off.endswith("gs://bucket --clear-soft-delete")
    settings["versioning"] = {"enabled": True}
    assert gcs_retention("bucket").kept_s is None
    with pytest.raises(StoreBrokenError, match="no such bucket"):
        gcs_retention("nobody-has-this")


def test_settings_that_may_not_be_read_are_no_fault(gcs: FakeGCS) -> None:
    gcs.inject("403", "GET")
    place = Place(MemoryStore, "memory://any", Deadline(10))
    found = retention(place, lambda: gcs_retention("bucket"), None)
    assert (found.level, "may not read" in found.detail) == ("skip", True)
    with pytest.raises(StoreForbiddenError):
        gcs.inject("403", "GET")
        gcs_retention("bucket")


def test_gcs_refuses_a_damaged_upload_and_one_that_takes_it_is_warned_of(gcs: FakeGCS) -> None:
    checks = bucket_checks("gs://bucket/runs", None)
    assert list(checks) == ["checksum", "soft_delete"]
    place = Place(lambda: open_store("gs://bucket/runs"), "gs://bucket/runs", Deadline(20))
    gcs.inject("503", "POST")  # in passing: asked again
    assert checks["checksum"](place).level == "pass"
    assert place.num_repeated == 1
    assert not [name for name in gcs.objects["bucket"] if "checksum" in name]


def test_versioning_of_an_s3_bucket_is_read(s3: FaultProxy) -> None:
    assert s3_retention("bucket") == Retention(0.0, s3_retention("bucket").turn_off)
    _ask_s3("put_bucket_versioning", "bucket", VersioningConfiguration={"Status": "Enabled"})
    try:
        kept = s3_retention("bucket")
        assert kept.kept_s is None and "Status=Suspended" in kept.turn_off
    finally:
        _ask_s3("put_bucket_versioning", "bucket", VersioningConfiguration={"Status": "Suspended"})
    assert list(bucket_checks("s3://bucket/runs", None)) == ["checksum", "versioning"]
