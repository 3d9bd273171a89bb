"""What is particular to GCS: resumable uploads, checksums that the store verifies, the emulator's address."""

from __future__ import annotations

import os

import pytest

import diloco_cli.store.gcs as gcs_module
from diloco_cli.store import transfers
from diloco_cli.store.gcs import GCSStore
from diloco_cli.store.port import Created, Exists, StoreForbiddenError, StoreUnavailableError
from diloco_cli.store.proof import checks_uploads
from tests.contract.fake_gcs import FakeGCS

DATA = os.urandom((5 << 20) + 123)


@pytest.fixture
def store(gcs: FakeGCS, monkeypatch: pytest.MonkeyPatch) -> GCSStore:
    """What a mebibyte or more holds goes up in chunks."""
    monkeypatch.setattr(transfers, "UPLOAD_IN_PARTS_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(gcs_module, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(gcs_module, "pause_s", lambda attempt, error, jitter: 0.0)
    return GCSStore("bucket", "runs/one")


def test_a_large_object_goes_up_in_checked_chunks_and_exclusively(gcs: FakeGCS, store: GCSStore) -> None:
    assert store.create("large", DATA) == Created()
    assert store.get("large") == DATA
    assert store.create("large", DATA[::-1]) == Exists(DATA)


def test_a_chunk_of_which_the_store_keeps_a_half_is_sent_on_from_there(
    gcs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "keeps_half", True)
    assert store.create("in/halves", DATA) == Created()
    assert store.get("in/halves") == DATA


def test_an_upload_goes_on_where_it_failed(gcs: FakeGCS, store: GCSStore) -> None:
    before = gcs.requests
    gcs.inject("503", "PUT", times=2)
    gcs.inject("lost_answer", "PUT", times=2)  # the connection's own repetition among them
    assert store.create("large", DATA) == Created()
    assert gcs.num_pending() == 0
    assert (
        gcs.requests - before <= 1 + 6 + 8
    )  # the session, six chunks, and for each failure a repetition and a question
    assert store.get("large") == DATA


@pytest.mark.parametrize("ignores", [False, True])
def test_what_a_store_confirms_counts_as_checked_once_it_has_refused_wrong_checksums(
    gcs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    monkeypatch.setattr(gcs, "ignores_checksums", ignores)
    before = store.create("unproven", b"small")
    assert isinstance(before, Created) and not before.checked
    assert checks_uploads(store, "trial") is not ignores
    for key, data in (("small", b"small"), ("large", DATA)):
        answer = store.create(key, data)
        assert isinstance(answer, Created) and answer.checked is not ignores
    assert store.get("trial") is None


def test_an_upload_that_fails_for_good_leaves_nothing(gcs: FakeGCS, store: GCSStore) -> None:
    gcs.inject("503", "PUT", times=transfers.PART_TRIES)
    with pytest.raises(StoreUnavailableError):
        store.create("large", DATA)
    assert store.get("large") is None
    assert store.create("large", DATA) == Created()


def test_an_upload_that_got_no_session_is_tried_again(
    gcs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "forgets_location", True)
    with pytest.raises(StoreUnavailableError, match="session"):
        store.create("large", DATA)
    monkeypatch.setattr(gcs, "forgets_location", False)
    assert store.create("large", DATA) == Created()


def test_bytes_damaged_on_their_way_up_are_refused_by_the_store(
    gcs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(transfers, "crc32c", lambda data: "AAAAAA==")
        with pytest.raises(StoreUnavailableError):
            store.create("k", b"x")
        with pytest.raises(StoreUnavailableError):
            store.create("large", DATA)
    assert store.get("k") is None
    assert store.get("large") is None


def test_an_emulator_that_is_not_on_this_machine_needs_tls(gcs: FakeGCS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://storage.example.com")
    with pytest.raises(StoreForbiddenError, match="loopback"):
        GCSStore("bucket").get("k")
