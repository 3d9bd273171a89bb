"""What only a remote bucket can do to us: lose answers, cut bodies, stall, refuse, not exist."""

from __future__ import annotations

import os

import pytest

import diloco_cli.store.gcs as gcs_module
from diloco_cli.store.gcs import GCSStore
from diloco_cli.store.open import open_store
from diloco_cli.store.port import (
    Created,
    Exists,
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
)
from diloco_cli.store.retry import RetryingStore
from tests.contract.fake_gcs import FakeGCS, Kind


@pytest.fixture
def store(gcs: FakeGCS) -> GCSStore:
    return GCSStore("bucket", "runs/one")


def test_a_create_whose_answer_was_lost_is_recognised_as_ones_own(gcs: FakeGCS, store: GCSStore) -> None:
    gcs.inject("lost_answer", "POST")
    assert store.create("k", b"mine") == Created()
    assert gcs.num_pending() == 0


def test_a_create_that_lost_its_answer_to_anothers_object_is_not(gcs: FakeGCS, store: GCSStore) -> None:
    store.create("k", b"theirs")
    gcs.inject("lost_answer", "POST")
    assert store.create("k", b"mine") == Exists(b"theirs")


def test_a_create_that_never_arrived_is_an_error_and_works_when_repeated(gcs: FakeGCS, store: GCSStore) -> None:
    gcs.inject("503", "POST", times=3)
    with pytest.raises(StoreUnavailableError):
        store.create("k", b"mine")
    assert RetryingStore(store, sleep=lambda seconds: None).create("k", b"mine") == Created()


def test_a_create_survives_a_lost_answer_and_a_failing_read_back(gcs: FakeGCS, store: GCSStore) -> None:
    gcs.inject("lost_answer", "POST")
    gcs.inject("503", "GET", times=2)
    assert RetryingStore(store, sleep=lambda seconds: None).create("k", b"mine") == Created()
    assert store.get("k") == b"mine"


@pytest.mark.parametrize("kind", ["503", "429", "cut_body", "flip_bit"])
def test_a_spoilt_download_is_never_returned_and_may_be_repeated(gcs: FakeGCS, store: GCSStore, kind: Kind) -> None:
    store.create("k", b"payload" * 100_000)
    gcs.inject(kind, "GET")
    with pytest.raises(StoreUnavailableError):
        store.get("k")
    assert store.get("k") == b"payload" * 100_000


def test_a_stalled_request_ends_by_itself(gcs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_module, "SILENCE_TIMEOUT_S", 0.3)
    store.create("k", b"x")
    gcs.inject("stall", "GET")
    with pytest.raises(StoreUnavailableError):
        store.get("k")


def test_a_call_ends_at_its_deadline_whatever_happens(
    gcs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("k", b"x")
    monkeypatch.setattr(gcs_module, "_deadline_s", lambda num_bytes: 0.3)
    gcs.inject("stall", "GET")
    with pytest.raises(StoreUnavailableError):
        store.get("k")


def test_a_forbidden_call_says_so_with_a_hint(gcs: FakeGCS, store: GCSStore) -> None:
    gcs.inject("403", "GET")
    with pytest.raises(StoreForbiddenError) as refused:
        store.get("k")
    assert refused.value.hint
    assert refused.value.exit_status == 6


def test_a_missing_bucket_is_no_empty_bucket(gcs: FakeGCS) -> None:
    nowhere = open_store("gs://nobody-has-this/runs")
    with pytest.raises(StoreBrokenError, match="no such bucket"):
        nowhere.list("")
    with pytest.raises(StoreBrokenError, match="no such bucket"):
        nowhere.create("k", b"x")


def test_a_large_object_goes_up_in_checked_parts_and_exclusively(
    gcs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_module, "RESUMABLE_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(gcs_module, "CHUNK_BYTES", 1 << 20)
    data = os.urandom((5 << 20) + 123)
    assert store.create("large", data) == Created()
    assert store.get("large") == data
    assert store.create("large", data[::-1]) == Exists(data)
    gcs.inject("503", "PUT")
    with pytest.raises(StoreUnavailableError):
        store.create("other", data)
    assert store.get("other") is None
    assert store.create("other", data) == Created()
    monkeypatch.setattr(gcs, "keeps_half", True)
    assert store.create("in/halves", data) == Created()
    assert store.get("in/halves") == data


def test_a_large_object_whose_last_answers_were_lost_is_ones_own(
    gcs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_module, "RESUMABLE_FROM_BYTES", 1)
    data = os.urandom(100_000)
    gcs.inject("lost_answer", "PUT", times=2)  # the connection's own repetition among them
    assert store.create("large", data) == Created()
    assert gcs.num_pending() == 0


def test_bytes_damaged_on_their_way_up_are_refused_by_the_store(
    gcs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(gcs_module, "_crc32c", lambda data: "AAAAAA==")
        with pytest.raises(StoreUnavailableError):
            store.create("k", b"x")
    assert store.get("k") is None


def test_nothing_outside_the_prefix_is_touched(gcs: FakeGCS, store: GCSStore) -> None:
    store.create("a/k", b"x")
    store.put("h", b"x")
    GCSStore("bucket", "runs/one-more").create("k", b"x")
    assert store.list("") == ["a/k", "h"]
    assert sorted(gcs.objects["bucket"]) == ["runs/one-more/k", "runs/one/a/k", "runs/one/h"]


def test_a_call_is_one_request(gcs: FakeGCS, store: GCSStore) -> None:
    before = gcs.requests
    store.create("k", b"x")
    store.get("k")
    store.stat("k")
    store.list("")
    store.delete("k")
    assert gcs.requests - before == 5


def test_an_emulator_that_is_not_on_this_machine_needs_tls(gcs: FakeGCS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://storage.example.com")
    with pytest.raises(StoreForbiddenError, match="loopback"):
        GCSStore("bucket").get("k")
