"""Google Cloud Storage: uploads in chunks and parts, checksums that the store verifies, the bucket's own settings."""

from __future__ import annotations

import os
from typing import Any

import pytest
from gcsfs.retry import validate_response

from diloco_cli import clock
from diloco_cli.doctor.checks import Place, retention, upload_check
from diloco_cli.errors import NoSpaceError
from diloco_cli.randomness import nonce
from diloco_cli.store import gcs, transfers
from diloco_cli.store.gcs import GCSStore
from diloco_cli.store.gcs import sorted_error as error_of_gcs
from diloco_cli.store.open import checks_uploads, discard_leftovers_at
from diloco_cli.store.port import Created, Discarded, Exists, StoreForbiddenError, StoreGoneError, StoreUnavailableError
from diloco_cli.store.wrappers import Deadline
from tests.contract.fake_gcs import Blob, FakeGCS, Kind

DATA = os.urandom((5 << 20) + 123)


@pytest.fixture
def store(gs: FakeGCS, monkeypatch: pytest.MonkeyPatch) -> GCSStore:
    """What a mebibyte or more holds goes up in chunks."""
    monkeypatch.setattr(transfers, "UPLOAD_IN_PARTS_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(gcs, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(gcs, "pause_s", lambda attempt, error, jitter: 0.0)
    return GCSStore("bucket", "runs/one")


def test_a_large_object_goes_up_in_checked_chunks_and_exclusively(gs: FakeGCS, store: GCSStore) -> None:
    assert store.create("large", DATA) == Created()
    assert store.get("large") == DATA
    assert store.create("large", DATA[::-1]) == Exists(DATA)


def test_a_chunk_of_which_the_store_keeps_a_half_is_sent_on_from_there(
    gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gs, "keeps_half", True)
    assert store.create("in/halves", DATA) == Created()
    assert store.get("in/halves") == DATA


def test_an_upload_goes_on_where_it_failed(gs: FakeGCS, store: GCSStore) -> None:
    before = gs.requests
    gs.inject("503", "PUT", times=2)
    gs.inject("lost_answer", "PUT", times=2)  # the connection's own repetition among them
    assert store.create("large", DATA) == Created()
    assert gs.num_pending() == 0
    assert (
        gs.requests - before <= 1 + 6 + 8
    )  # the session, six chunks, and for each failure a repetition and a question
    assert store.get("large") == DATA


@pytest.mark.parametrize("ignores", [False, True])
def test_what_a_store_confirms_counts_as_checked_once_it_has_refused_wrong_checksums(
    gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    monkeypatch.setattr(gs, "ignores_checksums", ignores)
    before = store.create("unproven", b"small")
    assert isinstance(before, Created) and not before.checked
    assert checks_uploads(store, "trial") is not ignores
    for key, data in (("small", b"small"), ("large", DATA)):
        answer = store.create(key, data)
        assert isinstance(answer, Created) and answer.checked is not ignores
    assert store.get("trial") is None


def test_an_upload_that_fails_for_good_leaves_nothing(gs: FakeGCS, store: GCSStore) -> None:
    gs.inject("503", "PUT", times=transfers.PART_TRIES)
    with pytest.raises(StoreUnavailableError):
        store.create("large", DATA)
    assert store.get("large") is None
    assert store.create("large", DATA) == Created()


def test_an_upload_that_got_no_session_is_tried_again(
    gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gs, "forgets_location", True)
    with pytest.raises(StoreUnavailableError, match="session"):
        store.create("large", DATA)
    monkeypatch.setattr(gs, "forgets_location", False)
    assert store.create("large", DATA) == Created()


def test_bytes_damaged_on_their_way_up_are_refused_by_the_store(
    gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(transfers, "crc32c", lambda data: "AAAAAA==")
        with pytest.raises(StoreUnavailableError):
            store.create("k", b"x")
        with pytest.raises(StoreUnavailableError):
            store.create("large", DATA)
    assert store.get("k") is None
    assert store.get("large") is None


@pytest.fixture
def composing(gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch) -> GCSStore:
    """What a mebibyte or more holds goes up in parts of half a mebibyte, each in two chunks."""
    monkeypatch.setattr(transfers, "ALWAYS_IN_PARTS_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(gcs, "MOST_COMPOSED", 6)
    monkeypatch.setattr(transfers, "PART_BYTES", 1 << 19)
    monkeypatch.setattr(transfers, "pause_s", lambda attempt, error, jitter: 0.0)
    monkeypatch.setattr(gs, "num_composed", 0)
    return store


def names_in(gs: FakeGCS) -> list[str]:
    return sorted(gs.objects["bucket"])


def test_a_large_object_is_composed_of_parts_and_exclusively(gs: FakeGCS, composing: GCSStore) -> None:
    assert composing.create("large", DATA) == Created()
    assert composing.get("large") == DATA
    assert composing.create("large", DATA[::-1]) == Exists(DATA)
    assert composing.create("large", DATA) == Created()
    composing.put("large", DATA[::-1])
    assert composing.get("large") == DATA[::-1]
    assert gs.num_composed == 2 and names_in(gs) == ["runs/one/large"], "what is there is seen before parts go up"


@pytest.mark.parametrize("kind", ["503", "lost_answer"])
def test_a_part_that_failed_is_sent_again_alone(gs: FakeGCS, composing: GCSStore, kind: Kind) -> None:
    before = gs.requests
    for method in ("PUT", "POST"):
        gs.inject(kind, method, times=2)
    assert composing.create("large", DATA) == Created()
    assert gs.num_pending() == 0 and gs.num_composed == 1
    assert gs.requests - before <= 1 + 6 * 4 + 1 + 4 * 3, "sessions, chunks and deletes of six parts, and what failed"
    assert composing.get("large") == DATA and names_in(gs) == ["runs/one/large"]


def test_a_composition_whose_answer_was_lost_is_found_to_be_ones_own(gs: FakeGCS, composing: GCSStore) -> None:
    original = GCSStore._compose

    async def lost(*arguments: Any) -> None:
        await original(*arguments)
        raise StoreUnavailableError("its answer was lost")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GCSStore, "_compose", lost)
        assert composing.create("large", DATA) == Created()
    assert names_in(gs) == ["runs/one/large"]


@pytest.mark.parametrize("status", [403, 404, 501, 400])
def test_where_nothing_is_composed_one_connection_carries_all(
    gs: FakeGCS, composing: GCSStore, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(gs, "refuses_to_compose", status)
    assert composing.create("large", DATA) == Created()
    before = gs.requests
    assert composing.create("larger", DATA + DATA) == Created()
    assert gs.requests - before == 1 + 11, "a session and its chunks: parts are not tried again"
    assert names_in(gs) == ["runs/one/large", "runs/one/larger"]


def test_a_writer_that_may_not_delete_its_parts_makes_no_more(gs: FakeGCS, composing: GCSStore) -> None:
    gs.inject("403", "DELETE", times=6)
    assert composing.create("large", DATA) == Created()
    assert gs.num_pending() == 0 and len(names_in(gs)) == 1 + 6
    assert composing.create("another", DATA) == Created()
    assert gs.num_composed == 1 and len(names_in(gs)) == 2 + 6


@pytest.mark.parametrize("forbidden", ["", "parts-of-uploads/"])
def test_doctor_says_where_a_policy_forbids_parts(
    gs: FakeGCS, composing: GCSStore, monkeypatch: pytest.MonkeyPatch, forbidden: str
) -> None:
    monkeypatch.setattr(gs, "refuses_names", forbidden)
    found = upload_check(Place(lambda: composing, composing.url, Deadline(60)))
    assert found.level == ("warn" if forbidden else "pass") and "damaged uploads are refused" in found.detail
    assert ("one connection carries" in found.detail) is bool(forbidden)
    assert names_in(gs) == []


def test_a_token_that_was_refused_once_does_not_end_composing(
    gs: FakeGCS, composing: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gs.inject("403", "POST")
    for key in ("first", "second"):
        assert composing.create(key, DATA) == Created()
    assert gs.num_composed == 0
    now_s = clock.monotonic_s()
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s + gcs.REFUSED_FOR_S)
    assert composing.create("third", DATA) == Created()
    assert gs.num_composed == 1 and len(names_in(gs)) == 3


def test_after_a_429_an_object_goes_through_few_connections(
    gs: FakeGCS, composing: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "PROBE_BYTES", 1 << 20)
    composing.create("fast", DATA[::-1])
    speed = composing._speed
    assert speed.link_bytes_per_s is not None
    gs.inject("429", "PUT")
    composing.create("large", DATA)
    assert speed.link_bytes_per_s is None
    composing.create("larger", DATA)
    assert speed.link_bytes_per_s is not None


def test_parts_that_are_composed_to_other_bytes_are_no_success(
    gs: FakeGCS, composing: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gs, "composes_backwards", True)
    assert isinstance(composing.create("large", DATA), Exists)


@pytest.mark.parametrize("ignores", [False, True])
def test_parts_are_checked_where_a_wrong_checksum_was_refused(
    gs: FakeGCS, composing: GCSStore, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    monkeypatch.setattr(gs, "ignores_checksums", ignores)
    assert checks_uploads(composing, "trial") is not ignores
    answer = composing.create("large", DATA)
    assert isinstance(answer, Created) and answer.checked is not ignores
    assert names_in(gs) == ["runs/one/large"]


def test_parts_of_a_killed_writer_go_after_a_day(gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else, whatever its name; nor does a strange name hide the ones behind it."""
    monkeypatch.setattr(transfers, "LIST_PAGE", 2)
    part, others = (
        f"parts-of-uploads/delta/iowa/k/{nonce()}-00",
        ["parts-of-uploads/part-00000.parquet", "delta/iowa/k"],
    )
    for key in (part, *others):
        store.create(key, b"12345")
    strange = f"runs/one/parts-of-uploads/a b/{nonce()}-00"
    gs.objects["bucket"][strange] = Blob(b"?", 1)
    for number in range(5):
        store.create(f"parts-of-uploads/c/{number}", b"x")
    assert discard_leftovers_at(store.url) == Discarded()
    now_s = clock.wall_s()
    monkeypatch.setattr(clock, "wall_s", lambda: now_s + gcs.OLD_PART_S + 1)
    assert discard_leftovers_at(store.url) == Discarded(1, 5)
    left = names_in(gs)
    assert f"runs/one/{part}" not in left and {strange, *(f"runs/one/{key}" for key in others)} <= set(left)


def test_an_emulator_that_is_not_on_this_machine_needs_tls(gs: FakeGCS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://storage.example.com")
    with pytest.raises(StoreForbiddenError, match="loopback"):
        GCSStore("bucket").get("k")


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


def test_soft_delete_and_versioning_of_a_bucket_are_read(gs: FakeGCS) -> None:
    settings: dict[str, object] = {}
    gs.settings["bucket"] = settings
    store = GCSStore("bucket")
    assert store.retention("k").kept_s == 0
    settings["softDeletePolicy"] = {"retentionDurationSeconds": "604800", "effectiveTime": "2024-03-01T00:00:00Z"}
    week = store.retention("k")
    assert week.kept_s == 7 * 86_400 and week.turn_off.endswith("gs://bucket --clear-soft-delete")
    settings["versioning"] = {"enabled": True}
    assert store.retention("k").kept_s is None
    with pytest.raises(StoreGoneError, match="no such bucket"):
        GCSStore("nobody-has-this").retention("k")
    del gs.settings["bucket"]


def test_settings_that_may_not_be_read_are_no_fault(gs: FakeGCS) -> None:
    gs.inject("403", "GET")
    place = Place(lambda: GCSStore("bucket"), "gs://bucket", Deadline(20))
    found = retention(place, None)
    assert (found.level, "may not read" in found.detail) == ("skip", True)
